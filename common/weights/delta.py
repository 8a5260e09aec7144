"""What differs between two versions of a stream of weights, bit for bit, as a safetensors stream of its own.

Of each tensor that differs a delta has either `whole:NAME`, the tensor itself, or its changed elements:
`gaps:NAME`, from each position to the next one, the first from -1, and `values:NAME`, the new bits there as
unsigned integers. Where a gap is too wide for the type of the gaps, elements between that did not change
stand in the delta, too. The header's metadata names the stream that the delta is to: `base`.

Invariants (tests/property/test_delta.py):
- a base with the delta to it applied is, byte for byte, the stream that the delta was made from, whatever the
  values: NaN keep their payload, zeros their sign;
- whatever a delta holds, nothing is written outside the result's file; a delta that does not fit its base is
  a `ValueError` that names the tensor;
- memory is bounded: parts of a tensor when a delta is applied, some bytes for each change when it is made.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from seer.common.errors import NOT_DECODED
from seer.common.weights.safetensors import BITS, Stored, header, metadata, open_regular
from seer.common.wire import Bytes

BASE = "base"
"""In a delta's metadata: the name of the stream that it is to."""

SUFFIX = ".delta"
"""Ends the name of a delta's stream, which begins with that of its result."""

WHOLE, GAPS, VALUES = "whole:", "gaps:", "values:"

_GAP_TYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4"}
_ELEMENTS = 2**21
"""Elements that are compared, or changes that are read, at once."""

_COPY_BYTES = 2**19
"""Bytes of the result that are made at once; a multiple of every type's width."""

Ints = npt.NDArray[Any]

_NONE: tuple[npt.NDArray[np.int64], Ints] = (np.empty(0, np.int64), np.empty(0, np.uint8))


@dataclass(frozen=True, slots=True)
class Changes:
    """Elements of a tensor that differ: `gaps` (uint8, 16 or 32), `values` (uint of an element's width)."""

    gaps: Ints
    values: Ints

    @property
    def size(self) -> int:
        """Bytes of both."""
        return int(self.gaps.nbytes + self.values.nbytes)

    def apply(self, data: Bytes) -> None:
        """Write them into the bytes of the tensor that they are to."""
        positions = np.cumsum(self.gaps, dtype=np.int64) - 1
        data.view(self.values.dtype)[positions] = self.values


def changes(old: Bytes, new: Bytes, width: int) -> Changes | None:
    """Return what differs between a tensor's bytes; None: the whole tensor is smaller.

    `width`: bytes of an element, 1, 2, 4 or 8.
    """
    found: list[npt.NDArray[np.int64]] = []
    left = len(new) // (width + 1)
    for start in range(0, len(new), _COPY_BYTES):
        part = slice(start, start + _COPY_BYTES)
        positions = np.flatnonzero(old[part].view(f"<u{width}") != new[part].view(f"<u{width}"))
        left -= len(positions)
        if left < 0:
            return None
        found.append(positions + start // width)
    positions = np.concatenate([np.empty(0, np.int64), *found])
    gaps = _narrowed(np.diff(positions, prepend=-1), width)
    if len(gaps) and gaps.nbytes + len(gaps) * width >= len(new):
        return None
    if len(gaps) > len(positions):
        positions = np.cumsum(gaps, dtype=np.int64) - 1
    return Changes(gaps, new.view(f"<u{width}")[positions])


def _narrowed(gaps: npt.NDArray[np.int64], width: int) -> Ints:
    """Return the same positions, and more where needed, with gaps of the type that takes the fewest bytes."""
    most = int(gaps.max(initial=0))

    def size(bits: int) -> int:
        more = 0 if most < 2**bits else int(((gaps - 1) // (2**bits - 1)).sum())
        return (len(gaps) + more) * (bits // 8 + width)

    bits = min((8, 16, 32), key=size)
    if most >= 2**bits:
        steps = (gaps - 1) // (2**bits - 1)
        ends = np.cumsum(steps + 1) - 1
        wide = np.full(int(ends[-1]) + 1, 2**bits - 1, np.int64)
        wide[ends] = gaps - steps * (2**bits - 1)
        gaps = wide
    return gaps.astype(f"<u{bits // 8}")


def changed(delta: Path) -> tuple[str, set[str]]:
    """Return the base that a delta's file names, and the tensors that it may change.

    Raises `ValueError` or `OSError`.
    """
    _, stored = _header(delta)
    return metadata(delta).get(BASE, ""), {each.name.partition(":")[2] for each in stored}


def apply(
    base: Path,
    delta: Path,
    result: Path,
    name: str,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda have: None,
) -> None:
    """Write the file that a base of this name becomes by a delta, until `stop()` is true.

    `progress` hears how many of the result's first bytes are there. Raises `ValueError` or `OSError`.
    """
    length, tensors = _header(base)
    parts = {each.name: each for each in _header(delta)[1]}
    if (named := metadata(delta).get(BASE, "")) != name:
        raise ValueError(f"it is to {named[:80]!r}, not to {name}")
    tensors.sort(key=lambda each: each.start)
    works = [_work(each, parts) for each in tensors]
    if parts:
        raise ValueError(f"the delta changes {min(parts)[:80]!r}, which its base lacks")
    with ExitStack() as stack:
        files = [stack.enter_context(open_regular(each)).fileno() for each in (base, delta)]
        files.append(stack.enter_context(result.open("r+b", buffering=0)).fileno())
        _write(files[2], _read(files[0], 0, 8 + length), 0)
        pool = stack.enter_context(ThreadPoolExecutor())
        stack.callback(pool.shutdown, cancel_futures=True)
        made = pool.map(lambda work: work.run(*files, stop), works)
        for tensor, _ in zip(tensors, made, strict=True):
            progress(tensor.start + tensor.size)


@dataclass(frozen=True, slots=True)
class _Work:
    """Makes one tensor of the result from `source`, in the base, or in the delta if it is `whole`.

    `edits`: the gaps and values of what changes in it, `width` bytes each.
    """

    tensor: Stored
    source: Stored
    whole: bool
    edits: tuple[Stored, Stored] | None
    width: int

    def run(self, base: int, delta: int, result: int, stop: Callable[[], bool]) -> None:
        """Write the tensor. Raises `ValueError` or `OSError`."""
        edits = self._edits(delta)
        positions, values = next(edits, _NONE)
        for first in range(0, self.tensor.size, _COPY_BYTES):
            if stop():
                raise ValueError("it is not needed any more: the update was cancelled")
            length = min(_COPY_BYTES, self.tensor.size - first)
            data = _read(delta if self.whole else base, self.source.start + first, length)
            while len(positions):
                elements, at = data.view(values.dtype), first // self.width
                count = int(np.searchsorted(positions, at + len(elements)))
                elements[positions[:count] - at] = values[:count]
                positions, values = positions[count:], values[count:]
                if len(positions):
                    break  # the rest lies behind this part
                positions, values = next(edits, _NONE)
            _write(result, data, self.tensor.start + first)

    def _edits(self, delta: int) -> Iterator[tuple[npt.NDArray[np.int64], Ints]]:
        """Yield positions, which rise, and values there, some at a time. Raises `ValueError`."""
        if self.edits is None:
            return
        gaps, values = self.edits
        gap, value = np.dtype(_GAP_TYPES[gaps.dtype]), np.dtype(f"<u{self.width}")
        last, end = -1, self.tensor.size // self.width
        for first in range(0, gaps.shape[0], _ELEMENTS):
            count = min(_ELEMENTS, gaps.shape[0] - first)
            steps = _read(delta, gaps.start + first * gap.itemsize, count * gap.itemsize).view(gap)
            found = _read(delta, values.start + first * value.itemsize, count * value.itemsize)
            positions = np.cumsum(steps, dtype=np.int64) + last
            last = int(positions[-1])
            if not steps.all() or last >= end:
                name = self.tensor.name[:80]
                raise ValueError(f"the delta names elements of {name} twice, or beyond its end")
            yield positions, found.view(value)


def _work(tensor: Stored, parts: dict[str, Stored]) -> _Work:
    """Take a tensor's parts out of those of a delta. Raises `ValueError` if they do not fit."""
    whole, gaps, values = (parts.pop(kind + tensor.name, None) for kind in (WHOLE, GAPS, VALUES))
    width = BITS.get(tensor.dtype, 8) // 8
    if whole is None and gaps is None and values is None:
        return _Work(tensor, tensor, False, None, 1)
    if whole is not None and gaps is None and values is None:
        if (whole.dtype, whole.shape, whole.size) == (tensor.dtype, tensor.shape, tensor.size):
            return _Work(tensor, whole, True, None, 1)
    elif (
        whole is None
        and gaps is not None
        and values is not None
        and gaps.dtype in _GAP_TYPES
        and values.dtype == f"U{8 * width}"
        and len(gaps.shape) == 1
        and gaps.shape == values.shape
    ):
        return _Work(tensor, tensor, False, (gaps, values), width)
    raise ValueError(f"the delta's parts for {tensor.name[:80]} have other types or shapes")


def _header(path: Path) -> tuple[int, list[Stored]]:
    try:
        return header(path)
    except (*NOT_DECODED, struct.error) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def _read(file: int, offset: int, length: int) -> Bytes:
    data = np.empty(length, np.uint8)
    view, got = data.data, 0
    while got < length:
        count = os.preadv(file, [view[got:]], offset + got)
        if not count:
            raise ValueError("a file of the delta is shorter than it was")
        got += count
    return data


def _write(file: int, data: Bytes, offset: int) -> None:
    left = data.data
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
