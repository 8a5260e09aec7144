"""What a step costs the host whose rows it makes: launches, reading the results.

Invariant: each way is compared with the plain one in the same process, and has to draw the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from kernel_checks.timing import host_us, wall_us

from seer.doctor.device import DEVICE, GPU, sampler
from seer.doctor.report_lines import Report
from seer.doctor.sample_rows import HISTORY, of_kind, random_logits
from seer.services.engine.vllm.sampling.rows import RowParams, SamplingTable
from seer.services.engine.vllm.sampling.sampler import StepSampler

_VOCAB = 151_936 if GPU else 384
_KNOWN = HISTORY if GPU else 100
_STEPS = 150
"""Timed steps at most."""

_FIX = "report the versions and this line"


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
    """Return microseconds: of a step, and of other ways: two reads, launches by Triton."""
    begun = functools.partial(_begun, logits, params)
    times = {"step_us": wall_us(lambda: draw(logits, params())), "launched_us": host_us(begun)}
    with mock.patch("seer.services.engine.vllm.sampling.triton_sampler.launch", _by_triton):
        return times | {"launched_by_triton_us": host_us(begun), "before_us": wall_us(apart)}


def _begun(logits: torch.Tensor, params: Callable[[], RowParams]) -> object:
    """Do a step up to its read."""
    from seer.services.engine.vllm.sampling import triton_sampler

    return triton_sampler.sample_packed(logits, params())


def _apart(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, logprobs = sampler()[1](logits, params)
    return tokens.cpu(), logprobs.cpu()


def _by_triton(kernel: object, programs: int, arguments: tuple[object, ...], *constants: int) -> None:
    from seer.services.engine.vllm.sampling.triton_kernels import LAUNCH

    kernel[(programs,)](*arguments, *constants, **LAUNCH)  # type: ignore[index]
