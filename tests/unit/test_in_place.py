"""Plans of updates in place, and what a trainer's side makes ready, sends and frees."""

import asyncio
import os
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from seer.client.in_place import Broadcast, SharedTensors, Transfer
from seer.client.tensor_stream import TensorStream
from seer.common.errors import InvalidField
from seer.common.weights.in_place import (
    MAX_PLAN_BYTES,
    SHARED_MEMORY,
    Bucket,
    CudaMemory,
    Plan,
    PlannedTensor,
    SharedFile,
    is_in_place,
    layout,
    parse,
    read_plan,
)
from seer.common.weights.lora import inner_source

torch = pytest.importorskip("torch")

A = PlannedTensor("a", "F32", (2, 3), 0)
B = PlannedTensor("b", "BF16", (4,), 24)
FILE = SharedFile("psm_1")


def shared(*tensors, size=32, memory=FILE):
    return Plan("v1", "shared", [Bucket(size, list(tensors), memory)])


def encoded(plan):
    return msgspec.json.encode(plan)


def written(folder, stream):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(stream.read(0, stream.size).tobytes())
    return folder


def test_a_plan_comes_back_as_it_was_sent():
    cuda = CudaMemory("GPU-1", b"\x00\xff", 32, 512, b"c", 1, b"e", event_required=True)
    broadcast = Plan("v2", "broadcast", [Bucket(32, [A, B])], "10.0.0.1", 4000, 1.5)
    for plan in (shared(A, B), shared(A, B, memory=cuda), broadcast):
        assert parse(encoded(plan)) == plan


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (shared(A, A), "tensor a is not at 0"),
        (shared(A, PlannedTensor("a", "F32", (2,), 24)), "names a tensor twice"),
        (shared(A, PlannedTensor("b", "F32", (2,), 16)), "tensor b is not at 16"),
        (shared(A, size=23), "tensor a is not at 0 of 23 bytes"),
        (shared(PlannedTensor("a", "F32", (2**40, 2**40), 0)), "tensor a is not at 0"),
        (shared(PlannedTensor("a", "F32", (2,), 2)), "tensor a is not at 2"),
        (shared(PlannedTensor("a", "F32", (2,), 2**61), size=2**61), "tensor a is not at"),
        (shared(PlannedTensor("a", "Q4", (2,), 0)), "unknown type Q4"),
        (shared(), "has 0 tensors"),
        (shared(A, memory=None), "not shared"),
        (Plan("v", "broadcast", [Bucket(32, [A], FILE)], "h", 1), "not broadcast"),
        (Plan("v", "broadcast", [Bucket(32, [A])]), "no host and port"),
    ],
)  # fmt: skip
def test_an_inconsistent_plan_is_refused_by_name(plan, why):
    with pytest.raises(ValueError, match=why):
        parse(encoded(plan))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"psm_1", b"../etc/passwd"), (b"psm_1", b"a/b"), (b"psm_1", b""), (b"psm_1", b".."), (b"32", b"-1"),
        (b"32", b"1e99"), (b"[2,3]", b"[-2,-3]"), (b'"SharedFile"', b'"Other"'), (b'"shared"', b'"smb"'),
        (b'"step_seconds":30.0', b'"step_seconds":0'), (b'"port":0', b'"port":70000'), (b"{", b"["), (b"v1", b"\xff"),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(old, new):
    data = encoded(shared(A, B))
    assert old in data
    with pytest.raises(ValueError, match="has no plan"):
        parse(data.replace(old, new, 1))


def test_a_file_with_something_else_than_a_plan_is_refused(tmp_path):
    other = TensorStream({"weight": np.zeros(3, np.uint8)})
    with pytest.raises(ValueError, match="a plan is one"):
        read_plan(written(tmp_path / "other", other))
    assert MAX_PLAN_BYTES < 2**30


def test_a_source_in_place_names_the_stream_with_its_plan():
    assert is_in_place("inplace:spool:v1")
    assert not is_in_place("spool:v1")
    assert inner_source("inplace:spool:v1") == "spool:v1"


def test_tensors_lie_where_every_type_can_be_read():
    assert layout([3, 16, 0, 17]) == [0, 16, 32, 32, 64]


# --- the trainer's side ---------------------------------------------------------------------------


def tensors():
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_shared_tensors_are_copies_in_a_file_that_is_gone_at_the_end(tmp_path):
    source, given = SharedTensors(tensors()), tensors()
    plan = read_plan(written(tmp_path / "one", source.offer("v1")))
    (bucket,) = plan.buckets
    file = SHARED_MEMORY / bucket.memory.name
    assert [(each.name, each.dtype, each.shape) for each in bucket.tensors] == [
        ("a", "F32", (2, 3)),
        ("b", "BF16", (4,)),
    ]
    held = np.fromfile(file, np.uint8)
    first = bucket.tensors[0]
    assert bytes(held[first.start : first.start + 24]) == given["a"].numpy().tobytes()
    again = read_plan(written(tmp_path / "two", source.offer("v2")))
    assert not file.exists()  # the earlier update's
    assert again.buckets[0].memory != bucket.memory
    source.end()
    source.end()
    assert not (SHARED_MEMORY / again.buckets[0].memory.name).exists()


def test_plans_of_equal_tensors_have_digests_of_their_own():
    source = SharedTensors(tensors())
    digests = {source.offer(name).digest() for name in ("v1-a", "v1-b")}
    source.end()
    assert len(digests) == 2


def test_without_room_in_shared_memory_nothing_is_left_there(monkeypatch):
    before = set(SHARED_MEMORY.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InvalidField, match="has no room for these bytes"):
        SharedTensors(tensors()).offer("v1")
    assert set(SHARED_MEMORY.iterdir()) <= before


@pytest.mark.parametrize("make", [SharedTensors, Broadcast])
def test_only_torch_tensors_on_one_device_are_taken(make):
    for bad in ({"a": np.zeros(3)}, {"a": torch.zeros(3), "b": np.zeros(3)}):
        with pytest.raises(InvalidField, match="all on one device"):
            make(bad).offer("v1")
    with pytest.raises(InvalidField, match="at least one tensor"):
        make({}).offer("v1")


def test_a_broadcast_has_buckets_of_bounded_size_in_the_order_of_the_tensors(tmp_path):
    given = {str(i): torch.zeros(size, dtype=torch.uint8) for i, size in enumerate((10, 40, 100, 5, 5))}
    source = Broadcast(given, bucket_bytes=64)
    plan = read_plan(written(tmp_path / "one", source.offer("v1")))
    assert [[each.name for each in bucket.tensors] for bucket in plan.buckets] == [
        ["0", "1"],
        ["2"],
        ["3", "4"],
    ]
    assert [bucket.size for bucket in plan.buckets] == [64, 112, 32]
    assert plan.port
    source.end()


def test_settings_that_make_no_sense_are_refused_by_name():
    for fields in ({"step_seconds": 0.0}, {"step_seconds": 1e9}, {"bucket_bytes": 0}):
        with pytest.raises(InvalidField, match=next(iter(fields))):
            Broadcast(tensors(), **fields)


def test_a_port_that_is_taken_is_refused_by_name():
    first = Broadcast(tensors())
    first.offer("v1")
    second = Broadcast(tensors(), port=first._store.port)
    with pytest.raises(InvalidField, match="port = "):
        second.offer("v2")
    first.end()


class Source:
    """Sends until it is stopped, or raises; notes what was asked of it."""

    def __init__(self, error=None):
        self.sent, self.ended, self.error = [], 0, error

    def offer(self, name):
        raise NotImplementedError

    def send(self, engines, stopped):
        self.sent.append(engines)
        if self.error is not None:
            raise self.error
        while not stopped():
            pass
        return "stopped"

    def end(self):
        self.ended += 1


async def test_a_transfer_sends_once_and_frees_once():
    source = Source()
    transfer = Transfer(source)
    transfer.begin(["a", "b"])
    transfer.begin(["c"])
    assert await transfer.end() == "stopped"
    assert await transfer.end() == "stopped"
    transfer.begin(["d"])
    await asyncio.sleep(0)
    assert (source.sent, source.ended) == ([["a", "b"]], 1)


async def test_a_transfer_that_never_began_is_freed_too():
    source = Source()
    assert await Transfer(source).end() == ""
    assert (source.sent, source.ended) == ([], 1)


async def test_a_transfer_that_is_cancelled_again_and_again_sends_to_its_end_and_is_freed():
    source, let, did = Source(), threading.Event(), []
    source.send = lambda engines, stopped: let.wait(60) and did.append("sent")
    source.end = lambda: did.append("ended")
    transfer = Transfer(source)
    transfer.begin(["a"])
    ending = asyncio.create_task(transfer.end())
    for _ in range(3):
        await asyncio.sleep(0.02)
        ending.cancel()
    await asyncio.sleep(0.02)
    let.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert did == ["sent", "ended"]


async def test_what_breaks_while_sending_is_told():
    source = Source(MemoryError("no room"))
    transfer = Transfer(source)
    transfer.begin(["a"])
    assert await transfer.end() == "MemoryError: no room"


def test_torch_is_not_imported_before_an_update():
    code = "import sys, seer.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_name_before_anything_is_offered(bad):
    wrong = tensors()
    name = next(name for name, tensor in wrong.items() if tensor.is_floating_point())
    wrong[name].view(-1)[-1] = bad
    for source in (SharedTensors(wrong), Broadcast(wrong)):
        with pytest.raises(InvalidField, match=f"tensor {name} has values that are not finite"):
            source.offer("v1")
    for source in (SharedTensors(wrong, finite=False), Broadcast(wrong, finite=False)):
        source.offer("v1")
        source.end()
