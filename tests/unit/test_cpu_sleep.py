"""Memory of a worker on CPUs: what is freed, what comes back, and with which values."""

import importlib.util
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

import torch

from seer.common.errors import EngineError
from seer.services.engine.vllm.cpu_sleep import PACKED, CpuSleep

KV, ALL = ["kv_cache"], ["kv_cache", "weights"]


class Model(torch.nn.Module):
    """A layer, its copy that shares its weight, a buffer, and a view of a parameter that is a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.tied = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.tied.weight = self.layer.weight
        self.scale = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.count = torch.nn.Parameter(torch.arange(4), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.empty(0))
        self.register_buffer("rotary", torch.arange(6.0))
        self.register_buffer("view", self.scale[:2])
        vars(self.layer)[PACKED] = lambda x: x


def worker():
    flat = torch.ones(2, 8)
    model = Model()
    runner = SimpleNamespace(kv_caches=[flat[0], flat[1]], get_model=lambda: model)
    return CpuSleep(runner), model, runner


def sizes(model, runner):
    """Bytes of weights and of KV."""
    weights = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in model.parameters()}
    return sum(weights.values()), runner.kv_caches[0].untyped_storage().nbytes()


def test_level_1_frees_kv_alone():
    memory, model, runner = worker()
    weights, kv = sizes(model, runner)
    before = model.layer.weight.clone()
    memory.sleep(ALL, 1)
    assert sizes(model, runner) == (weights, 0)
    memory.sleep(KV, 1)
    memory.sleep([], 1)
    assert sizes(model, runner) == (weights, kv)
    assert torch.equal(model.layer.weight, before)
    assert all(not tensor.any() for tensor in runner.kv_caches)


def test_level_2_frees_weights_and_leaves_nothing_that_could_be_taken_for_them():
    memory, model, runner = worker()
    weights, kv = sizes(model, runner)
    held = model.layer.weight.data  # as a CUDA graph, or another module, would have it
    memory.sleep(ALL, 2)
    assert sizes(model, runner) == (16, 0)  # what a buffer is a view of
    with pytest.raises(EngineError, match="dropped its weights"):
        model.layer.cpu_linear(torch.ones(1))
    memory.sleep(ALL, 2)  # again: nothing is lost of what was noted
    memory.sleep(KV, 1)
    assert sizes(model, runner) == (weights, 0)
    assert model.tied.weight.isnan().all()
    assert model.layer.weight.data_ptr() == model.tied.weight.data_ptr() == held.data_ptr()
    assert model.layer.bias.isnan().all()
    memory.sleep([], 1)
    assert sizes(model, runner) == (weights, kv)
    assert model.layer.weight.isnan().all()


def test_buffers_keep_their_values():
    memory, model, _ = worker()
    memory.sleep(ALL, 2)
    assert model.rotary.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.view.tolist() == [1, 1]
    memory.sleep([], 1)
    assert model.rotary.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.view.tolist() == [1, 1]


def test_weights_loaded_while_kv_sleeps_stay_when_it_wakes():
    memory, model, _ = worker()
    memory.sleep(ALL, 2)
    memory.sleep(KV, 2)
    model.layer.weight.data.fill_(3.0)
    memory.sleep([], 2)
    assert model.tied.weight.eq(3.0).all()
    memory.sleep(ALL, 1)
    memory.sleep([], 1)
    assert model.tied.weight.eq(3.0).all()
