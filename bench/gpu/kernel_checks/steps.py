"""What a step costs the host whose rows it makes: launches, made directly and by Triton.

Invariant: each way is compared with the plain one in the same process, and has to draw the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from kernel_checks.timing import host_us, wall_us

from seer.doctor.device import GPU, sampler
from seer.doctor.report_lines import Report
from seer.doctor.sample_rows import HISTORY, of_kind, random_logits
from seer.services.engine.vllm.sampling.rows import RowParams, SamplingTable

_VOCAB = 151_936 if GPU else 384
_KNOWN = HISTORY if GPU else 100
_STEPS = 150
"""Timed steps at most."""

_FIX = "report the versions and this line"


def steps(report: Report) -> None:
    """Time a whole step, its launches made directly and by Triton."""
    if not GPU:
        report.skip("no GPU: a step is one call of the native kernel")
        return
    _, sample = sampler()
    for rows in (1, 64, 256, 1024):
        logits = random_logits(rows, _VOCAB, torch.bfloat16)
        for kind in ("plain", "top_p", "top_k_top_p", "penalties"):
            table, history = of_kind(kind, rows, _VOCAB, _KNOWN + _STEPS)
            position = iter(range(_KNOWN, 1 << 30))

            def params(
                table: SamplingTable = table, history: npt.NDArray[np.int32] | None = history,
                position: Iterator[int] = position, rows: int = rows,
            ) -> RowParams:  # fmt: skip
                return table.step(np.full(rows, next(position)), history)

            draw = functools.partial(sample, logits)
            given = params()
            directly = _read(draw(given))
            times = {
                "step_us": wall_us(lambda draw=draw, params=params: _read(draw(params()))),
                "launched_us": host_us(lambda draw=draw, params=params: draw(params())),
            }
            with mock.patch("seer.services.engine.vllm.sampling.triton_sampler.launch", _by_triton):
                equal = all(map(torch.equal, directly, _read(draw(given))))
                times["launched_by_triton_us"] = host_us(lambda draw=draw, params=params: draw(params()))
            report.expect(equal, f"{rows} rows {kind}: a step draws what Triton's launches do", _FIX, **times)
        random_logits.cache_clear()


def _read(drawn: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Return tokens, and the bits of logprobs, on the host."""
    return [each.cpu().view(torch.int32) for each in drawn]


def _by_triton(kernel: object, programs: int, arguments: tuple[object, ...], *constants: int) -> None:
    from seer.services.engine.vllm.sampling.triton_kernels import LAUNCH

    kernel[(programs,)](*arguments, *constants, **LAUNCH)  # type: ignore[index]
