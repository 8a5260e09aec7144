"""What comes beside tokens: bytes of several kinds, which the buffer keeps and delivers without reading them.

Invariants:
- a kind's name says how to read it: a word, the type of its numbers, and the shape of a token's entry;
- what the chunks of a response have of a kind adds up, as tokens do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from seer.common.wire import Bytes, Sizes

Array = npt.NDArray[Any]

ROUTED_EXPERTS = "routed_experts"
"""Expert ids [layers, experts of a token] of each token of a context but its last."""

_TYPES = ("|u1", "<u2")


def kind_of(word: str, array: Array) -> str:
    """Return the kind of an array [tokens, ...], in little-endian order."""
    return " ".join([word, array.dtype.str, *map(str, array.shape[1:])])


def array_of(word: str, beside: Mapping[str, Bytes]) -> Array | None:
    """Return what there is of a word, [tokens, ...]: a view. Raises `ValueError` for another form."""
    for kind, data in beside.items():
        if kind.startswith(f"{word} "):
            dtype, shape = _form(kind)
            return data.view(dtype).reshape(-1, *shape)
    return None


def entries(word: str, have: Sizes) -> int:
    """Return of how many tokens there is something of a word. Raises `ValueError` as `array_of`."""
    for kind, size in have.items():
        if kind.startswith(f"{word} "):
            dtype, shape = _form(kind)
            return size // (dtype.itemsize * math.prod(shape))
    return 0


def _form(kind: str) -> tuple[np.dtype[Any], list[int]]:
    """Return the type of a kind's numbers, and the shape of a token's entry."""
    _, dtype, *shape = kind.split(" ")
    sizes = list(map(int, shape))
    if dtype not in _TYPES or min(sizes, default=0) < 1:
        raise ValueError(f"{kind!r} must be a word, a type in {_TYPES} and the sizes of an entry")
    return np.dtype(dtype), sizes


def split(flat: Bytes | None, sizes: Sequence[Sizes]) -> Iterator[dict[str, Bytes]]:
    """Yield what each of several results has, of bytes that are flat over them; views."""
    start = 0
    for each in sizes:
        found = {}
        for kind, size in each.items():
            if flat is not None:
                found[kind] = flat[start : start + size]
            start += size
        yield found


def total(sizes: Sequence[Sizes]) -> int:
    """Return the bytes of all kinds of several results."""
    return sum(sum(each.values()) for each in sizes)
