"""Verdicts on token mismatches, by one engine in this process that is forced along the reference.

Invariants:
- no engine is loaded unless there is something to judge;
- the engine runs the reference's configuration; a context is computed once for all cells;
- a cell with `ENOUGH_BUGS` has failed: its other mismatches stay unjudged, and are called so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from seer.client.rollout import Group, Response
from seer.common import ids
from seer.common.config import Config
from seer.hardware import plan_engines
from seer.verify.compare import Evidence, judge_token, logprob_deviation
from seer.verify.report import CellReport, Report

if TYPE_CHECKING:
    from seer.services.engine.vllm.backend import VllmBackend

ENOUGH_BUGS = 20

Context = tuple[str, int, int]
"""Prompt id, response index, number of output tokens before."""


def judge(
    report: Report,
    config: Config,
    reference: Sequence[Group],
    runs: Mapping[str, Sequence[Group]],
    say: Callable[[str], None],
) -> None:
    """Give every token mismatch in `report` its verdict; `runs` holds the groups of its cells."""
    pending: dict[Context, list[tuple[CellReport, int]]] = {}
    for cell in report.cells:
        for slot, mismatch in enumerate(cell.mismatches):
            if mismatch.kind == "token":
                context = mismatch.prompt_id, mismatch.index, mismatch.position
                pending.setdefault(context, []).append((cell, slot))
    if not pending:
        return
    say(f"judging {sum(map(len, pending.values()))} token mismatches")
    responses = {name: _by_index(groups) for name, groups in runs.items()}
    ours = _by_index(reference)
    prompts = {group.prompt_id: group.prompt_token_ids.tolist() for group in reference}
    with _teacher(config) as backend:
        for (prompt_id, index, position), slots in pending.items():
            evidence = None
            for cell, slot in slots:
                mismatch = cell.mismatches[slot]
                if cell.count("bug", judged=True) >= ENOUGH_BUGS:
                    cell.mismatches[slot] = msgspec.structs.replace(mismatch, verdict="unjudged")
                    continue
                if evidence is None:
                    key = ids.request_key(report.seed, report.rollout_number, prompt_id, index)
                    output = ours[prompt_id, index].token_ids[:position].tolist()
                    evidence = _evidence(backend, report, prompts[prompt_id], output, key)
                deviation = logprob_deviation(
                    ours[prompt_id, index],
                    responses[cell.name][prompt_id, index],
                    position,
                    evidence,
                    report.sampling.temperature,
                    report.logprob_tolerance,
                )
                cell.mismatches[slot] = judge_token(mismatch, evidence, report.sampling, deviation)


def _by_index(groups: Sequence[Group]) -> dict[tuple[str, int], Response]:
    return {(group.prompt_id, response.index): response for group in groups for response in group.responses}


@contextmanager
def _teacher(config: Config) -> Iterator[VllmBackend]:
    from seer.services.engine.vllm.backend import VllmBackend

    (plan,) = plan_engines(config.engine, 1)
    os.environ.update(plan.environ)
    backend = VllmBackend(plan.config, config.shared)
    backend.start()
    try:
        yield backend
    finally:
        backend.close()


def _evidence(
    backend: VllmBackend, report: Report, prompt: list[int], output: list[int], key: int
) -> Evidence:
    from seer.services.engine.vllm.teacher import logits_by_ways, noisy_values

    context, sampling = prompt + output, report.sampling
    logits = logits_by_ways(backend, context, len(prompt), key, sampling)
    processed, noisy = noisy_values(logits[0], context, len(prompt), key, sampling)
    return Evidence(logits, processed, noisy, report.dtype)
