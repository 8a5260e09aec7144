"""The plan of an update in place: what a trainer says of tensors that engines copy into their live weights.

A plan is sent as a stream is: as the one tensor `PLAN`, JSON, in a file in the safetensors format. Its digest
is the version's: a plan has a name of its own, so no two updates have one digest. Plans are untrusted.

Invariants (tests/unit/test_in_place.py):
- a plan that `parse` returns is consistent: tensors have names of their own and types that are known, lie in
  their bucket one after the other, and are as long as their types and shapes require;
- nothing in a plan is unpickled, and no path in it leads out of the folder of shared memory.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from seer.common.errors import NOT_DECODED
from seer.common.weights.safetensors import BITS, MAX_TENSORS, open_regular, stored

SCHEME = "inplace:"
"""Prefix of a `source` of weights that is a plan: the stream that has it follows."""

PLAN = "in_place_plan"

MAX_PLAN_BYTES = 2**28
"""A plan of `MAX_TENSORS` tensors with long names."""

ALIGNMENT = 16
"""`layout` has tensors start at multiples of this many bytes: every type can be read in place there."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - Linux has its shared memory there

_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]
_Handle = Annotated[bytes, msgspec.Meta(max_length=2**16)]


class PlannedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that starts `start` bytes into its bucket; `dtype` as in safetensors, e.g. `BF16`."""

    name: _Name
    dtype: _Name
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]
    start: _Size

    @property
    def size(self) -> int:
        """Its bytes."""
        return BITS[self.dtype] * math.prod(self.shape) // 8


class SharedFile(msgspec.Struct, frozen=True, tag=True):
    """A file in `SHARED_MEMORY` that has a bucket."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,200}$")]


class CudaMemory(msgspec.Struct, frozen=True, tag=True):
    """A trainer's storage on the GPU `device` (a UUID), by the handles that torch gives for it."""

    device: _Name
    handle: _Handle
    size: _Size
    offset: _Size
    counter: _Handle
    counter_offset: _Size
    event: _Handle
    event_required: bool


class Bucket(msgspec.Struct, frozen=True):
    """`size` bytes with tensors; `memory` holds the bytes already, else they are sent."""

    size: _Size
    tensors: list[PlannedTensor]
    memory: SharedFile | CudaMemory | None = None


class Plan(msgspec.Struct, frozen=True):
    """`name` is unique. Groups, of vLLM's NCCL engines or others, meet at `host`:`port`.

    A step takes `step_seconds` at most.
    """

    name: _Name
    transport: Literal["shared", "broadcast", "vllm_nccl"]
    buckets: list[Bucket]
    host: _Name = ""
    port: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] = 0
    step_seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0


def is_in_place(source: str) -> bool:
    """Return whether a source of weights is a plan: its weights cannot be had again after the update."""
    return source.startswith(SCHEME)


def layout(sizes: list[int]) -> list[int]:
    """Return where tensors of so many bytes start in one bucket; one more: the bucket's size."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return starts


def read_plan(folder: Path) -> Plan:
    """Return the plan in a folder with its stream. Raises `ValueError` or `OSError`."""
    found = stored(folder)
    if [each.name for each in found] != [PLAN]:
        raise ValueError(f"has {len(found)} tensors: a plan is one, named {PLAN}")
    if found[0].size > MAX_PLAN_BYTES:
        raise ValueError(f"has a plan of {found[0].size} bytes: at most {MAX_PLAN_BYTES}")
    with open_regular(found[0].file) as opened:
        opened.seek(found[0].start)
        return parse(opened.read(found[0].size))


def parse(data: bytes) -> Plan:
    """Return a consistent plan. Raises `ValueError`."""
    try:
        plan = msgspec.json.decode(data, type=Plan)
    except NOT_DECODED as error:
        raise ValueError(f"has no plan of an update in place: {error}") from error
    check(plan)
    return plan


def check(plan: Plan) -> None:
    """Raise `ValueError` for a plan that is not consistent."""
    names: set[str] = set()
    for bucket in plan.buckets:
        _check(bucket, plan.transport)
        names |= {tensor.name for tensor in bucket.tensors}
    if len(names) != sum(len(bucket.tensors) for bucket in plan.buckets):
        raise ValueError("names a tensor twice")
    if not 0 < len(names) <= MAX_TENSORS:
        raise ValueError(f"has {len(names)} tensors: give 1 to {MAX_TENSORS}")
    if plan.transport != "shared" and not (plan.host and plan.port):
        raise ValueError("has no host and port at which to meet")


def _check(bucket: Bucket, transport: str) -> None:
    if (bucket.memory is None) != (transport != "shared"):
        raise ValueError(f"has a bucket that is not {transport}")
    end = 0
    for tensor in sorted(bucket.tensors, key=lambda each: each.start):
        if tensor.dtype not in BITS:
            raise ValueError(f"tensor {tensor.name} has an unknown type {tensor.dtype}")
        fits = end <= tensor.start <= bucket.size - tensor.size
        if not fits or 8 * tensor.start % BITS[tensor.dtype]:
            raise ValueError(f"tensor {tensor.name} is not at {tensor.start} of {bucket.size} bytes")
        end = tensor.start + tensor.size
