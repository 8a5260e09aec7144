"""The teacher: engines in this process, forced along the reference, give every token mismatch its verdict.

Logprobs that differ are bugs whatever the teacher has; it says its own: which run is off tells where to look.

Invariants:
- no engine is loaded unless there is something to judge, and one at a time;
- the teacher is no engine of a cell, and goes another way than any cell: `logit_spread.logits_by_ways`;
- it runs the reference's configuration; a cell whose engine computes otherwise (tensor
  parallelism) adds its own engine's logits to the ways in which a context was reached;
- a cell with `ENOUGH_BUGS` has failed: its other mismatches stay unjudged, and are called so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from seer.client.image_uploads import Placed
from seer.client.results import Group, Response
from seer.common import ids
from seer.common.config import Config, EngineConfig
from seer.common.data_parallel import one_rank
from seer.common.types import SamplingParams
from seer.local.hardware import plan_engines
from seer.services.engine.backend import PlacedImage
from seer.verify.compare import Mismatch
from seer.verify.numeric_or_bug import Evidence, judge_token, logprob, logprob_deviation
from seer.verify.report import CellReport, Report
from seer.verify.turns import Shown

if TYPE_CHECKING:
    from seer.services.engine.vllm.backend import VllmBackend

ENOUGH_BUGS = 20

Compared = tuple[Sequence[Group], Sequence[Group]]
"""Groups of a cell's reference, and its own."""


@dataclass(slots=True)
class Divergence:
    """One mismatch of tokens or logprobs.

    `own` [1, vocab], of tokens, is from the engine of `found`, if that computes otherwise.
    """

    mismatch: Mismatch
    reference: Response
    found: Response
    prompt: list[int]
    images: Sequence[Placed] = ()
    own: npt.NDArray[np.float32] | None = None

    @property
    def context(self) -> list[int]:
        """All tokens before the divergence."""
        output: list[int] = self.reference.token_ids[: self.mismatch.position].tolist()
        return self.prompt + output

    @property
    def shown(self) -> tuple[PlacedImage, ...]:
        """All images in the context; a tool may have shown others later."""
        end = len(self.prompt) + self.mismatch.position
        return tuple(PlacedImage(each.on_wire, each.image) for each in self.images if each.offset < end)


def judge(
    report: Report,
    config: Config,
    engines: Mapping[str, EngineConfig],
    images: Shown,
    runs: Mapping[str, Compared],
    say: Callable[[str], None],
) -> None:
    """Give every token mismatch in `report` its verdict, and logprobs that differ the teacher's.

    `config` is the reference's; `engines` and `runs` hold each cell's engine, and what was compared, by
    name; `images` is what responses saw.
    """
    cases = [
        (cell, slot, case)
        for cell in report.cells
        if cell.name in runs
        for slot, case in _cases(cell, *runs[cell.name], images)
    ]
    if not cases:
        return
    say(f"judging {len(cases)} mismatches")
    tokens = [(engines[cell.name], case) for cell, _, case in cases if case.mismatch.kind == "token"]
    for engine in dict.fromkeys(engine for engine, _ in tokens):
        if engine != config.engine:
            with in_process(replace(config, engine=engine)) as backend:
                for own, case in tokens:
                    if own == engine:
                        case.own = backend.probe.logits(case.context, len(case.prompt), case.shown)[None]
    with in_process(config) as backend:
        for cell, slot, case in cases:
            cell.mismatches[slot] = _judge(cell, case, report, backend)


def _cases(
    cell: CellReport, reference: Sequence[Group], found: Sequence[Group], images: Shown
) -> Iterator[tuple[int, Divergence]]:
    ours = {group.prompt_id: group for group in reference}
    theirs = {group.prompt_id: group for group in found}
    for slot, mismatch in enumerate(cell.mismatches):
        if mismatch.kind in ("token", "logprob"):
            group = ours[mismatch.prompt_id]
            yield (
                slot,
                Divergence(
                    mismatch=mismatch,
                    reference=group.responses[mismatch.index],
                    found=theirs[mismatch.prompt_id].responses[mismatch.index],
                    prompt=group.prompt_token_ids.tolist(),
                    images=images.get((mismatch.prompt_id, mismatch.index), ()),
                ),
            )


def _judge(cell: CellReport, case: Divergence, report: Report, backend: VllmBackend) -> Mismatch:
    mismatch, sampling = case.mismatch, cell.sampling or report.sampling
    if mismatch.kind == "logprob":
        return mismatch if len(cell.with_teacher) >= ENOUGH_BUGS else with_logprob(case, sampling, backend)
    if cell.count("bug", judged=True) >= ENOUGH_BUGS:
        return replace(mismatch, verdict="unjudged")
    key = ids.request_key(report.seed, report.rollout_number, mismatch.prompt_id, mismatch.index)
    return judged(case, sampling, report.dtype, report.logprob_tolerance, backend, key)


def judged(
    case: Divergence,
    sampling: SamplingParams,
    dtype: str,
    tolerance: float,
    backend: VllmBackend,
    key: int,
) -> Mismatch:
    """Return a token mismatch with its verdict. `key` is the noise's, `dtype` the model's."""
    evidence = _evidence(case, sampling, dtype, backend, key)
    position = case.mismatch.position
    deviation = logprob_deviation(case.reference, case.found, position, evidence, sampling.temperature)
    return judge_token(case.mismatch, evidence, sampling, tolerance, deviation)


def with_logprob(case: Divergence, sampling: SamplingParams, backend: VllmBackend) -> Mismatch:
    """Return logprobs that differ with the teacher's; as they are where truncation decides them."""
    from seer.services.engine.vllm.logit_spread import forbid

    if sampling.logprobs == "processed":
        return case.mismatch
    logits = backend.probe.logits(case.context, len(case.prompt), case.shown)[None]
    forbid(logits, case.context, len(case.prompt), sampling, backend.core)
    temperature = sampling.temperature if sampling.logprobs == "scaled" else 1.0
    token = int(case.reference.token_ids[case.mismatch.position])
    return replace(case.mismatch, expected=logprob(logits[0], token, temperature))


def _evidence(
    case: Divergence, sampling: SamplingParams, dtype: str, backend: VllmBackend, key: int
) -> Evidence:
    from seer.services.engine.vllm.logit_spread import forbid, logits_by_ways, noisy_values

    context, prompt_len = case.context, len(case.prompt)
    logits = logits_by_ways(backend.probe, context, prompt_len, key, sampling, case.shown)
    forbid(logits, context, prompt_len, sampling, backend.core)
    processed, noisy = noisy_values(logits[0], context, prompt_len, key, sampling, backend.core.eos_ids)
    ways = logits if case.own is None else np.concatenate([logits, case.own])
    return Evidence(ways, processed, noisy, dtype)


@contextmanager
def in_process(config: Config) -> Iterator[VllmBackend]:
    """Have an engine of this configuration in this process."""
    from seer.services.engine.vllm.backend import VllmBackend

    (plan,) = plan_engines(one_rank(config.engine), 1)
    os.environ.update(plan.environ)
    backend = VllmBackend(plan.config, config.shared)
    backend.start()
    try:
        yield backend
    finally:
        backend.close()
