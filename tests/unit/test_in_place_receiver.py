"""What a rank of an engine takes from a trainer for an update in place, and what it does when that fails."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from seer.client.in_place import Broadcast, SharedTensors  # noqa: E402
from seer.client.tensor_stream import _TYPES  # noqa: E402
from seer.common.weights.broadcast_group import BroadcastGroup, gather  # noqa: E402
from seer.common.weights.in_place import (  # noqa: E402
    SHARED_MEMORY,
    Bucket,
    CudaMemory,
    Plan,
    PlannedTensor,
    read_plan,
)
from seer.services.engine.vllm.in_place import TYPES, Place, Receiver, SourceLost  # noqa: E402

HERE = Place("e0", 0, 1, torch.device("cpu"))


def tensors():
    torch.manual_seed(0)
    return {
        "z": torch.randn(3, 5), "a": torch.randn(7, dtype=torch.bfloat16), "one": torch.tensor(2.5),
        "none": torch.zeros(0, 4), "byte": torch.arange(9, dtype=torch.uint8), "t": torch.randn(4, 6).t(),
        "flag": torch.tensor([True, False]),
    }  # fmt: skip


def planned(source, folder):
    folder.mkdir(exist_ok=True)
    stream = source.offer("v1")
    (folder / "model.safetensors").write_bytes(stream.read(0, stream.size).tobytes())
    return read_plan(folder)


def received(plan, place=HERE):
    receiver = Receiver(plan, place)
    got = {name: tensor.clone() for name, tensor in receiver.tensors()}
    receiver.close()
    return got, receiver.problem


def assert_equal(got, expected):
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got[name], tensor)


def test_every_type_that_a_trainer_may_send_is_known():
    assert set(_TYPES.values()) == TYPES.keys()
    assert {str(dtype) for dtype in TYPES.values()} == {f"torch.{name}" for name in _TYPES}


def test_shared_tensors_arrive_as_they_are(tmp_path):
    source = SharedTensors(tensors())
    got, problem = received(planned(source, tmp_path))
    source.end()
    assert problem == ""
    assert_equal(got, tensors())


@pytest.mark.parametrize("bucket_bytes", [1, 64, 10**6])
def test_broadcast_tensors_arrive_as_they_are(tmp_path, bucket_bytes):
    source = Broadcast(tensors(), bucket_bytes=bucket_bytes)
    plan = planned(source, tmp_path)
    places = [Place("e0", 0, 2, HERE.device), Place("e1", 0, 1, HERE.device), Place("e0", 1, 2, HERE.device)]
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(received, plan, place) for place in places]
        assert source.send(["e0", "e1"], lambda: False) == ""
        for future in futures:
            got, problem = future.result()
            assert problem == ""
            assert_equal(got, tensors())
    source.end()


def test_memory_that_is_gone_or_too_short_is_told_before_anything_is_taken(tmp_path):
    source = SharedTensors(tensors())
    plan = planned(source, tmp_path)
    file = SHARED_MEMORY / plan.buckets[0].memory.name
    with file.open("r+b") as opened:
        opened.truncate(plan.buckets[0].size - 1)
    with pytest.raises(SourceLost, match="bytes, not"):
        Receiver(plan, HERE)
    assert file.stat().st_size == plan.buckets[0].size - 1  # and it was not made longer
    source.end()
    with pytest.raises(SourceLost, match="No such file"):
        Receiver(plan, HERE)


def test_tensors_on_another_device_are_refused_by_name():
    memory = CudaMemory("GPU-other", b"", 4, 0, b"", 0, b"", event_required=False)
    plan = Plan("v1", "shared", [Bucket(4, [PlannedTensor("a", "F32", (1,), 0)], memory)])
    with pytest.raises(SourceLost, match="on GPU GPU-other, this rank on no GPU: broadcast them"):
        Receiver(plan, HERE)


def test_a_type_that_torch_lacks_is_refused_by_name():
    plan = Plan("v1", "shared", [Bucket(8, [PlannedTensor("a", "C64", (1,), 0)], None)])
    with pytest.raises(SourceLost, match="type C64"):
        Receiver(plan, HERE)


def test_what_does_not_come_is_zero_and_the_failure_is_told(tmp_path):
    source = Broadcast(tensors(), bucket_bytes=1)
    plan = planned(source, tmp_path)

    def receive_soon():
        receiver = Receiver(plan, HERE)
        receiver._source._group._seconds = 0.3
        got = {name: tensor.clone() for name, tensor in receiver.tensors()}
        receiver.close()
        return got, receiver.problem

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(receive_soon)
        assert gather(source._store, ["e0"], 30.0, lambda: False) == (2, [])
        group = BroadcastGroup(source._store, 0, 2, HERE.device, 30.0, "127.0.0.1")
        first = torch.zeros(plan.buckets[0].size, dtype=torch.uint8)
        first[:60] = tensors()["z"].reshape(-1).view(torch.uint8)
        group.broadcast(first)  # and no other
        got, problem = future.result()
    source.end()
    assert problem.startswith("bucket 2 of ")
    zeros = {name: torch.zeros_like(tensor.contiguous()) for name, tensor in tensors().items()}
    assert_equal(got, zeros | {"z": tensors()["z"]})


def test_a_trainer_that_is_gone_is_told_before_anything_is_taken(tmp_path):
    source = Broadcast(tensors(), step_seconds=0.2)
    plan = planned(source, tmp_path)
    source.end()
    with pytest.raises(SourceLost):
        Receiver(plan, HERE)


def test_an_engine_that_dies_is_told_to_the_trainer(tmp_path):
    source = Broadcast({str(i): torch.ones(2**24) for i in range(3)}, bucket_bytes=1)
    plan = planned(source, tmp_path)

    def leave():
        receiver = Receiver(plan, HERE)
        next(receiver.tensors())
        receiver.close()

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(leave)
        problem = source.send(["e0"], lambda: False)
        future.result()
    assert problem.startswith("the broadcast failed")
    source.end()


def test_an_engine_that_does_not_join_is_named(tmp_path):
    source = Broadcast(tensors(), step_seconds=0.2)
    planned(source, tmp_path)
    assert source.send(["e7"], lambda: False) == "e7 did not join in 0.2 s"
    source.end()


def test_an_engine_that_joined_first_outwaits_the_trainer_s_wait_for_another(tmp_path):
    source = Broadcast(tensors(), step_seconds=2.0)
    plan = planned(source, tmp_path)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(received, plan)
        while not source._store.check(["0 e0"]):
            time.sleep(0.01)
        time.sleep(0.2)
        assert source.send(["e0", "e7"], lambda: False) == "e7 did not join in 2 s"
        got, problem = future.result()
    source.end()
    assert problem == ""
    assert_equal(got, tensors())
