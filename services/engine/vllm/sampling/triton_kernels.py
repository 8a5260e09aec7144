"""The Triton kernels of the sampler on GPUs: a row is spread over one program per `BLOCK` tokens.

Invariants:
- tokens are those of `torch_sampler`, bit for bit: nothing fuses a product and a sum (`LAUNCH`),
  division is `div_rn` (Triton's `/` is approximate), and sums that decide are of integers;
- neither tokens nor logprobs depend on the batch, or on the type and alignment of the logits: parts
  follow from the vocabulary alone, and all sums over tokens are of integers, which have no order;
- a row without cuts is read once; a cut adds one reading for the maximum, and three or four for each of
  top-k and top-p, which look for the float where the weight is reached, 11 bits of it at a time.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from seer.services.engine.vllm.sampling import torch_sampler
from seer.services.engine.vllm.sampling.rows import RECORD

BLOCK = tl.constexpr(2048)
"""Tokens of one program."""

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
"""Options of every compilation; older Tritons fuse by default."""

BINS, _BITS = tl.constexpr(2048), tl.constexpr(11)
_FIRST_SHIFT = tl.constexpr(21)  # two floats are less than 2^32 ordinals apart
_WINDOW = tl.constexpr(10.0)
"""How far below the maximum a cut looks first: most are there, and each token counted takes an atomic."""

LEVELS = 4
"""Launches of a cut: one for the window, three for all 32 bits if that does not have it."""

_STOP = tl.constexpr(-(1 << 31))
RECORD_WORDS = RECORD.itemsize // 8

EXTRA_WORDS = {
    "arrived": 0, "mark": -1, "bias": -1, "history": -1, "top": -0x7F800000, "keep": -0x7F800000,
    "high": 0, "shift": 0, "needed": 0, "rest": 0,
}  # fmt: skip
"""What follows a row's record on the device, int64 each, and what it begins with.

`arrived` counts programs that are done; `mark` and `bias` are its rows of the edits, or -1; `history`
is where its tokens begin among all histories, if they count; `top` and `keep` are the ordinals of the maximum
and of the last kept value, -inf at first; `high`, `shift` and `needed` say where a cut goes on: in steps
of 2^`shift` from `high` down, until `needed` more weight is there, or not at all if `shift` is negative;
`rest` is the weight below top-p's first window.
"""


def _at(name: str) -> tl.constexpr:
    fields = RECORD.fields
    assert fields is not None  # noqa: S101 - a structured dtype has fields
    kind, offset = fields[name][:2]
    return tl.constexpr(offset // kind.itemsize)


_KEY, _POSITION, _TOP_P, _TEMPERATURE = (_at(n) for n in ("key", "position", "top_p", "temperature"))
_REPETITION, _FREQUENCY, _PRESENCE = (_at(n) for n in ("repetition", "frequency", "presence"))
_LOG_MIN_P, _TOP_K, _LOGPROBS = (_at(n) for n in ("log_min_p", "top_k", "logprobs"))
_PROMPT_LEN, _MIN_TOKENS = (_at(n) for n in ("prompt_len", "min_tokens"))
_STOP_START, _STOP_LEN = (_at(n) for n in ("stop_start", "stop_len"))
_BIAS_START, _BIAS_LEN = (_at(n) for n in ("bias_start", "bias_len"))
_EXTRA_START, _EXTRA_LEN = (_at(n) for n in ("extra_start", "extra_len"))
_EXTRA_WORD = tl.constexpr(_EXTRA_START.value // 2)  # both
PLACES = {name: RECORD_WORDS + i for i, name in enumerate(EXTRA_WORDS)}
_ARRIVED, _MARK, _BIAS, _HISTORY, _TOP, _KEEP = (tl.constexpr(place) for place in list(PLACES.values())[:6])
_HIGH, _SHIFT, _NEEDED, _REST = (tl.constexpr(place) for place in list(PLACES.values())[6:])
WORDS = tl.constexpr(RECORD_WORDS + len(EXTRA_WORDS))
_LANES = tl.constexpr(triton.next_power_of_2(WORDS.value))
_LOG_POLY, _EXP_POLY = tl.constexpr(torch_sampler.LOG_POLY), tl.constexpr(torch_sampler.EXP_POLY)
_SQRT_HALF_BITS = tl.constexpr(torch_sampler.SQRT_HALF_BITS)
_LN2_HIGH, _LN2_LOW = tl.constexpr(torch_sampler.LN2_HIGH), tl.constexpr(torch_sampler.LN2_LOW)
_LOWEST, _INF = tl.constexpr(float(np.finfo(np.float32).min)), tl.constexpr(float("inf"))
_INF_ORDINAL, _LAST_ID = tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)
_INVALID = tl.constexpr(0x7FFFFFFFFFFFFFFF)


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
    counter = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
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
def _ordinal(x):
    """Return an integer that orders as the float does, both zeros alike."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _value(ordinal):
    bits = tl.where(ordinal < 0, -ordinal | 0x80000000, ordinal)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _integer(words, field):
    return tl.load(words.to(tl.pointer_type(tl.int32)) + field)


@triton.jit
def _float(words, field):
    return tl.load(words.to(tl.pointer_type(tl.float32)) + field)


@triton.jit
def _divide(x, divisor):
    if divisor != 1.0:
        x = tl.div_rn(x, divisor)
    return x


@triton.jit
def _row(logits, stride, vocab, words, marks, biases, at):
    """Return what `_load` reads a row by."""
    mark, bias = tl.load(words + _MARK), tl.load(words + _BIAS)
    temperature = _float(words, _TEMPERATURE)
    return (
        vocab, logits + at * stride, mark >= 0, marks + mark * vocab, bias >= 0, biases + bias * vocab,
        tl.where(temperature == 0.0, 1.0, temperature),
        _float(words, _REPETITION), _float(words, _FREQUENCY), _float(words, _PRESENCE),
    )  # fmt: skip


@triton.jit
def _load(row, token):
    """Return the tokens' raw and processed logits; -inf beyond the vocabulary."""
    vocab, logits, marked, marks, biased, biases, divisor, repetition, frequency, presence = row
    raw = tl.load(logits + token, mask=token < vocab, other=-_INF).to(tl.float32)
    x = raw
    if biased:
        x = x + tl.load(biases + token, mask=token < vocab, other=0.0)
    if marked:
        mark = tl.load(marks + token, mask=token < vocab, other=0)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((mark & 0x7FFFFFFF) != 0, repeated, x)
        count = ((mark >> 1) & 0x3FFFFFFF).to(tl.float32)
        reduced = x - frequency * count
        x = tl.where(count > 0.0, reduced - presence, x)
        x = tl.where(mark < 0, -_INF, x)
    return raw, _divide(x, divisor)


@triton.jit
def _keep(words):
    """Return the value below which tokens drop, as far as the cuts have come."""
    lowest = _value(tl.load(words + _TOP)) + _float(words, _LOG_MIN_P)
    return tl.maximum(lowest, _value(tl.load(words + _KEEP)))


@triton.jit
def _is_last(words, parts):
    """Count this program; return whether it is its row's last program, which sees what all others wrote."""
    tl.debug_barrier()
    return tl.atomic_add(words + _ARRIVED, 1, sem="acq_rel") == parts - 1


@triton.jit
def rows_kernel(table, faults, slots, places, indices, positions, edits, words, edited: tl.constexpr):
    """Write the words of one row: its slot's, with its position and drafts, and its rows of the edits."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    place, index = tl.load(places + row).to(tl.int64), tl.load(indices + row).to(tl.int64)
    position = tl.load(positions + index).to(tl.int64) + 1
    word = tl.arange(0, _LANES)
    value = tl.load(table + slot * WORDS + word, mask=word < WORDS, other=0)
    wrong = tl.load(faults + slot) == position
    value = tl.where((word == _KEY) & wrong, value ^ 1, value)
    value = tl.where(word == _POSITION, position, value)
    value = tl.where(word == _EXTRA_WORD, (place << 32) | (index - place + 1), value)
    if edited:
        value = tl.where(word == _MARK, tl.load(edits + 2 * row), value)
        value = tl.where(word == _BIAS, tl.load(edits + 2 * row + 1), value)
    tl.store(words + row.to(tl.int64) * WORDS + word, value, mask=word < WORDS)


@triton.jit(do_not_specialize=["width"])
def accept_kernel(
    tokens, logprobs, starts, indices, inputs, sampled, values, gained, width, lanes: tl.constexpr
):  # fmt: skip
    """Spread a request's samples over its row of the outputs; -1 after the first rejected draft."""
    request = tl.program_id(0)
    first = tl.load(starts + request)
    drafts = tl.load(starts + request + 1) - first - 1
    place = tl.arange(0, lanes)
    inside = place <= drafts
    token = tl.maximum(tl.load(tokens + first + place, mask=inside, other=0), 0)
    logprob = tl.load(logprobs + first + place, mask=inside, other=0.0)
    index = tl.load(indices + first + place + 1, mask=place < drafts, other=0)
    draft = tl.load(inputs + index, mask=place < drafts, other=-1)
    wrong = tl.min(tl.where((place < drafts) & (token == draft), lanes, place), 0)
    at = request.to(tl.int64) * width + place
    tl.store(sampled + at, tl.where(place <= wrong, token, -1).to(tl.int64), mask=place < width)
    tl.store(values + at, logprob, mask=place < width)
    tl.store(gained + request, wrong + 1)


@triton.jit(do_not_specialize=["stops_at", "bias_at", "values_at", "chunks"])
def mark_kernel(
    words, edited, lists, extras, histories, marks, biases, vocab, stops_at, bias_at, values_at, chunks
):  # fmt: skip
    """Scatter one chunk of a row's history, stop ids and biases over the vocabulary.

    A mark int32 is 1 for a token of the prompt, plus twice its occurrences in the output; the sign
    bit masks it.
    """
    row = tl.load(edited + tl.program_id(0) // chunks)
    words += row * WORDS
    index = (tl.program_id(0) % chunks) * BLOCK + tl.arange(0, BLOCK)
    mark, bias = tl.load(words + _MARK), tl.load(words + _BIAS)
    marks += mark * vocab
    position, prompt_len = tl.load(words + _POSITION), _integer(words, _PROMPT_LEN)
    history = tl.load(words + _HISTORY)
    if history >= 0:
        extra_len = _integer(words, _EXTRA_LEN)
        known = position - extra_len
        _count(marks, vocab, histories + history, index, known, index >= prompt_len)
        extra = extras + _integer(words, _EXTRA_START)
        _count(marks, vocab, extra, index, extra_len, known + index >= prompt_len)
    if position - prompt_len < _integer(words, _MIN_TOKENS):
        stops = lists + stops_at + _integer(words, _STOP_START)
        token = tl.load(stops + index, mask=index < _integer(words, _STOP_LEN), other=-1)
        tl.atomic_or(marks + token, _STOP, mask=(token >= 0) & (token < vocab), sem="relaxed")
    if bias >= 0:
        start, inside = _integer(words, _BIAS_START), index < _integer(words, _BIAS_LEN)
        token = tl.load(lists + bias_at + start + index, mask=inside, other=-1)
        value = tl.load(lists + values_at + start + index, mask=inside, other=0)
        value = value.to(tl.float32, bitcast=True)
        tl.store(biases + bias * vocab + token, value, mask=(token >= 0) & (token < vocab))


@triton.jit
def _count(marks, vocab, tokens, index, length, is_output):
    token = tl.load(tokens + index, mask=index < length, other=-1)
    inside = (token >= 0) & (token < vocab)
    tl.atomic_or(marks + token, 1, mask=inside & (is_output == 0), sem="relaxed")
    tl.atomic_add(marks + token, 2, mask=inside & is_output, sem="relaxed")


@triton.jit(do_not_specialize=["blocks"])
def top_kernel(logits, stride, vocab, words, marks, biases, cut, blocks):
    """Raise the row's `top` to the maximum of one part, here of `blocks` blocks."""
    parts = tl.cdiv(vocab, BLOCK * blocks)
    at = tl.load(cut + tl.program_id(0) // parts)
    words += at * WORDS
    row = _row(logits, stride, vocab, words, marks, biases, at)
    top = tl.full([BLOCK], -_INF, tl.float32)
    first = (tl.program_id(0) % parts) * blocks
    for block in range(first, first + blocks):
        _, x = _load(row, block * BLOCK + tl.arange(0, BLOCK))
        top = tl.where(x > top, x, top)
    tl.atomic_max(words + _TOP, _ordinal(tl.max(top, 0)).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["blocks"])
def cut_kernel(
    logits, stride, vocab, words, marks, biases, cut, blocks, histograms,
    weighed: tl.constexpr, begins: tl.constexpr,
):  # fmt: skip
    """Take a top-k (or weighed: top-p) cut `_BITS` bits further."""
    parts = tl.cdiv(vocab, BLOCK * blocks)
    place = tl.program_id(0) // parts
    at = tl.load(cut + place)
    words += at * WORDS
    top, high, shift = tl.load(words + _TOP), tl.load(words + _HIGH), tl.load(words + _SHIFT)
    bins = tl.full([], BINS, tl.int64)
    if begins:
        high, shift = top, tl.full([], _FIRST_SHIFT, tl.int64)
        bins = tl.minimum(((top - _ordinal(_value(top) - _WINDOW)) >> shift) + 1, BINS)
    if (top > -_INF_ORDINAL) & (top < _INF_ORDINAL) & (shift >= 0):
        row = _row(logits, stride, vocab, words, marks, biases, at)
        histogram = histograms + place.to(tl.int64) * BINS
        rest = tl.zeros([], tl.int64)
        first, keep, highest = (tl.program_id(0) % parts) * blocks, _keep(words), high.to(tl.int32)
        for block in range(first, first + blocks):
            token = block * BLOCK + tl.arange(0, BLOCK)
            _, x = _load(row, token)
            ordinal = _ordinal(x)
            step = (highest - ordinal).to(tl.uint32) >> shift.to(tl.uint32)
            step = tl.where(step < BINS, step, BINS).to(tl.int32)
            inside = (token < vocab) & (ordinal <= highest)
            weight = tl.full([BLOCK], 1, tl.int32)
            if weighed:
                weight = (_exp(x - _value(top)) * 1073741824.0).to(tl.int32)
                inside = inside & (x >= keep)
                if begins:  # at most e^-10 of 2^30 a token, so that a block's sum has 32 bits
                    rest += tl.sum(tl.where(inside & (step >= bins), weight, 0), 0)
            inside = inside & (step < bins) & (weight > 0)
            tl.atomic_add(histogram + step, weight.to(tl.int64), mask=inside, sem="relaxed")
        if weighed and begins:
            tl.atomic_add(words + _REST, rest, sem="relaxed")
        if _is_last(words, parts):
            _narrow(words, histogram, high, shift, bins, weighed, begins)


@triton.jit
def _narrow(words, histogram, high, shift, bins, weighed: tl.constexpr, begins: tl.constexpr):
    """Find the bin where the needed weight is reached, and clear the histogram."""
    histogram += tl.arange(0, BINS)
    weight = tl.load(histogram, cache_modifier=".cg")
    tl.debug_barrier()  # another thread clears what this thread loads
    tl.store(histogram, tl.zeros([BINS], tl.int64))
    needed = tl.load(words + _NEEDED)
    if begins:
        if weighed:
            total = tl.sum(weight, 0) + tl.load(words + _REST, cache_modifier=".cg")
            top_p = tl.load(words.to(tl.pointer_type(tl.float64)) + _TOP_P)
            needed = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        else:
            needed = _integer(words, _TOP_K).to(tl.int64)
    short = tl.cumsum(weight, 0) < needed
    found = tl.minimum(tl.sum(short.to(tl.int64), 0), bins)
    high -= found << shift
    tl.debug_barrier()  # what all threads have loaded, one stores
    tl.store(words + _HIGH, high)
    tl.store(words + _NEEDED, needed - tl.sum(tl.where(short, weight, 0), 0))
    tl.store(words + _ARRIVED, tl.zeros([], tl.int64))
    if found < bins:
        tl.store(words + _SHIFT, tl.where(shift == 0, -1, tl.maximum(shift - _BITS, 0)))
        if shift == 0:
            tl.store(words + _KEEP, high)
    else:
        tl.store(words + _SHIFT, shift)


@triton.jit
def _shown(words, raw, x, kept, marked, biased):
    """Return the logits that the logprob is of."""
    mode = _integer(words, _LOGPROBS)
    shown = x
    if mode == 2:
        shown = kept
    elif mode == 1:
        shown = raw
    elif marked | biased:
        temperature = _float(words, _TEMPERATURE)
        shown = _divide(raw, tl.where(temperature == 0.0, 1.0, temperature))
    return shown


@triton.jit
def draw_kernel(logits, stride, vocab, words, marks, biases, found, tokens, logprobs, slots: tl.constexpr):
    """Draw from one part of a row; the row's last program chooses among the parts.

    `found` is int64 [rows, 2, slots]: each part's best token, as its noisy logit's ordinal above
    what its id lacks to the last one, so that the largest is the lowest id of the best; then its
    peak and its sum of exponentials, float32 each.
    """
    parts = tl.cdiv(vocab, BLOCK)
    at = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    words += at * WORDS
    row = _row(logits, stride, vocab, words, marks, biases, at)
    start = part * BLOCK
    token = start + tl.arange(0, BLOCK)
    raw, x = _load(row, token)
    keep = _keep(words)
    kept = tl.where(x >= keep, x, -_INF)
    shown = _shown(words, raw, x, kept, row[2], row[4])
    peak = tl.maximum(tl.max(shown, 0), _LOWEST)
    total = tl.sum((tl.exp(shown - peak) * 1099511627776.0).to(tl.int64), 0)  # 2^40
    noisy = kept
    if _float(words, _TEMPERATURE) != 0.0:
        noisy = kept + _noise(tl.load(words + _KEY), tl.load(words + _POSITION), start)
    ranked = (_ordinal(noisy).to(tl.int64) << 32) | (token ^ _LAST_ID).to(tl.int64)
    best = tl.max(tl.where(raw < _INF, ranked, _INVALID), 0)
    found += at * 2 * slots
    sums = (found + slots).to(tl.pointer_type(tl.float32))
    tl.store(found + part, best)
    tl.store(sums + part, peak)
    tl.store(sums + slots + part, total.to(tl.float32))
    if _is_last(words, parts):
        _choose(row, words, keep, found, sums, parts, tokens + at, logprobs + at, slots)


@triton.jit
def _choose(row, words, keep, found, sums, parts, token_out, logprob_out, slots: tl.constexpr):
    """Store the row's token, -1 where there is none, and its logprob."""
    part = tl.arange(0, slots)
    best = tl.load(found + part, mask=part < parts, other=-_INVALID, cache_modifier=".cg")
    peak = tl.load(sums + part, mask=part < parts, other=_LOWEST, cache_modifier=".cg")
    total = tl.load(sums + slots + part, mask=part < parts, other=0.0, cache_modifier=".cg")
    winner = tl.max(best, 0)
    ordinal, token = winner >> 32, ((winner & _LAST_ID) ^ _LAST_ID).to(tl.int32)
    row_peak = tl.max(peak, 0)
    mass = tl.sum((total * tl.exp(peak - row_peak)).to(tl.int64), 0)
    e, f = _split(mass.to(tl.float32) * 9.094947017729282e-13)  # 2^-40; tl.log would fuse
    raw, x = _load(row, token)
    shown = _shown(words, raw, x, tl.where(x >= keep, x, -_INF), row[2], row[4])
    logprob = shown - row_peak - _log(e, f)
    valid = (ordinal > -_INF_ORDINAL) & (ordinal < _INF_ORDINAL)
    tl.store(token_out, tl.where(valid, token, -1))
    tl.store(logprob_out, tl.where(valid, logprob, float("nan")))
