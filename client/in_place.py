"""Tensors that engines copy straight into their live weights: from shared memory, or by a broadcast.

Invariants (tests/unit/test_in_place.py, tests/e2e/test_in_place.py):
- engines get a plan first, and check names, types and shapes; the bytes themselves are not checked, but
  values that are not finite are refused here, before anything is offered;
- nothing here waits longer than its deadline, whatever engines do; after a failure another update can begin;
- what an update has shared or opened is gone when it ends;
- torch is imported only when an update begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import numpy as np

from seer.client.tensor_stream import Entry, Tensor, TensorStream, entries_of
from seer.common.errors import InvalidField
from seer.common.process.threads import until_ended, until_stopped
from seer.common.weights.in_place import (
    PLAN,
    SHARED_MEMORY,
    Bucket,
    CudaMemory,
    Plan,
    PlannedTensor,
    SharedFile,
    layout,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

BUCKET_BYTES = 256 * 2**20
"""Most bytes of a broadcast's bucket, single larger tensors apart: of this much, each rank needs memory."""


class InPlace(Protocol):
    """A source of weights in place; all methods may block, and are called from threads."""

    def offer(self, name: str) -> TensorStream:
        """Make everything ready and return the stream with the plan, under a unique name."""

    def send(self, engines: Sequence[str], stopped: Callable[[], bool]) -> str:
        """Send what these engines need more; return what failed. Give up once `stopped()` is true."""

    def end(self) -> None:
        """Free what the update needed."""


class SharedTensors:
    """A source for `update_weights`: `tensors` (torch) by name, which engines of this machine read.

    On GPUs engines read the tensors themselves (CUDA IPC), on the same GPU, and nothing is copied before; on
    CPUs a copy of all tensors in shared memory. Each update shares what `tensors` has then. `finite`: refuse
    tensors with NaN or infinities.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, finite: bool = True) -> None:
        self.tensors = tensors
        self._finite = finite
        self._shared: SharedMemory | None = None
        self._kept: list[torch.Tensor] = []

    def offer(self, name: str) -> TensorStream:
        """See `InPlace.offer`. Raises `InvalidField`."""
        entries = _torch_entries(self.tensors, self._finite)
        self.end()
        on_gpu = {entry.tensor.device.type for entry in entries} == {"cuda"}
        buckets = [_on_gpu(entry, self._kept) for entry in entries] if on_gpu else [self._copy(entries)]
        return _stream(Plan(name, "shared", buckets))

    def send(self, engines: Sequence[str], stopped: Callable[[], bool]) -> str:
        """See `InPlace.send`: engines need nothing more."""
        return ""

    def end(self) -> None:
        """See `InPlace.end`."""
        self._kept.clear()
        if self._shared is not None:
            self._shared.close()
            with contextlib.suppress(FileNotFoundError):
                self._shared.unlink()
            self._shared = None

    def _copy(self, entries: list[Entry]) -> Bucket:
        """Return a bucket in shared memory with copies of all tensors."""
        starts = layout([entry.size for entry in entries])
        size = max(1, starts[-1])
        try:
            self._shared = SharedMemory(create=True, size=size)
            opened = os.open(SHARED_MEMORY / self._shared.name, os.O_RDWR)
            try:
                os.posix_fallocate(opened, 0, size)  # writing to memory that is not there would kill us
            finally:
                os.close(opened)
        except OSError as error:
            self.end()
            fix = (
                f"{SHARED_MEMORY} has no room for these bytes ({error}): make it larger, or send the tensors"
            )
            raise InvalidField("source", size, fix) from error
        _fill(np.ndarray(size, np.uint8, self._shared.buf), entries, starts)
        return Bucket(size, _planned(entries, starts), SharedFile(self._shared.name))


class Broadcast:
    """A source for `update_weights`: `tensors` (torch) by name, broadcast to all engines at once.

    NCCL if the tensors are on a GPU, Gloo if on CPUs: engines must be on the like. `host` is this machine's
    address for engines, `port` where they meet (0: a free one), on all interfaces without authentication.
    Each step (joining, making the group, a bucket of `bucket_bytes`) takes `step_seconds` at most, or the
    update ends. `finite`: refuse tensors with NaN or infinities.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        step_seconds: float = 30.0,
        finite: bool = True,
    ) -> None:
        if not 0 < step_seconds <= 3600:
            raise InvalidField("step_seconds", step_seconds, "must be above 0, and at most 3600")
        if bucket_bytes < 1:
            raise InvalidField("bucket_bytes", bucket_bytes, "must be at least 1")
        self.tensors = tensors
        self._finite = finite
        self._host, self._port = host, port
        self._bucket_bytes, self._step_seconds = bucket_bytes, step_seconds
        self._store: TCPStore | None = None
        self._buckets: list[tuple[Bucket, list[Entry]]] = []

    def offer(self, name: str) -> TensorStream:
        """See `InPlace.offer`. Raises `InvalidField`."""
        entries = _torch_entries(self.tensors, self._finite)
        self.end()
        buckets = list(_buckets(entries, self._bucket_bytes))
        stream = self._open(name, "broadcast", [bucket for bucket, _ in buckets])
        self._buckets = buckets
        return stream

    def send(self, engines: Sequence[str], stopped: Callable[[], bool]) -> str:
        """See `InPlace.send`."""
        from seer.common.weights.broadcast_group import gather

        if self._store is None:
            return "the broadcast was not offered"
        try:
            nccl_id = self._new_id()
            size, missing = gather(self._store, engines, self._step_seconds, stopped, nccl_id)
            if size > 1:
                self._send(self._store, size, stopped, nccl_id)
        except (RuntimeError, OSError, ValueError) as error:
            return f"the broadcast failed: {' '.join(str(error).split())[:400]}"
        return f"{', '.join(missing)} did not join in {self._step_seconds:g} s" if missing else ""

    def end(self) -> None:
        """See `InPlace.end`."""
        self._store = None  # which closes its port
        self._buckets = []

    def _open(
        self, name: str, transport: Literal["broadcast", "vllm_nccl"], buckets: list[Bucket]
    ) -> TensorStream:
        """Open the store in which the group meets, and return the stream with the plan."""
        from seer.common.weights.broadcast_group import open_store

        try:
            self._store = open_store(self._port, self._step_seconds)
        except (RuntimeError, OSError) as error:
            raise InvalidField(
                "port", self._port, f"cannot be opened ({error}): give another, or 0"
            ) from error
        return _stream(Plan(name, transport, buckets, self._host, self._store.port, self._step_seconds))

    def _new_id(self) -> str:
        """Return the id by which the group meets, if it is not the store."""
        return ""

    def _send(self, store: TCPStore, size: int, stopped: Callable[[], bool], nccl_id: str) -> None:
        """Send all as rank 0 of a group of `size`. Raises `RuntimeError`, `OSError` or `ValueError`."""
        import torch

        from seer.common.weights.broadcast_group import BroadcastGroup

        device = self._buckets[0][1][0].tensor.device
        group = BroadcastGroup(store, 0, size, device, self._step_seconds, self._host)
        try:
            for bucket, entries in self._buckets:
                data = torch.zeros(bucket.size, dtype=torch.uint8, device=device)
                for planned, entry in zip(bucket.tensors, entries, strict=True):
                    data[planned.start : planned.start + planned.size].copy_(_flat(entry))
                group.broadcast(data, stopped)
        finally:
            group.close()


class Transfer:
    """One update in place: begins to send when the buffer names the engines; all calls on one event loop."""

    def __init__(self, source: InPlace) -> None:
        self._source = source
        self._stop = threading.Event()
        self._sending: asyncio.Task[str] | None = None
        self._ended = False

    def begin(self, engines: Sequence[str]) -> None:
        """Send to these engines, in a thread; a second call changes nothing."""
        if self._sending is None and not self._ended:
            work = until_stopped(self._stop.set, self._source.send, engines, self._stop.is_set)
            self._sending = asyncio.create_task(work)

    async def end(self) -> str:
        """Stop what is not sent yet, and free everything, even if cancelled; return what failed before."""
        self._stop.set()
        try:
            return "" if self._sending is None else await self._sending  # which ends with its thread
        except Exception as error:  # noqa: BLE001 - sources fail in their own ways
            return f"{type(error).__name__}: {error}"
        finally:
            if not self._ended:
                self._ended = True
                await until_ended(self._source.end)


def _torch_entries(tensors: Mapping[str, Tensor], finite: bool) -> list[Entry]:
    entries = entries_of(tensors)
    of_torch = all(hasattr(entry.tensor, "data_ptr") for entry in entries)
    devices = {str(entry.tensor.device) if of_torch else "numpy" for entry in entries}
    if len(devices) != 1 or not of_torch:
        fix = "give torch tensors that are all on one device"
        raise InvalidField("source", sorted(devices), fix)
    if finite:
        check_finite((entry.name, entry.tensor) for entry in entries)
    return entries


def check_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `InvalidField` for values that are not finite, once all were seen; waits for the device once."""
    import torch

    extremes = {}
    for name, tensor in tensors:
        values = tensor.detach()
        if values.is_floating_point() and values.numel():
            wide = values.to(torch.bfloat16) if values.element_size() == 1 else values
            extremes[name] = torch.stack(torch.aminmax(wide)).double()
    if extremes:
        finite = torch.isfinite(torch.stack(list(extremes.values()))).all(dim=1).tolist()
        for name, each in zip(extremes, finite, strict=True):
            if not each:
                fix = f"tensor {name} has values that are not finite: go back to a step before it diverged"
                raise InvalidField("source", name, f"{fix}, or say finite=False")


def _flat(entry: Entry) -> torch.Tensor:
    """Return a tensor's bytes (uint8, [size]); a view of a contiguous tensor."""
    import torch

    flat: torch.Tensor = entry.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat


def _fill(room: np.ndarray[tuple[int], np.dtype[np.uint8]], entries: list[Entry], starts: list[int]) -> None:
    for entry, start in zip(entries, starts[:-1], strict=True):
        room[start : start + entry.size] = _flat(entry).cpu().numpy()


def _planned(entries: Sequence[Entry], starts: Sequence[int]) -> list[PlannedTensor]:
    return [
        PlannedTensor(entry.name, entry.dtype, entry.shape, start)
        for entry, start in zip(entries, starts[:-1], strict=True)
    ]


def _buckets(entries: list[Entry], most: int) -> Iterator[tuple[Bucket, list[Entry]]]:
    """Yield buckets of at most so many bytes, or of one tensor, in the order of the entries."""
    chosen: list[Entry] = []
    for entry in [*entries, None]:
        sizes = [each.size for each in chosen]
        if chosen and (entry is None or layout([*sizes, entry.size])[-1] > most):
            starts = layout(sizes)
            yield Bucket(starts[-1], _planned(chosen, starts)), chosen
            chosen = []
        if entry is not None:
            chosen.append(entry)


def _on_gpu(entry: Entry, kept: list[torch.Tensor]) -> Bucket:
    """Return a bucket with the memory of one tensor on a GPU; `kept` must live until the bucket was read."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    flat = _flat(entry)
    kept.append(flat)
    torch.cuda.synchronize(flat.device)
    offset = flat.storage_offset()
    _, shared = reduce_tensor(flat)
    memory = CudaMemory(
        str(torch.cuda.get_device_properties(flat.device).uuid), *shared[7:10], *shared[11:15]
    )
    planned = PlannedTensor(entry.name, entry.dtype, entry.shape, offset)
    return Bucket(offset + entry.size, [planned], memory)


def _stream(plan: Plan) -> TensorStream:
    return TensorStream({PLAN: np.frombuffer(msgspec.json.encode(plan), dtype=np.uint8)})
