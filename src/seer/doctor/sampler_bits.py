"""The device's sampler draws the reference's tokens, bit for bit, and the same every time.

Invariants:
- the reference is `torch_sampler` on the CPU; what is too large for that is compared with it on the device,
  after both have been compared with each other;
- every truncation and penalty, three float types, rows that lie anywhere, every batch size of `_SLICES`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import torch

from seer.common.errors import EngineError
from seer.doctor.device import DEVICE, GPU, INTERPRETED, sampler, wait
from seer.doctor.report_lines import Report
from seer.doctor.sample_rows import KINDS, Rows, drafted, every_parameter, of_kind, random_logits
from seer.services.engine.vllm.sampling import torch_sampler, vectors
from seer.services.engine.vllm.sampling.rows import RowParams
from seer.services.engine.vllm.sampling.torch_sampler import SampleFunction

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES = (
    ((151_936, 48), (384, 300), (32_000, 300), (128_256, 48)) if GPU else ((384, 8),) if INTERPRETED
    else ((384, 100), (32_000, 24))
)  # fmt: skip
"""Vocabularies, and rows that the reference draws on the CPU."""

_SLICES = ((0, 1), (1, 2), (3, 4), (0, 64), (7, 71), (64, 300))
"""Rows that are drawn again as a batch of their own."""

_MANY = (151_936, 1_030)
"""Vocabulary and rows that the reference draws on the GPU."""

_FIX = "do not run this version of Triton and torch on this GPU; report the versions and this line"

Drawn = tuple[torch.Tensor, torch.Tensor]


def bits(report: Report) -> None:
    """Compare the sampler's tokens with the reference's."""
    name, sample = sampler()
    if INTERPRETED:
        report.skip(f"{name}: the vectors shipped with the package take minutes; `make kernel-test` has them")
    else:
        _check_vectors(report, name, sample)
    if GPU:
        _check_reference(report)
        for dtype in _TYPES[:2]:
            _check_many(report, sample, dtype)
    _check_tokens(report, sample, drafted(*((5, 384) if INTERPRETED else (64, 32_000))), "rows after drafts")
    for vocab, rows in _SIZES:
        for dtype in _TYPES:
            _check_size(report, sample, every_parameter(rows, vocab, dtype))


def _check_vectors(report: Report, name: str, sample: SampleFunction) -> None:
    try:
        vectors.self_test(sample, DEVICE)
    except EngineError as error:
        report.expect(False, f"{name}: {error}", _FIX)
    else:
        report.expect(True, f"{name}: the vectors shipped with the package", _FIX)


def _check_size(report: Report, sample: SampleFunction, rows: Rows) -> None:
    shape = (
        f"{len(rows.logits)} rows x {rows.logits.shape[1]} {str(rows.logits.dtype).removeprefix('torch.')}"
    )
    drawn = _check_tokens(report, sample, rows, shape)
    wrong = 0
    logits = rows.logits.to(DEVICE)
    for moved in _layouts(logits):
        wrong += _different(sample(moved, rows.params), drawn)
    parts = [] if INTERPRETED else [(start, stop) for start, stop in _SLICES if start < len(logits)]
    for start, stop in parts:
        alone = sample(logits[start:stop], rows.params.part(start, stop))
        wrong += _different(alone, (drawn[0][start:stop], drawn[1][start:stop]))
    text = f"{shape}: tokens and logprobs are the same wherever logits lie, and in {len(parts)} other batches"
    report.expect(wrong == 0, text, _FIX, different=wrong)


def _check_tokens(report: Report, sample: SampleFunction, rows: Rows, shape: str) -> Drawn:
    begun = time.perf_counter()
    expected = torch_sampler.sample(rows.logits, rows.params)
    seconds = time.perf_counter() - begun
    drawn = sample(rows.logits.to(DEVICE), rows.params)
    differ, worst = _compare(drawn, expected)
    good = differ == 0 and worst <= 1
    report.expect(
        good, f"{shape}: the reference's tokens", _FIX, different=differ, sampled=int((drawn[0] >= 0).sum()),
        logprob_error_of_allowed=worst, reference_seconds=seconds,
    )  # fmt: skip
    return drawn


def _compare(drawn: Drawn, expected: Drawn) -> tuple[int, float]:
    """Return how many tokens differ, and the worst logprob error as a share of what is allowed."""
    differ = int((drawn[0].cpu() != expected[0].cpu()).sum())
    known, shown = expected[1].cpu().double(), drawn[1].cpu().double()
    differ += int((known.isnan() != shown.isnan()).sum())
    error = (shown - known).abs() / (1e-4 + 2e-4 * known.abs())
    same = (shown == known) | known.isnan()
    return differ, float(torch.where(same, 0.0, error).max())


def _different(drawn: Drawn, other: Drawn) -> int:
    """Return how many rows differ in a bit of token or logprob."""
    return int(((drawn[0] != other[0]) | (drawn[1].view(torch.int32) != other[1].view(torch.int32))).sum())


def _layouts(logits: torch.Tensor) -> Iterator[torch.Tensor]:
    rows, vocab = logits.shape
    for before, after in ((1, 2), (0, 7)):
        moved = torch.full((rows, before + vocab + after), 6e4, dtype=logits.dtype, device=logits.device)
        moved = moved[:, before : before + vocab]
        moved.copy_(logits)
        yield moved
    yield logits.t().contiguous().t()


def _check_reference(report: Report) -> None:
    rows = every_parameter(96, 32_000, torch.float32)
    differ, worst = _compare(
        torch_sampler.sample(rows.logits.to(DEVICE), rows.params),
        torch_sampler.sample(rows.logits, rows.params),
    )
    report.expect(
        differ == 0 and worst <= 1,
        "torch draws the same on GPU and CPU: 96 rows x 32000",
        _FIX,
        different=differ,
    )


def _check_many(report: Report, sample: SampleFunction, dtype: torch.dtype) -> None:
    vocab, rows = _MANY
    differ, worst, drawn = 0, 0.0, 0
    for kind in KINDS:
        table, history = of_kind(kind, rows, vocab, 2_000)
        params = table.step(np.arange(rows) % 1_900 + 100, history)
        logits = random_logits(rows, vocab, dtype)
        more, worse = _compare(sample(logits, params), torch_sampler.sample(logits, params))
        differ, worst, drawn = differ + more, max(worst, worse), drawn + rows
    shape = f"{rows} rows x {vocab} {str(dtype).removeprefix('torch.')}"
    text = f"{shape} of {len(KINDS)} kinds, against torch on the GPU"
    report.expect(
        differ == 0 and worst <= 1, text, _FIX, different=differ, of=drawn, logprob_error_of_allowed=worst
    )


def repeats(report: Report) -> None:
    """Draw the same again: threads that race do not always lose."""
    name, sample = sampler()
    rows, vocab, times = (512, 151_936, 20) if GPU else (2, 2_100, 1)
    rng = np.random.default_rng(3)
    for kind in KINDS:
        table, history = of_kind(kind, rows, vocab, 200)
        params = table.step(rng.integers(100, 200, rows), history)
        logits = random_logits(rows, vocab, torch.float32).mul(4).round()  # ties
        first = sample(logits, params)
        different = sum(_different(sample(logits, params), first) for _ in range(times))
        text = f"{name}: {rows} rows x {vocab} of kind {kind}, {times} times more: every bit the same"
        report.expect(different == 0, text, _FIX, different=different)
        _check_company(report, sample, logits, params, first, kind)
    wait()


def _check_company(
    report: Report, sample: SampleFunction, logits: torch.Tensor, params: RowParams, first: Drawn, kind: str
) -> None:
    rows = min(256, len(logits))
    alone = range(0, rows, max(1, rows // 16))
    different = sum(
        _different(
            sample(logits[row : row + 1], params.part(row, row + 1)),
            (first[0][row : row + 1], first[1][row : row + 1]),
        )
        for row in alone
    )
    order = np.random.default_rng(rows).permutation(len(logits))
    where = torch.from_numpy(order).to(DEVICE)
    shuffled = dataclasses.replace(params, records=params.records[order])
    different += _different(sample(logits[where], shuffled), (first[0][where], first[1][where]))
    text = f"kind {kind}: {len(alone)} rows alone, and all in another order, as in the batch"
    report.expect(different == 0, text, _FIX, different=different)
