"""Takes the tensors of an update in place from the trainer, one bucket after the other, for vLLM to load.

Invariants (tests/unit/test_in_place_receiver.py):
- the tensors of the plan are yielded once, in its order, with its names, types and shapes;
- when the trainer's bytes do not come, what is missing is yielded as zeros, so that vLLM ends its reload in
  order and can begin another one; the failure is told afterwards;
- nothing is received before all of the plan's memory could be opened, or the group was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from seer.common.weights.broadcast_group import BroadcastGroup, join
from seer.common.weights.in_place import SHARED_MEMORY, Bucket, CudaMemory, Plan, SharedFile

if TYPE_CHECKING:
    from seer.services.engine.vllm.nccl_receiver import NcclReceiver

Tensors = Iterable[tuple[str, torch.Tensor]]

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool,
}  # fmt: skip
"""By safetensors' name."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank of an engine, and the device that it loads to."""

    engine: str
    rank: int
    ranks: int
    device: torch.device


class Receiver:
    """`problem`: why bytes did not come; empty: all did so far. Raises `SourceLost` if nothing can come."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self.problem = ""
        self._plan = plan
        self._device = place.device
        unknown = {tensor.dtype for bucket in plan.buckets for tensor in bucket.tensors} - TYPES.keys()
        try:
            if unknown:
                raise RuntimeError(f"type {min(unknown)} is none of torch's")
            self._source = _source(plan, place)
        except (RuntimeError, OSError, ValueError) as error:
            raise SourceLost(_line(error)) from error

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors by name; zeros from where `problem` arose."""
        for index, bucket in enumerate(self._plan.buckets):
            yield from self._take(index, bucket)

    def close(self) -> None:
        """Let go of the trainer's memory, or leave the group."""
        self._source.close()

    def _take(self, index: int, bucket: Bucket) -> Tensors:
        if not self.problem:
            try:
                return self._source.take(index, bucket)
            except (RuntimeError, OSError) as error:
                self.problem = f"bucket {index + 1} of {len(self._plan.buckets)}: {_line(error)}"
        return _views(torch.zeros(bucket.size, dtype=torch.uint8, device=self._device), bucket)


class SourceLost(RuntimeError):  # noqa: N818 - reads as what it says at the call site
    """The trainer cannot be reached, or its memory not be opened: the live weights are untouched."""


class Shared:
    """Memory that the trainer shares; opened at once."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self._buckets = [_open(bucket, place.device) for bucket in plan.buckets]

    def take(self, index: int, bucket: Bucket) -> Tensors:
        """Return a bucket's tensors."""
        return _views(self._buckets[index], bucket)

    def close(self) -> None:
        """Let go of the trainer's memory."""
        self._buckets.clear()


class Group:
    """A broadcast's group."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self._device = place.device
        self._group: BroadcastGroup = join(
            (plan.host, plan.port), place.engine, place.rank, place.ranks, place.device, plan.step_seconds
        )

    def take(self, index: int, bucket: Bucket) -> Tensors:
        """Receive a bucket's tensors. Raises `RuntimeError` or `TimeoutError`.

        vLLM may keep the tensors, so each bucket has memory of its own.
        """
        data = torch.empty(bucket.size, dtype=torch.uint8, device=self._device)
        self._group.broadcast(data)
        return _views(data, bucket)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def _source(plan: Plan, place: Place) -> Shared | Group | NcclReceiver:
    if plan.transport == "vllm_nccl":
        from seer.services.engine.vllm.nccl_receiver import NcclReceiver

        return NcclReceiver(plan, place)
    return Shared(plan, place) if plan.transport == "shared" else Group(plan, place)


def _views(data: torch.Tensor, bucket: Bucket) -> Tensors:
    """Yield the tensors in a bucket's bytes (uint8, [size])."""
    for tensor in bucket.tensors:
        flat = data[tensor.start : tensor.start + tensor.size]
        yield tensor.name, flat.view(TYPES[tensor.dtype]).view(tensor.shape)


def _open(bucket: Bucket, device: torch.device) -> torch.Tensor:
    match bucket.memory:
        case SharedFile(name):
            path = SHARED_MEMORY / name
            if (size := path.stat().st_size) < bucket.size:  # torch would make it longer
                raise OSError(f"{path} has {size} bytes, not {bucket.size}")
            return torch.from_file(str(path), shared=True, size=bucket.size, dtype=torch.uint8)
        case CudaMemory() as memory:
            return _open_cuda(memory, bucket, device)
        case None:
            raise RuntimeError("a bucket has no memory")


def _open_cuda(memory: CudaMemory, bucket: Bucket, device: torch.device) -> torch.Tensor:
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "no GPU"
    if own != memory.device:
        fix = "broadcast them"
        raise RuntimeError(f"the trainer's tensors are on GPU {memory.device}, this rank on {own}: {fix}")
    if memory.size < bucket.size:
        raise RuntimeError(f"the trainer shares {memory.size} bytes, not {bucket.size}")
    data: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor, (bucket.size,), (1,), 0, torch.storage.TypedStorage, torch.uint8,
        device.index, memory.handle, memory.size, memory.offset, False,
        memory.counter, memory.counter_offset, memory.event, memory.event_required,
    )  # fmt: skip
    return data


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
