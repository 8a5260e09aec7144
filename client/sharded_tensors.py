"""Tensors that all ranks of a trainer send side by side, each its share of them.

Sharded tensors are put together one after the other, and each is kept by one rank alone: no rank needs more
memory than for its share and one tensor.

Invariants (tests/unit/test_sharded_tensors.py, tests/process/test_sharded_weights.py):
- the ranks' ranges have each byte of the stream once, and all ranks lay the stream out alike;
- every rank does the same collective calls in the same order, and what fails on one rank raises on all, but
  for a `full_tensor` that fails on one alone: the others wait in it until torch gives up.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from seer.client.tensor_stream import Entry, Tensor, TensorStream, entries_of
from seer.common.errors import InvalidField

T = TypeVar("T")

_gloo: dict[object, tuple[Any, threading.RLock]] = {}
"""By torch's groups: a group of the same ranks whose calls may be made on any thread, and their turn."""

_GLOO_TIMEOUT = timedelta(days=1)
"""Longest wait for another rank: an update waits for running requests, and torch gives up in half an hour."""


class Ranks(Protocol):
    """The ranks of a trainer. Every call blocks until all ranks have made it."""

    rank: int
    size: int

    @property
    def turn(self) -> AbstractContextManager[object]:
        """Held by a thread while it makes calls that belong together, so all ranks have one order."""

    def gather(self, own: object) -> list[Any]:
        """Return what each rank gives, by rank."""

    def tell(self, outcome: object = None) -> Any:  # noqa: ANN401 - what rank 0 tells
        """Return what rank 0 tells all others."""


class TorchRanks:
    """See `Ranks`; those of a group of torch.distributed, None: of its default group."""

    def __init__(self, group: Any = None) -> None:  # noqa: ANN401 - torch's
        import torch.distributed as dist

        group = group or dist.group.WORLD  # another one once torch.distributed was set up anew
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if group not in _gloo:
            same = dist.new_group(
                dist.get_process_group_ranks(group), _GLOO_TIMEOUT, "gloo", use_local_synchronization=True
            )
            _gloo[group] = same, threading.RLock()
        self._group, self.turn = _gloo[group]

    def gather(self, own: object) -> list[Any]:
        """See `Ranks.gather`."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with self.turn:  # each call is several of torch's, and those of an earlier update may still wait
            dist.all_gather_object(found, own, group=self._group)
        return found

    def tell(self, outcome: object = None) -> Any:  # noqa: ANN401 - what rank 0 tells
        """See `Ranks.tell`."""
        import torch.distributed as dist

        told = [outcome]
        with self.turn:
            dist.broadcast_object_list(told, src=dist.get_global_rank(self._group, 0), group=self._group)
        return told[0]


class _Elsewhere(NamedTuple):
    """Stands for a tensor that another rank has."""

    dtype: Any


class ShardedTensors:
    """A model's tensors, as in `model.state_dict()`, sharded (DTensors) or the same on all ranks.

    Every rank makes one, with the same names, and gives it to `update_weights` of a client of its own.
    `ranks`: torch.distributed's default group, or `TorchRanks(group)`. `divided`: each rank gives others of
    the model's tensors, whole, as stages of a pipeline have them; what several give is sent by the first.
    Blocks. Raises `InvalidField` on all ranks if one has tensors that cannot be sent.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], ranks: Ranks | None = None, *, divided: bool = False
    ) -> None:
        self.ranks = ranks or TorchRanks()
        entries, owners = self._collected(tensors) if divided else self._put_together(tensors)
        self.stream = TensorStream(entries, owners=owners)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.ranks.rank

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """See `on_all`."""
        return on_all(self.ranks, work)

    def _collected(self, tensors: Mapping[str, Tensor]) -> tuple[list[Entry], dict[str, int]]:
        """Return all tensors as they are sent, and which rank sends each: one that gives it."""
        mine: dict[str, Entry] = {}

        def own() -> list[Entry]:
            for each in entries_of(tensors) if tensors else ():
                mine[each.name] = replace(each, tensor=_sendable(each.tensor))
            return [replace(each, tensor=_Elsewhere(each.tensor.dtype)) for each in mine.values()]

        owners: dict[str, int] = {}
        entries: list[Entry] = []
        for rank, given in enumerate(self.on_all(own)):
            for each in given:
                if each.name not in owners:
                    owners[each.name] = rank
                    entries.append(mine[each.name] if rank == self.rank else each)
        if not entries:
            raise InvalidField("source", {}, "give at least one tensor, by name, on some rank")
        return entries, owners

    def _put_together(self, tensors: Mapping[str, Tensor]) -> tuple[list[Entry], dict[str, int]]:
        """Return all tensors as they are sent, and which rank sends each: about as many bytes."""
        names, owners = self._agree(tensors)
        entries = [self._entry(name, tensors[name], owners[name]) for name in names]
        self.on_all(lambda: _raise_first(entries))
        return entries, owners

    def _agree(self, tensors: Mapping[str, Tensor]) -> tuple[list[str], dict[str, int]]:
        """Find out which tensors are sent, and which rank sends each."""

        def own() -> tuple[list[tuple[str, str, tuple[int, ...], int]], set[str]]:
            local = {name: _local(each) for name, each in tensors.items()}
            tied = tensors.keys() - {each.name for each in entries_of(local)}
            what = [(name, *_described(name, each)) for name, each in tensors.items()]
            return what, tied

        found = self.on_all(own)
        what, _ = found[0]
        for rank, (other, _) in enumerate(found):
            if other != what:
                fix = "give tensors of the same names, types and shapes on all ranks, in one order"
                raise InvalidField("source", f"tensors of rank {rank}", fix)
        tied = set[str]().union(*(each for _, each in found))  # an empty shard does not show that it is
        sizes = {name: size for name, _, _, size in what if name not in tied}
        return list(sizes), shared_out(sizes, self.ranks.size)

    def _entry(self, name: str, tensor: Tensor, owner: int) -> Entry:
        """Return a tensor as it is sent; all ranks put a sharded one together, and its owner keeps it."""
        dtype, shape, size = _described(name, tensor)
        whole = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if owner != self.ranks.rank:
            return Entry(name, dtype, shape, size, _Elsewhere(whole.dtype))
        try:
            whole = _sendable(whole)
            if tuple(whole.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(whole.shape)}, not {shape}")
        except Exception as error:  # noqa: BLE001 - the other ranks wait in the next collective call
            whole = error
        return Entry(name, dtype, shape, size, whole)


def on_all(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Return what `work` returns on each rank. If it raises on one, all ranks raise `InvalidField`."""
    problem, own = "", None
    try:
        own = work()
    except Exception as error:  # noqa: BLE001 - a rank that raised alone would leave the others waiting
        problem = str(error) or repr(error)
    found = ranks.gather((problem, own))
    for rank, (why, _) in enumerate(found):
        if why:
            raise InvalidField("source", f"tensors of rank {rank}", why)
    return [each for _, each in found]


def _sendable(tensor: Tensor) -> Tensor:
    """Return a tensor as it is sent: it is read once for each message, which could be a copy of all of it."""
    if hasattr(tensor, "detach"):
        return tensor.detach().cpu().contiguous()
    return np.asarray(tensor, order="C")


def _raise_first(entries: list[Entry]) -> None:
    for entry in entries:
        if isinstance(entry.tensor, Exception):
            raise entry.tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "full_tensor") else tensor


def _described(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...], int]:
    """Return type, shape and bytes of all of a tensor. Raises `InvalidField`."""
    [local] = entries_of({name: _local(tensor)})
    shape = tuple(int(length) for length in tensor.shape)
    return local.dtype, shape, math.prod(shape) * tensor.dtype.itemsize


def shared_out(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return which rank sends each tensor, so that all send about as many bytes."""
    loads = [(0, rank) for rank in range(ranks)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        load, rank = loads[0]
        owners[name] = rank
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return owners
