"""What a step of an engine costs the host: histories of rows with penalties, launches, reading the results.

Invariants:
- each way is compared with the plain one in the same process, and has to draw the same bits;
- histories grow as in an engine: drafts are accepted in part, rows move, requests end and others begin.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from seer.common.types import SamplingParams
from seer.doctor.device import (
    DEVICE,
    GPU,
    INTERPRETED,
    device_us,
    host_us,
    peak_bytes,
    sampler,
    wall_us,
)
from seer.doctor.lines import Report
from seer.doctor.rows import HISTORY, KINDS, of_kind, random_logits
from seer.services.engine.vllm.sampling.device_histories import Histories
from seer.services.engine.vllm.sampling.rows import RequestSampling, RowParams, SamplingTable
from seer.services.engine.vllm.sampling.sampler import StepSampler

_VOCAB = 151_936 if GPU else 384
_KNOWN = HISTORY if GPU else 100
_STEPS = 150
"""Timed steps at most: later, histories reach the next power of two, and move."""

_FIX = "set no penalties on this machine; report the versions and this line"


def penalties(report: Report) -> None:
    """Compare histories that stay on the device with sending them at each step."""
    if not (GPU or INTERPRETED):
        report.skip("no GPU and no TRITON_INTERPRET=1: the native kernel counts in place")
        return
    from seer.services.engine.vllm.sampling import triton_sampler

    for rows in (64, 256, 1024) if GPU else (2,):
        table, history = of_kind("penalties", rows, _VOCAB, _KNOWN + _STEPS)
        logits = random_logits(rows, _VOCAB, torch.float32)
        sent = functools.partial(triton_sampler.sample, logits, table.step(np.full(rows, _KNOWN), history))
        if GPU:
            report.note(
                f"{rows} rows of {_KNOWN} tokens, histories sent", **_times(sent), peak_bytes=peak_bytes(sent)
            )
            histories, steps = Histories(), _growing(table, history)
            kept = functools.partial(_kept, logits, steps, histories)
            report.note(
                f"{rows} rows of {_KNOWN} tokens, histories kept", **_times(kept),
                peak_bytes=peak_bytes(kept), kept_bytes=4 * math.prod(histories.kept.shape),
            )  # fmt: skip
        random_logits.cache_clear()
    _check_schedule(report)


def _growing(table: SamplingTable, history: npt.NDArray[np.int32] | None) -> Iterator[RowParams]:
    assert history is not None  # noqa: S101 - this kind has one
    for position in range(_KNOWN, _KNOWN + _STEPS):
        yield table.step(np.full(len(history), position), history)


def _kept(logits: torch.Tensor, steps: Iterator[RowParams], histories: object) -> object:
    from seer.services.engine.vllm.sampling import triton_sampler

    return triton_sampler.sample(logits, next(steps), histories)  # type: ignore[arg-type]


def _times(call: Callable[[], object]) -> dict[str, float]:
    return {"device_us": device_us(call, calls=5), "wall_us": wall_us(call), "host_us": host_us(call)}


def _check_schedule(report: Report) -> None:
    """Draw what a changing batch draws, from histories that are kept, and from those sent anew."""
    from seer.services.engine.vllm.sampling import triton_sampler

    requests, changes = (48, 60) if GPU else (2, 3)
    rng, histories, different, drawn = np.random.default_rng(1), Histories(), 0, 0
    live = [_request(key) for key in range(requests)]
    tokens = [rng.integers(0, _VOCAB, rng.integers(1, _KNOWN)).tolist() for _ in live]
    for change in range(changes):
        order = rng.permutation(requests)[: rng.integers(1, requests + 1)]
        history = np.zeros((len(order), _KNOWN + 9 * changes), np.int32)
        for slot, request in enumerate(order):
            history[slot, : len(tokens[request])] = tokens[request]
        drafts = rng.integers(0, 4, len(order))
        ids = rng.integers(0, _VOCAB, drafts.sum()).astype(np.int32)
        positions = [len(tokens[request]) for request in order]
        params = SamplingTable([live[request] for request in order]).step(positions, history, drafts, ids)
        logits = random_logits(len(params.records), _VOCAB, torch.float32) / 8  # so that penalties decide
        one, other = (triton_sampler.sample(logits, params, kept) for kept in (histories, None))
        different += int(((one[0] != other[0]) | (one[1] != other[1])).sum())
        drawn += len(params.records)
        random_logits.cache_clear()
        for request, most in zip(order, drafts, strict=True):
            tokens[request] += rng.integers(0, _VOCAB, rng.integers(1, most + 2)).tolist()
        ends = rng.integers(requests)
        live[ends], tokens[ends] = _request(requests + change), rng.integers(0, _VOCAB, 50).tolist()
    text = f"{changes} steps of a batch that changes, with drafts: tokens as from histories sent anew"
    report.expect(different == 0, text, _FIX, different=different, of=drawn)


def _request(key: int) -> RequestSampling:
    sampling = SamplingParams(max_tokens=2**20, **KINDS["penalties"])  # type: ignore[arg-type]
    return RequestSampling.pack(sampling, key=key, prompt_len=20, stop_ids=(), vocab=_VOCAB)


def steps(report: Report) -> None:
    """Time a whole step, its launches made directly and by Triton, its results read at once and apart."""
    if not GPU:
        report.skip("no GPU: a step is one call of the native kernel")
        return
    _, sample = sampler()
    for rows in (1, 64, 256, 1024):
        logits = random_logits(rows, _VOCAB, torch.bfloat16)
        for kind in ("plain", "top_p", "top_k_top_p", "penalties"):
            table, history = of_kind(kind, rows, _VOCAB, _KNOWN + _STEPS)
            draw, position = StepSampler(DEVICE), iter(range(_KNOWN, 1 << 30))

            def params(
                table: SamplingTable = table, history: npt.NDArray[np.int32] | None = history,
                position: Iterator[int] = position, rows: int = rows,
            ) -> RowParams:  # fmt: skip
                return table.step(np.full(rows, next(position)), history)

            given = params()
            tokens, logprobs = draw(logits, given)
            other, shown = sample(logits, given)
            equal = np.array_equal(tokens, other.cpu().numpy()) and np.array_equal(
                logprobs, shown.cpu().numpy()
            )
            figures = _step_times(logits, params, draw, functools.partial(_apart, logits, given))
            report.expect(equal, f"{rows} rows {kind}: a step draws what one call does", _FIX, **figures)
        random_logits.cache_clear()


def _step_times(
    logits: torch.Tensor, params: Callable[[], RowParams], draw: StepSampler, apart: Callable[[], object]
) -> dict[str, float]:
    """Return microseconds: of a step, and of those before: histories sent, two reads, launches by Triton."""
    begun = functools.partial(_begun, logits, params, draw)
    times = {"step_us": wall_us(lambda: draw(logits, params())), "launched_us": host_us(begun)}
    with mock.patch("seer.services.engine.vllm.sampling.triton_sampler.launch", _by_triton):
        return times | {"launched_by_triton_us": host_us(begun), "before_us": wall_us(apart)}


def _begun(logits: torch.Tensor, params: Callable[[], RowParams], draw: StepSampler) -> object:
    """Do a step up to its read."""
    from seer.services.engine.vllm.sampling import triton_sampler

    return triton_sampler.sample_packed(logits, params(), draw.histories)


def _apart(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, logprobs = sampler()[1](logits, params)
    return tokens.cpu(), logprobs.cpu()


def _by_triton(kernel: object, programs: int, arguments: tuple[object, ...], *constants: int) -> None:
    from seer.services.engine.vllm.sampling.triton_kernels import LAUNCH

    kernel[(programs,)](*arguments, *constants, **LAUNCH)  # type: ignore[index]
