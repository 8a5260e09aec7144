"""What comes beside tokens: bytes of several kinds, which the buffer keeps and delivers without reading them.

Invariants:
- a kind's name says how to read it: a word, the type of its numbers, and the shape of a token's entry;
- what the chunks of a response have of a kind adds up, as tokens do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from seer.common.wire import Bytes, Sizes

Array = npt.NDArray[Any]

ROUTED_EXPERTS = "routed_experts"
"""Expert ids [layers, experts of a token] of each token of a context but its last."""

TOP_LOGPROBS = "top_logprobs"
"""Of each token of a response, float32 [2, 1 + k]: its rank, and the ids of the k likeliest tokens in its
place; its logprob, and theirs. float32 holds every whole number below 2^24, so every id."""

PROMPT_LOGPROBS = "prompt_logprobs"
"""The same of each token of a prompt but its first, beside the prompt's first response."""

_TYPES = ("|u1", "<u2", "<f4")


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
            return size // _width(kind)
    return 0


def _form(kind: str) -> tuple[np.dtype[Any], list[int]]:
    """Return the type of a kind's numbers, and the shape of a token's entry."""
    _, dtype, *shape = kind.split(" ")
    sizes = list(map(int, shape))
    if dtype not in _TYPES or min(sizes, default=0) < 1:
        raise ValueError(f"{kind!r} must be a word, a type in {_TYPES} and the sizes of an entry")
    return np.dtype(dtype), sizes


def _width(kind: str) -> int:
    """Return the bytes of a token's entry."""
    dtype, shape = _form(kind)
    return dtype.itemsize * math.prod(shape)


def readable(sizes: Sequence[Sizes]) -> bool:
    """Return whether so many bytes of each kind are entries as its name says."""
    try:
        return not any(size % _width(kind) for each in sizes for kind, size in each.items())
    except ValueError:
        return False


def tail(word: str, beside: Mapping[str, Bytes], start: int) -> dict[str, Bytes]:
    """Return what there is of a word from its entry `start` on: views."""
    its = {kind: data for kind, data in beside.items() if kind.startswith(f"{word} ")}
    return {kind: data[start * _width(kind) :] for kind, data in its.items()}


def packed(arrays: Mapping[str, Array]) -> dict[str, Bytes]:
    """Return the bytes, by kind, of arrays [tokens, ...] by word."""
    return {kind_of(word, each): each.reshape(-1).view(np.uint8) for word, each in arrays.items()}


def flat(beside: Sequence[Mapping[str, Bytes]]) -> Bytes | None:
    """Return all bytes of several results, which `split` takes apart; None: there are none."""
    parts = [data for each in beside for data in each.values()]
    return np.concatenate(parts) if parts else None


def sizes(beside: Mapping[str, Sized]) -> Sizes:
    """Return the bytes of each kind."""
    return {kind: len(data) for kind, data in beside.items()}


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


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Of some tokens: their `logprobs` float32 and `ranks` int32 [tokens], of which 1 is the best.

    `top_ids` int32 and `top_logprobs` float32 [tokens, k] are the likeliest tokens in the place of each, best
    first.
    """

    logprobs: Array
    ranks: Array
    top_ids: Array
    top_logprobs: Array

    @classmethod
    def of(cls, word: str, extras: Mapping[str, Bytes]) -> TopLogprobs | None:
        """Return what there is of a word (`common/beside.py`) beside some tokens."""
        array = array_of(word, extras)
        if array is None:
            return None
        numbers = array[:, 0].astype(np.int32)
        return cls(array[:, 1, 0], numbers[:, 0], numbers[:, 1:], array[:, 1, 1:])

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, tokens: slice) -> TopLogprobs:
        parts = self.logprobs, self.ranks, self.top_ids, self.top_logprobs
        return TopLogprobs(*(each[tokens] for each in parts))
