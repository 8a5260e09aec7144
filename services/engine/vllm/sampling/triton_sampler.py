"""The sampler on GPUs: one Triton kernel, one launch, one program per row.

Invariants:
- tokens are those of `torch_sampler`, bit for bit: nothing fuses a product and a sum (`LAUNCH`),
  division is `div_rn` (Triton's `/` is approximate), and sums that decide are of integers;
- a row without cuts reads its logits once; top-k and top-p each read them up to 17 times more, for
  an exact search that needs no scratch memory and no order among the program's threads;
- nothing waits for the device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from seer.services.engine.vllm.sampling import torch_sampler
from seer.services.engine.vllm.sampling.rows import RECORD, RowParams

_BLOCK = tl.constexpr(2048)
"""Tokens at a time: 4 for each of a program's 512 threads, the words of one Philox counter."""

LAUNCH = {"num_warps": 16, "enable_fp_fusion": False}
"""Options of every compilation; older Tritons fuse by default."""

_SLAB_ELEMENTS = 1 << 26
"""Most logits in one launch: if every row has edits, their marks take 512 MiB."""

_STOP = 1 << 31
_RECORD_WORDS = RECORD.itemsize // 8


def _at(name: str) -> tl.constexpr:
    fields = RECORD.fields
    assert fields is not None  # noqa: S101 - a structured dtype has fields
    kind, offset = fields[name][:2]
    return tl.constexpr(offset // kind.itemsize)


_KEY, _POSITION, _TOP_P, _TEMPERATURE = (_at(n) for n in ("key", "position", "top_p", "temperature"))
_REPETITION, _FREQUENCY, _PRESENCE = (_at(n) for n in ("repetition", "frequency", "presence"))
_LOG_MIN_P, _TOP_K, _LOGPROBS = (_at(n) for n in ("log_min_p", "top_k", "logprobs"))
_WORDS = tl.constexpr(_RECORD_WORDS + 1)
_LOG_POLY, _EXP_POLY = tl.constexpr(torch_sampler.LOG_POLY), tl.constexpr(torch_sampler.EXP_POLY)
_SQRT_HALF_BITS = tl.constexpr(torch_sampler.SQRT_HALF_BITS)
_LN2_HIGH, _LN2_LOW = tl.constexpr(torch_sampler.LN2_HIGH), tl.constexpr(torch_sampler.LN2_LOW)
_LOWEST, _INF = tl.constexpr(float(np.finfo(np.float32).min)), tl.constexpr(float("inf"))


@triton.jit
def _split(x):
    offset = x.to(tl.int32, bitcast=True) - _SQRT_HALF_BITS
    mantissa = ((offset & 0x7FFFFF) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    return (offset >> 23).to(tl.float32), mantissa - 1.0


@triton.jit
def _log(e, f):
    z = f * f
    y = f * _LOG_POLY[0] + _LOG_POLY[1]
    for i in tl.static_range(2, 9):
        y = y * f + _LOG_POLY[i]
    y = y * f * z
    y = y + e * _LN2_LOW
    y = y - z * 0.5
    return (f + y) + e * _LN2_HIGH


@triton.jit
def _gumbel(word):
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    v = tl.minimum(v, 0.99999994039535522)  # 1 - 2^-24
    e, f = _split(1.0 - v)
    exponential = -_log(e, tl.where(e == 0.0, -v, f))
    e, f = _split(exponential)
    return -_log(e, f)


@triton.jit
def _noise(key, position, start):
    counter = (start // 4 + tl.arange(0, _BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, counter, zero + low, zero + high, zero)
    return _gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def _exp(y):
    y = tl.maximum(y, -87.0)
    shifted = y * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    r = y - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    q = r * _EXP_POLY[0] + _EXP_POLY[1]
    for i in tl.static_range(2, 6):
        q = q * r + _EXP_POLY[i]
    q = q * (r * r) + r
    q = q + 1.0
    return q * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load(row, start):
    """Return a block's raw and processed logits; -inf beyond the vocabulary."""
    vocab, logits, marks, edited, divisor, repetition, frequency, presence = row
    token = start + tl.arange(0, _BLOCK)
    raw = tl.load(logits + token, mask=token < vocab, other=-_INF)
    x = raw
    if edited:
        mark = tl.load(marks + token, mask=token < vocab, other=0)
        x = x + (mark >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((mark & 1) != 0, repeated, x)
        count = ((mark >> 1) & 0x3FFFFFFF).to(tl.int32).to(tl.float32)
        reduced = x - frequency * count
        x = tl.where(count > 0.0, reduced - presence, x)
        x = tl.where((mark & 0x80000000) != 0, -_INF, x)
    return raw, tl.div_rn(x, divisor)


@triton.jit
def _top(row):
    top = tl.full([_BLOCK], -_INF, tl.float32)
    for start in range(0, row[0], _BLOCK):
        _, x = _load(row, start)
        top = tl.where(x > top, x, top)
    return tl.max(top, 0)


@triton.jit
def _ordinal(x):
    """Return an integer that orders as the float does, both zeros alike."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits).to(tl.int64)


@triton.jit
def _value(ordinal):
    bits = tl.where(ordinal < 0, -ordinal | 0x80000000, ordinal)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, top, weighed: tl.constexpr):
    return (_exp(x - top) * 1073741824.0).to(tl.int64) if weighed else tl.full(x.shape, 1, tl.int64)


@triton.jit
def _search(row, keep, top, needed, weighed: tl.constexpr):
    """Return the largest value in (keep, top] whose tokens at or above it weigh `needed`, else `keep`."""
    low, high = _ordinal(keep), _ordinal(top)
    while low < high:
        step = (high - low + 4) >> 2  # a quarter of the candidates, rounded up
        one, two = _value(low + step), _value(tl.minimum(low + 2 * step, high))
        three = _value(tl.minimum(low + 3 * step, high))
        above_one = tl.zeros([_BLOCK], tl.int64)
        above_two = tl.zeros([_BLOCK], tl.int64)
        above_three = tl.zeros([_BLOCK], tl.int64)
        for start in range(0, row[0], _BLOCK):
            _, x = _load(row, start)
            weight = _weight(x, top, weighed)
            above_one += tl.where(x >= one, weight, 0)
            above_two += tl.where(x >= two, weight, 0)
            above_three += tl.where(x >= three, weight, 0)
        reached = (tl.sum(above_one, 0) >= needed).to(tl.int64)
        reached += (tl.sum(above_two, 0) >= needed).to(tl.int64)
        reached += (tl.sum(above_three, 0) >= needed).to(tl.int64)
        next_low = tl.minimum(low + reached * step, high)
        high = tl.minimum(low + (reached + 1) * step - 1, high)
        low = next_low
    return _value(low)


@triton.jit
def _cut(row, log_min_p, top_k, top_p):
    """Return the value below which tokens drop."""
    top = _top(row)
    keep = top + log_min_p
    if (top > -_INF) & (top < _INF):
        if (top_k > 0) & (top_k < row[0]):
            keep = _search(row, keep, top, top_k.to(tl.int64), False)
        if top_p < 1.0:
            mass = tl.zeros([_BLOCK], tl.int64)
            for start in range(0, row[0], _BLOCK):
                _, x = _load(row, start)
                mass += tl.where(x >= keep, _weight(x, top, True), 0)
            needed = tl.ceil(top_p * tl.sum(mass, 0).to(tl.float64)).to(tl.int64)
            keep = _search(row, keep, top, tl.maximum(needed, 1), True)
    return keep


@triton.jit
def _draw(row, key, position, greedy, keep, shown_divisor, processed):
    """Return the row's token, -1 where there is none, and its logprob."""
    best = tl.full([_BLOCK], -_INF, tl.float32)
    best_token = tl.zeros([_BLOCK], tl.int32)
    best_shown = tl.zeros([_BLOCK], tl.float32)
    bad = tl.zeros([_BLOCK], tl.int32)
    peak = tl.full([_BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([_BLOCK], tl.float32)
    for start in range(0, row[0], _BLOCK):
        raw, x = _load(row, start)
        bad |= tl.where(raw < _INF, 0, 1)
        kept = tl.where(x >= keep, x, -_INF)
        shown = tl.where(processed, kept, tl.div_rn(raw, shown_divisor))
        new_peak = tl.where(shown > peak, shown, peak)
        total = total * tl.exp(peak - new_peak) + tl.exp(shown - new_peak)
        peak = new_peak
        noisy = kept
        if not greedy:
            noisy = kept + _noise(key, position, start)
        better = noisy > best
        best = tl.where(better, noisy, best)
        best_token = tl.where(better, start + tl.arange(0, _BLOCK), best_token)
        best_shown = tl.where(better, shown, best_shown)
    winner = tl.max(best, 0)
    token = tl.min(tl.where(best == winner, best_token, row[0]), 0)
    chosen = tl.max(tl.where((best == winner) & (best_token == token), best_shown, -_INF), 0)
    row_peak = tl.max(peak, 0)
    e, f = _split(tl.sum(total * tl.exp(peak - row_peak), 0))  # tl.log would fuse
    logprob = chosen - row_peak - _log(e, f)
    valid = (tl.max(bad, 0) == 0) & (winner > -_INF) & (winner < _INF)
    return tl.where(valid, token, -1), tl.where(valid, logprob, float("nan"))


@triton.jit
def sample_kernel(logits, stride, vocab, records, marks, tokens, logprobs):
    """Sample row `program_id(0)`; see `_launch` for the arguments."""
    at = tl.program_id(0).to(tl.int64)
    words = records + at * _WORDS
    floats = words.to(tl.pointer_type(tl.float32))
    integers = words.to(tl.pointer_type(tl.int32))
    temperature, mode = tl.load(floats + _TEMPERATURE), tl.load(integers + _LOGPROBS)
    log_min_p, top_k = tl.load(floats + _LOG_MIN_P), tl.load(integers + _TOP_K)
    top_p = tl.load(words.to(tl.pointer_type(tl.float64)) + _TOP_P)
    mark = tl.load(words + _WORDS - 1)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature)
    row = (
        vocab, logits + at * stride, marks + mark * vocab, mark >= 0, divisor,
        tl.load(floats + _REPETITION), tl.load(floats + _FREQUENCY), tl.load(floats + _PRESENCE),
    )  # fmt: skip
    keep = -_INF
    # The largest logit survives every cut: greedy rows need one for processed logprobs alone.
    if ((top_k > 0) | (top_p < 1.0) | (log_min_p > -1e30)) & ((mode == 2) | (temperature > 0.0)):
        keep = _cut(row, log_min_p, top_k, top_p)
    key, position = tl.load(words + _KEY), tl.load(words + _POSITION)
    shown_divisor = tl.where(mode == 1, 1.0, divisor)
    token, logprob = _draw(row, key, position, greedy, keep, shown_divisor, mode == 2)
    tl.store(tokens + at, token)
    tl.store(logprobs + at, logprob)


def _histories(
    params: RowParams, vocab: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return (row, token, whether it is output) of every token in the histories of penalised rows."""
    rows = np.flatnonzero(params.penalised)
    histories = [params.history_of(int(row)) for row in rows]
    lengths = [len(history) for history in histories]
    tokens = np.concatenate([np.empty(0, np.int64), *histories])
    index = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths, dtype=np.int64) - lengths, lengths)
    output = index >= np.repeat(params.records["prompt_len"][rows], lengths)
    inside = (tokens >= 0) & (tokens < vocab)
    return np.repeat(rows, lengths)[inside], tokens[inside], output[inside]


def _marks(params: RowParams, vocab: int, device: torch.device) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """Return the edits (bias, mask, penalties) of the edited rows' tokens, and each row's place there or -1.

    int64 [edited rows * vocab]: the bits of the bias in the high half; in the low one bit 31 for a
    masked token, its occurrences in the output times 2, and 1 for a token of the history.
    """
    records = params.records
    due = records["position"] - records["prompt_len"] < records["min_tokens"]
    stop_lens = np.where(due, records["stop_len"], 0)
    edited = params.penalised | (stop_lens > 0) | (records["bias_len"] > 0)
    place = np.where(edited, np.cumsum(edited) - 1, -1)
    marks = torch.zeros(int(edited.sum()) * vocab, dtype=torch.int64, device=device)
    if not len(marks):
        return marks, place

    def put(rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(place[rows] * vocab + tokens).to(device)

    rows, tokens, output = _histories(params, vocab)
    generated = put(rows[output], tokens[output])
    marks.index_fill_(0, put(rows, tokens), 1)
    marks.index_add_(0, generated, torch.full_like(generated, 2))
    rows, tokens, index = torch_sampler.ragged_points(
        records["bias_start"], records["bias_len"], params.bias_ids, vocab
    )
    bias = params.bias_values[index].view(np.int32).astype(np.int64) << 32
    marks.index_add_(0, put(rows, tokens), torch.from_numpy(bias).to(device))
    rows, tokens, _ = torch_sampler.ragged_points(records["stop_start"], stop_lens, params.stop_ids, vocab)
    marks.index_fill_(0, put(rows, tokens), _STOP)
    return marks, place


def _launch(logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
    rows, vocab = logits.shape
    marks, place = _marks(params, vocab, logits.device)
    words = np.empty((rows, _RECORD_WORDS + 1), np.int64)
    words[:, :-1] = params.records.view(np.int64).reshape(rows, -1)
    words[:, -1] = place
    sample_kernel[(rows,)](
        logits, logits.stride(0), vocab, torch.from_numpy(words).to(logits.device), marks, tokens, logprobs,
        **LAUNCH,
    )  # fmt: skip


def sample(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens int32 [rows], logprobs float32 [rows]) of float32 logits [rows, vocab].

    Reads nothing back from the device. Rows that cannot be sampled get token -1, logprob NaN.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    step = max(1, _SLAB_ELEMENTS // vocab)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        _launch(logits[part], params.part(start, start + step), tokens[part], logprobs[part])
    return tokens, logprobs
