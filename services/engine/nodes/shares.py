"""Which slices of a stream of weights a node needs: those that its ranks read of earlier weights.

Invariants (tests/unit/test_shares_of_nodes.py):
- a stream has shares only if its tensors have the names, types and shapes of those that all ranks loaded;
- a share has the header, and of each tensor all that a rank of the node read, or the tensor: also where what
  was read is many short runs; what ranks read side by side is one slice.

So ranks load holes only if what they read depends on more than names, types and shapes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from seer.common import wire
from seer.common.blobs import read_at
from seer.common.process.threads import until_stopped
from seer.common.slices import MAX_SLICES, Slice, Slices, merged, whole
from seer.common.weights.digest import BLAKE3, tagged
from seer.common.weights.safetensors import Stored, header

SHORT_RUN = 512
"""Bytes. Copying a run costs about 5 microseconds in all, and the file takes a page of the disk for each."""

MANY_RUNS = 1000
"""Of a tensor with fewer rows it makes no difference."""


@dataclass(frozen=True, slots=True)
class RankReads:
    """What a rank of a `node` reads of weights: slices of each tensor's bytes, as was proved.

    `layout`: see `layout_of`.
    """

    node: int
    layout: str
    slices: dict[str, list[Slice]]


class NotRun(str):
    """Why a proof of what a rank reads could not be made: the next one may."""

    __slots__ = ()


def layout_of(tensors: Iterable[Stored]) -> str:
    """Return a text that is equal for tensors of the same names, types and shapes."""
    described = sorted((each.name, each.dtype, each.shape) for each in tensors)
    return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()


def shares(
    proofs: Sequence[Sequence[RankReads]], file: Path, nodes: Iterable[int]
) -> dict[int, Slices] | None:
    """Return which slices of a file each of the `nodes` needs, or all, without an entry; None: not known.

    `proofs`: what all ranks read of weights, by layouts. Raises `OSError` or `ValueError`.
    """
    length, tensors = header(file)
    layout = {layout_of(tensors)}
    reads = next((proof for proof in proofs if {each.layout for each in proof} == layout), None)
    if reads is None:
        return None
    found: dict[int, Slices] = {}
    for node in nodes:
        slices = [whole(0, 8 + length)]
        for each in sorted(tensors, key=lambda tensor: tensor.start):
            own = merged(
                {part for rank in reads if rank.node == node for part in rank.slices.get(each.name, ())}
            )
            short = any(size < SHORT_RUN and count > MANY_RUNS for _, size, _, count in own)
            if short or sum(size * count for _, size, _, count in own) >= each.size > 0:
                own = [whole(0, each.size)]
            slices += [(each.start + at, size, stride, count) for at, size, stride, count in own]
        if len(slices) <= MAX_SLICES:
            found[node] = Slices(slices, file.stat().st_size)
    return found


async def digest_of_slices(file: Path, slices: Slices) -> str:
    """Return the digest of the slices of a file. Raises `OSError`."""
    stop = threading.Event()

    def hashed(start: int) -> bytes:
        if stop.is_set():
            raise ValueError("the update was cancelled")
        length = min(wire.SPOOL_BYTES, slices.size - start)
        return blake3(read_at(file, slices.runs(start, length)).data).digest()

    def read() -> str:
        with ThreadPoolExecutor() as pool:
            return tagged(b"".join(pool.map(hashed, range(0, slices.size, wire.SPOOL_BYTES))), BLAKE3)

    return await until_stopped(stop.set, read)
