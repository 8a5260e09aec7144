"""Weights by vLLM's NCCL transfer engines: both sides are vLLM's, the communicator and CUDA are made up."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

import torch
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta
from vllm.model_executor.model_loader import mtp_validation  # noqa: F401 - engines have it: it takes seconds

from seer.client import InvalidField, VllmTransfer
from seer.common.weights.in_place import read_plan
from seer.services.engine.vllm import nccl_receiver  # noqa: F401 - takes longer than a step
from seer.services.engine.vllm.in_place import Place, Receiver, SourceLost

MADE_UP = Path(__file__).parents[1] / "made_up_nccl"
sys.path.append(str(MADE_UP))
import made_up_nccl  # noqa: E402

pytestmark = pytest.mark.vllm

CPU = torch.device("cpu")
SOON = 3.0
"""For steps that are to fail."""
ALL = [Place("e0", 0, 2, CPU), Place("e1", 0, 1, CPU), Place("e0", 1, 2, CPU)]


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    for owner, name in made_up_nccl.owners():
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    made_up_nccl.install()
    yield
    made_up_nccl.over.set()


class Source:
    """Gives tensors as a `WeightSource` does, and counts the passes; calls `at` before tensor `index`."""

    def __init__(self, tensors, index=-1, at=lambda: None):
        self.tensors, self.index, self.at, self.passes = tensors, index, at, 0

    def metadata(self):
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self.tensors.items()]

    def __iter__(self):
        self.passes += 1
        for index, pair in enumerate(self.tensors.items()):
            if index == self.index and self.passes == 2:
                self.at()
            yield pair


def tensors():
    torch.manual_seed(0)
    return {
        "z": torch.randn(3, 5), "one": torch.tensor(2.5), "none": torch.zeros(0, 4), "t": torch.randn(4, 6).t(),
        "a": torch.randn(8, dtype=torch.bfloat16), "byte": torch.arange(9, dtype=torch.uint8),
    }  # fmt: skip


def transfer(source, **fields):
    return VllmTransfer(source, **fields)


def planned(source, folder):
    stream = source.offer("v1")
    (folder / "model.safetensors").write_bytes(stream.read(0, stream.size).tobytes())
    return read_plan(folder)


def received(plan, place):
    receiver = Receiver(plan, place)
    try:
        return {name: tensor.clone() for name, tensor in receiver.tensors()}, receiver.problem
    finally:
        receiver.close()


def never():
    return False


def sent(source, plan, places, receive=received, engines=("e0", "e1"), stopped=never):
    """Return what the sender says, and what each place received, or its error."""
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(receive, plan, place) for place in places]
        problem = source.send(engines, stopped)
        got = [future.exception() or future.result() for future in futures]
    source.end()
    return problem, got


def assert_equal(got, expected):
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got[name], tensor)


@pytest.mark.parametrize("bucket_bytes", [1, 60, 64, 10**6])
def test_ranks_of_two_engines_get_what_the_source_gives(tmp_path, bucket_bytes):
    given = Source(tensors())
    source = transfer(given, bucket_bytes=bucket_bytes)
    plan = planned(source, tmp_path)
    assert {1: 5, 60: 3, 64: 2, 10**6: 1}[bucket_bytes] == len(plan.buckets)
    problem, got = sent(source, plan, ALL)
    assert problem == ""
    assert [each[1] for each in got] == [""] * 3
    for each, _ in got:
        assert_equal(each, tensors())
    assert given.passes == 2


def test_a_module_is_sent_again_and_again(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).bfloat16()
    source = transfer(ModuleSource(model), bucket_bytes=50)
    for scale in (1.0, 3.0):
        model[0].weight.data.mul_(scale)
        problem, got = sent(source, planned(source, tmp_path), ALL[1:2], engines=["e1"])
        assert (problem, got[0][1]) == ("", "")
        assert_equal(got[0][0], dict(model.named_parameters()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_before_anything_is_offered(tmp_path, value):
    bad = Source(tensors() | {"one": torch.tensor(value)})
    source = transfer(bad)
    with pytest.raises(InvalidField, match="tensor one has values that are not finite"):
        source.offer("v1")
    source.end()
    assert bad.passes == 2  # other ranks go through theirs twice
    allowed = Source(bad.tensors)
    problem, got = sent(
        source := transfer(allowed, finite=False), planned(source, tmp_path), ALL[1:2], engines=["e1"]
    )
    assert (problem, got[0][1], allowed.passes) == ("", "", 1)


def test_ranks_that_follow_go_through_their_sources_as_often():
    for finite, passes in ((True, 2), (False, 1)):
        other = Source({"a": torch.tensor(float("nan"))})
        transfer(other, finite=finite).follow()
        assert other.passes == passes


def test_an_update_that_is_refused_ends_without_a_send(tmp_path):
    given = Source(tensors())
    source = transfer(given)
    planned(source, tmp_path)
    source.end()
    source.end()
    assert given.passes == 2
    assert source.send(["e0"], lambda: False) == "the broadcast was not offered"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(1)}, "tensor b is not at 3 of 7 bytes"),
        ({}, "has 0 tensors"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "give numpy arrays or torch tensors"),
    ],
)
def test_what_vllm_cannot_pack_is_refused_by_name(given, why):
    with pytest.raises(InvalidField, match=why):
        transfer(Source(given)).offer("v1")


def test_a_trainer_without_a_gpu_is_told_so(monkeypatch):
    def none():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_device_index", none)
    with pytest.raises(InvalidField, match="there is no GPU here: use Broadcast"):
        VllmTransfer(Source({}))


def test_an_engine_that_never_comes_is_named_and_the_other_gets_all(tmp_path):
    given = Source(tensors())
    source = transfer(given, step_seconds=SOON)
    planned(source, tmp_path)
    assert source.send(["e7"], never) == f"e7 did not join in {SOON:g} s"
    source.end()
    assert given.passes == 2
    source = transfer(Source(tensors()), step_seconds=4.0)
    problem, got = sent(source, planned(source, tmp_path), ALL[1:2])
    assert problem == "e0 did not join in 4 s"
    assert_equal(got[0][0], tensors())


def test_a_rank_that_comes_and_makes_no_group_ends_both_sides_before_anything_is_taken(tmp_path, monkeypatch):
    """NCCL waits for ever then."""
    given = Source(tensors())
    source = transfer(given, step_seconds=SOON)
    plan = planned(source, tmp_path)
    make = made_up_nccl.Communicator.from_unique_id_bytes
    leave = threading.Event()

    def some(unique_id, rank, world_size, device):
        return make(unique_id, rank, world_size, device) if rank != 2 else leave.wait(30)

    monkeypatch.setattr(made_up_nccl.Communicator, "from_unique_id_bytes", some)
    problem, got = sent(source, plan, ALL)
    leave.set()
    assert problem == f"the broadcast failed: vLLM's transfer did not go on for {SOON:g} s"
    assert [type(each) for each in got] == [SourceLost] * 3
    assert given.passes == 2


def test_an_engine_that_dies_midway_fails_the_update_for_all(tmp_path):
    given = Source({str(index): torch.full((2**20,), float(index)) for index in range(1, 9)})
    source = transfer(given, bucket_bytes=1, step_seconds=SOON)

    def receive(plan, place):
        if place.engine == "e0":
            return received(plan, place)
        receiver = Receiver(plan, place)
        next(iter(receiver.tensors()))
        return receiver.close()

    problem, got = sent(source, planned(source, tmp_path), [Place("e0", 0, 1, CPU), ALL[1]], receive)
    assert problem.startswith("the broadcast failed: vLLM's transfer did not go on")
    (taken, why), _ = got
    assert "of 8: vLLM's transfer did not go on" in why
    first = int(why.split()[1])
    for name, tensor in taken.items():  # zeros from where it failed: what came late is not taken
        assert torch.equal(tensor, given.tensors[name] * (int(name) < first)), name
    assert given.passes == 2


def test_a_trainer_that_stands_still_ends_the_wait_of_engines(tmp_path):
    leave = threading.Event()
    source = transfer(Source(tensors(), 2, lambda: leave.wait(30)), bucket_bytes=1)
    plan = planned(source, tmp_path)

    def receive(plan, place):
        receiver = Receiver(plan, place)
        receiver._source._watch._seconds = SOON
        got = {name: tensor.clone() for name, tensor in receiver.tensors()}
        receiver.close()
        leave.set()
        return got, receiver.problem

    _, got = sent(source, plan, ALL[1:2], receive, ["e1"], leave.is_set)
    assert got[0][1].startswith("bucket ")
    zeros = {name: torch.zeros_like(tensor.contiguous()) for name, tensor in tensors().items()}
    assert_equal(got[0][0], zeros | {"z": tensors()["z"], "one": tensors()["one"]})


def test_a_source_that_gives_other_tensors_than_it_says_ends_the_update(tmp_path):
    given = Source(tensors())
    source = transfer(given, step_seconds=SOON)
    plan = planned(source, tmp_path)
    given.metadata = lambda: [ParamMeta("z", torch.float32, (3, 5))]
    problem, got = sent(source, plan, ALL[1:2], engines=["e1"])
    assert problem.startswith("the broadcast failed: WeightSource yielded more parameters than")
    assert got[0][1].startswith("bucket 1 of 1: vLLM's transfer did not go on")


def test_a_trainer_whose_update_is_over_sends_no_more(tmp_path):
    over = threading.Event()
    given = Source(tensors(), 3, lambda: (over.set(), time.sleep(1)))
    source = transfer(given, bucket_bytes=1, step_seconds=4.0)
    problem, got = sent(source, planned(source, tmp_path), ALL[1:2], engines=["e1"], stopped=over.is_set)
    assert problem.startswith("the broadcast failed: vLLM's transfer did not go on")
    assert got[0][1].startswith("bucket ")
    assert given.passes == 2


def test_a_communicator_that_is_off_is_refused(tmp_path, monkeypatch):
    """vLLM's would send and receive nothing, and not say so."""
    off = SimpleNamespace(disabled=True, destroy=lambda: None)
    monkeypatch.setattr(made_up_nccl.Communicator, "from_unique_id_bytes", lambda *_, **__: off)
    source = transfer(Source(tensors()))
    problem, got = sent(source, planned(source, tmp_path), ALL[1:2], engines=["e1"])
    assert problem.startswith("the broadcast failed: vLLM has NCCL off here")
    assert isinstance(got[0], SourceLost)


RANK = """
import sys, threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from vllm.distributed.weight_transfer.base import ModuleSource

import made_up_nccl  # noqa: E402
from seer.client import VllmTransfer
from seer.common.weights.in_place import read_plan
from seer.services.engine.vllm import nccl_receiver
from seer.services.engine.vllm.in_place import Place, Receiver

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
made_up_nccl.install()
dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
whole = torch.arange(24.0).reshape(6, 4)
model = torch.nn.Linear(4, 6, bias=False)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
model.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
source = VllmTransfer(ModuleSource(model), step_seconds=200)
got = {}

def receive():
    receiver = Receiver(read_plan(folder), Place("e", 0, 1, torch.device("cpu")))
    got.update(receiver.tensors())
    receiver.close()

for refused in (True, False):
    if rank:
        source.follow()
        continue
    stream = source.offer("v1")
    (folder / "model.safetensors").write_bytes(stream.read(0, stream.size).tobytes())
    if not refused:
        engine = threading.Thread(target=receive)
        engine.start()
        assert source.send(["e"], lambda: False) == ""
        engine.join()
        assert torch.equal(got["weight"], whole), got
    source.end()
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shards_of_two_ranks_are_put_together_tensor_by_tensor_also_when_an_update_was_refused(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(MADE_UP), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=500)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
