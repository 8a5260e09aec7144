"""The process group of one broadcast of weights: the trainer as rank 0, and all ranks of some engines.

They meet in a store of the trainer's process. Each rank of an engine writes its place there; the trainer
closes the membership, and whoever comes later reads that it has no rank. CPUs use Gloo, GPUs NCCL. With Gloo
a rank listens at the address by which the trainer is reached alone, on `GLOO_SOCKET_IFNAME` if that is set.

Invariants (tests/unit/test_broadcast_group.py):
- the group has exactly the ranks that the trainer saw before it closed the membership;
- no step waits longer than `step_seconds`, whatever the others do; after a failed step the group is of no
  use, and another one can be made at once;
- what is read from the store is plain JSON.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

from seer.common.errors import NOT_DECODED
from seer.common.weights.mooncake import own_address

POLL_SECONDS = 0.001

MAX_RANKS = 4096
"""Bound on the ranks of an engine."""

_RANKS = "ranks"


class Ranks(msgspec.Struct):
    """`first`: by engine, its first rank in a group of `size`. `nccl_id`: see `vllm_group.new_id`."""

    first: dict[str, int]
    size: int
    nccl_id: str = ""


class BroadcastGroup:
    """Broadcasts from rank 0; a step raises `RuntimeError` or `TimeoutError`. Close it at the end.

    `own`: the address of this machine at which the others reach this rank.
    """

    def __init__(
        self, store: TCPStore, rank: int, size: int, device: torch.device, step_seconds: float, own: str
    ) -> None:
        self._seconds = step_seconds
        meeting, limit = PrefixStore("group", store), timedelta(seconds=step_seconds)
        self._group: ProcessGroup
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = 2 * limit  # its watchdog would end the process: we give up first
            self._group = ProcessGroupNCCL(meeting, rank, size, options)
        else:
            gloo = ProcessGroupGloo._Options()
            gloo._timeout, gloo._devices = limit, [_gloo_device(own)]
            self._group = ProcessGroupGloo(meeting, rank, size, gloo)

    def broadcast(self, data: torch.Tensor, stopped: Callable[[], bool] = lambda: False) -> None:
        """Send `data` from rank 0 into that of all others; give up once `stopped()` is true."""
        options = BroadcastOptions()
        if data.device.type == "cpu":
            options.timeout = timedelta(seconds=self._seconds)  # Gloo cannot be aborted, only be late
        work = self._group.broadcast([data], options)
        deadline = time.monotonic() + self._seconds
        while not work.is_completed():
            if stopped() or time.monotonic() > deadline:
                raise TimeoutError(f"a part did not get through in {self._seconds:g} s")
            time.sleep(POLL_SECONDS)
        work.wait()

    def close(self) -> None:
        """Leave the group; others that still wait for this rank get an error, or their deadline."""
        self._group.abort()


def open_store(port: int, seconds: float) -> TCPStore:
    """Return a store that others reach at this port (0: a free one; see its `port`), on all interfaces."""
    limit = timedelta(seconds=seconds)
    everywhere = "0.0.0.0"  # noqa: S104 - engines of other machines meet here
    return TCPStore(everywhere, port, is_master=True, wait_for_workers=False, timeout=limit)


def gather(
    store: TCPStore, engines: Sequence[str], seconds: float, stopped: Callable[[], bool], nccl_id: str = ""
) -> tuple[int, list[str]]:
    """Wait until all ranks of these engines have come, close the membership, and return it.

    Returns the group's size, and the engines that did not come in `seconds`, or before `stopped()` was true.
    Raises `RuntimeError` for one that says nonsense.
    """
    ranks, missing = Ranks({}, 1, nccl_id), list(engines)
    deadline = time.monotonic() + seconds
    while missing and time.monotonic() < deadline and not stopped():
        for engine in list(missing):
            if count := _ranks_of(store, engine):
                ranks.first[engine] = ranks.size
                ranks.size += count
                missing.remove(engine)
        time.sleep(POLL_SECONDS)
    store.set(_RANKS, msgspec.json.encode(ranks).decode())
    return ranks.size, missing


def join(
    address: tuple[str, int], engine: str, rank: int, count: int, device: torch.device, seconds: float
) -> BroadcastGroup:
    """Join as rank `rank` of an engine's `count`. Raises `RuntimeError` or `TimeoutError`.

    `seconds`: for each of the way to the trainer, its wait for others, the group and its steps.
    """
    store, ranks = meet(address, engine, rank, count, seconds)
    own = own_address(f"{address[0]}:{address[1]}")
    return BroadcastGroup(store, ranks.first[engine] + rank, ranks.size, device, seconds, own)


def meet(
    address: tuple[str, int], engine: str, rank: int, count: int, seconds: float
) -> tuple[TCPStore, Ranks]:
    """Say that this rank is there, and wait for the membership. Raises `RuntimeError` or `TimeoutError`."""
    host, port = address
    limit = timedelta(seconds=seconds)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    store.set(_place(engine, rank), str(count))
    store.wait([_RANKS], 2 * limit)  # the trainer waits as long for others, before it says
    try:
        ranks = msgspec.json.decode(store.get(_RANKS), type=Ranks)
    except NOT_DECODED as error:
        raise RuntimeError(f"the trainer at {host}:{port} gave no list of ranks: {error}") from error
    if engine not in ranks.first:
        raise RuntimeError("the broadcast had begun without this engine: it came too late")
    return store, ranks


def _gloo_device(own: str) -> ProcessGroupGloo.Device:
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if chosen != "lo":  # which engines set for their own ranks
        return ProcessGroupGloo.create_device(interface=chosen)
    try:
        return ProcessGroupGloo.create_device(hostname=own)
    except RuntimeError:  # none of this machine's: a trainer behind another address
        return ProcessGroupGloo.create_default_device()


def _ranks_of(store: TCPStore, engine: str) -> int:
    """Return how many ranks an engine has; 0: not all of them have come yet."""
    if not store.check([_place(engine, 0)]):
        return 0
    said = store.get(_place(engine, 0))
    count = int(said) if said.isdigit() and len(said) < 5 else 0
    if not 1 <= count <= MAX_RANKS:
        raise RuntimeError(f"{engine} says that it has {said[:20]!r} ranks: 1 to {MAX_RANKS} are possible")
    return count if store.check([_place(engine, rank) for rank in range(count)]) else 0


def _place(engine: str, rank: int) -> str:
    return f"{rank} {engine}"
