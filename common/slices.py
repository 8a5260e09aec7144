"""A part of a file: slices of it, one after the other; the rest are holes, which nobody reads.

A slice is `count` runs of `size` bytes, `stride` apart, from `start` on: columns of a matrix are a run in
each row, and rows are one run, of stride 0.

Invariants (tests/unit/test_slices.py):
- no run reaches beyond the file, and nodes ask each other for `MAX_SLICES` at most;
- bytes of the part map to those of the file one to one, in order; a slice may repeat bytes of another;
- merged slices have the bytes of those that they are made of, and no others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

Slice = tuple[int, int, int, int]
"""`start`, `size`, `stride` and `count`."""

Runs = list[tuple[int, int]]
"""Places in a file, and how many bytes each."""

MAX_SLICES = 500_000
"""A node of the largest mixtures, of 90,000 tensors, has a fifth as many. 16 MB as a message."""


class Slices:
    """What is there of a file of `whole` bytes; `size`: how many. Raises `ValueError` if that cannot be."""

    def __init__(self, slices: Sequence[Slice], whole: int) -> None:
        self.slices, self.whole = slices, whole
        for start, size, stride, count in slices:
            end = start + stride * (count - 1) + size
            if min(start, size - 1, count - 1) < 0 or (count > 1 and stride < size) or end > whole:
                raise ValueError(f"has no {count} runs of {size} bytes, {stride} apart, from {start} on")
        self._ends = list(accumulate(size * count for _, size, _, count in slices))
        self.size = self._ends[-1]

    def runs(self, offset: int, length: int) -> Runs:
        """Return where bytes of the part are in the file, and how many there, in order."""
        found: Runs = []
        index = bisect_right(self._ends, offset)
        while length > 0:
            start, size, stride, count = self.slices[index]
            row, skipped = divmod(offset - self._ends[index] + size * count, size)
            taken = min(size - skipped, length)
            found.append((start + stride * row + skipped, taken))
            offset, length = offset + taken, length - taken
            index += offset == self._ends[index]
        return found


def whole(start: int, size: int) -> Slice:
    """Return the slice of `size` bytes without gaps."""
    return start, size, 0, 1


def merged(slices: Iterable[Slice]) -> list[Slice]:
    """Return the same bytes in fewer slices: runs that touch, in each row, are one."""
    found: list[Slice] = []
    for start, size, stride, count in sorted(slices, key=lambda each: (each[3], each[2], each[0])):
        first, length, *rows = found[-1] if found else (0, 0)
        longer = max(length, start + size - first)
        if rows != [stride, count] or start > first + length or (longer > stride and count > 1):
            found.append((start, size, stride, count))
        elif longer == stride:
            found[-1] = whole(first, stride * count)
        else:
            found[-1] = first, longer, stride, count
    return found


def slice_of(offset: int, shape: Sequence[int], stride: Sequence[int], item: int) -> Slice | None:
    """Return the bytes of a strided view: `offset` in bytes, `stride` in elements of `item` bytes.

    None: they are not one slice.
    """
    size, step, count = item, 0, 1
    for apart, length in sorted(
        (each * item, n) for each, n in zip(stride, shape, strict=True) if each and n > 1
    ):
        if count == 1 and apart == size:
            size *= length
        elif count == 1 and apart > size:
            step, count = apart, length
        elif count > 1 and apart == step * count:
            count *= length
        else:
            return None
    return offset, size, step, count
