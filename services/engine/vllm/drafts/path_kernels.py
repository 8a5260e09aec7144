"""The Triton kernels of steps with several draft paths: see `triton_paths`."""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(2048)
"""Words of four bytes that a program copies at once."""


@triton.jit
def begin_kernel(
    owners, paths, shorter, shifts, starts, bounds, positions, places, token_ids, lengths, contexts,
    lanes: tl.constexpr,
):  # fmt: skip
    """Write the context of one row; have its tokens begin where its request's draft does."""
    row = tl.program_id(0)
    length = tl.load(lengths + tl.load(owners + row)) - tl.load(shorter + row)
    tl.store(contexts + row, length.to(tl.int32))
    shift = tl.load(shifts + row)
    if shift > 0:
        begin, start = tl.load(bounds + row), tl.load(starts + tl.load(paths + row))
        place = tl.arange(0, lanes)
        inside = place < tl.load(bounds + row + 1) - begin
        position = tl.load(positions + begin + place, mask=inside, other=0)
        tl.store(positions + begin + place, position - shift, mask=inside)
        local = tl.load(places + start + place, mask=inside, other=0)
        tl.store(places + start + place, (local - shift).to(tl.int32), mask=inside)
        tl.store(token_ids + begin, tl.load(token_ids + begin - shift))


@triton.jit(do_not_specialize=["stride", "columns", "width"])
def attend_kernel(
    further, bounds, positions, table, slots, scratch, begins, own, stride, columns, width, size,
    lanes: tl.constexpr,
):  # fmt: skip
    """Put one further path's scratch blocks into its row of the table, and into its tokens' slots."""
    path = tl.program_id(0)
    row = tl.load(further + path)
    begin, end = tl.load(bounds + row), tl.load(bounds + row + 1)
    position = tl.load(positions + begin).to(tl.int64)
    tl.store(begins + path, position)
    first, lane = position // size, tl.arange(0, lanes)
    mine, entries = lane < width, table + row * stride + first
    there = mine & (first + lane < columns)
    block = tl.load(scratch + path * width + lane, mask=mine, other=0)
    tl.store(own + path * width + lane, tl.load(entries + lane, mask=there, other=0), mask=mine)
    tl.store(entries + lane, block, mask=there)
    inside = lane < end - begin
    at = position + lane
    written = tl.load(scratch + path * width + at // size - first, mask=inside, other=0).to(tl.int64)
    tl.store(slots + begin + lane, written * size + at % size, mask=inside)


@triton.jit(do_not_specialize=["width"])
def choose_kernel(
    firsts, choices, sampled, logprobs, gained, winners, tokens, values, counts, decided, width,
    lanes: tl.constexpr,
):  # fmt: skip
    """Write what one request keeps: the first of its longest paths, or its first path if those disagree."""
    request = tl.program_id(0)
    first, place = tl.load(firsts + request), tl.arange(0, lanes)
    best, torn = first, 0
    for path in range(first + 1, first + tl.load(choices + request)):
        count, most = tl.load(gained + path), tl.load(gained + best)
        shared = place < tl.minimum(count, most)
        one = tl.load(sampled + path * width + place, mask=shared, other=0)
        other = tl.load(sampled + best * width + place, mask=shared, other=0)
        differ = tl.max((one != other).to(tl.int32), 0)
        torn = tl.maximum(torn, differ)
        best = tl.where((differ == 0) & (count > most), path, best)
    best = tl.where(torn > 0, first, best)
    there = place < width
    tl.store(winners + request, best)
    tl.store(counts + request, tl.load(gained + best))
    target = request.to(tl.int64) * width + place
    tl.store(tokens + target, tl.load(sampled + best * width + place, mask=there, other=0), mask=there)
    tl.store(values + target, tl.load(logprobs + best * width + place, mask=there, other=0.0), mask=there)
    if best != first:
        tl.atomic_add(decided, 1)
    if torn > 0:
        tl.atomic_add(decided + 1, 1)


@triton.jit(do_not_specialize=["width", "pairs"])
def copy_kernel(
    layers, owners, paths, further, begins, winners, gained, own, scratch, width, pairs, size,
    after: tl.constexpr,
):  # fmt: skip
    """Copy one block of one layer: a request's partly filled one to scratch, or after the step a winner's."""
    pair = tl.program_id(0) % pairs
    path = pair // width if after else pair
    block = pair % width if after else 0
    begin = tl.load(begins + path)
    if after:
        row = tl.load(further + path)
        verified = tl.load(paths + row)
        # The last token has no KV yet.
        last = (begin + tl.load(gained + verified) - 1) // size - begin // size
        wanted = (tl.load(winners + tl.load(owners + row)) == verified) & (block <= last)
    else:
        wanted = begin % size > 0
    if wanted:
        mine = tl.load(own + path * width + block).to(tl.int64)
        other = tl.load(scratch + path * width + block).to(tl.int64)
        source, target = (other, mine) if after else (mine, other)
        layer = layers + tl.program_id(0) // pairs * 4
        memory = tl.load(layer).to(tl.pointer_type(tl.int32))
        stride, words, parts = tl.load(layer + 1), tl.load(layer + 2), tl.load(layer + 3)
        for part in range(parts):
            begins_at = memory + (source * parts + part) * stride
            to = memory + (target * parts + part) * stride
            for start in range(0, words, WORDS):
                at = start + tl.arange(0, WORDS)
                tl.store(to + at, tl.load(begins_at + at, mask=at < words, other=0), mask=at < words)
