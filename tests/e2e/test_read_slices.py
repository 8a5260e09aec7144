"""What vLLM's own loaders read of weights as one of two ranks, and that no more than that is needed."""

import functools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_families import tiny
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from seer.common.slices import slice_of
from seer.services.engine.nodes.leader import free_port
from seer.services.engine.nodes.shares import shares
from seer.services.engine.vllm.read_slices import _noted, proven
from seer.services.engine.vllm.weight_reload import reloading

pytestmark = pytest.mark.slow


@pytest.fixture(params=[0, 1])
def rank(request, monkeypatch):
    """Have vLLM make and load models as one of two ranks; they are never run."""
    where = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, where, 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    for group in (parallel_state._TP, parallel_state._EP):
        if group is not None:
            monkeypatch.setattr(group, "world_size", 2)
            monkeypatch.setattr(group, "rank_in_group", request.param)
    yield request.param
    monkeypatch.undo()
    cleanup_dist_env_and_memory()


@contextmanager
def configured(folder, experts=False):
    """Yield vLLM's configuration of a rank; `experts`: it has some whole."""
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64
    ).create_engine_config()
    config.parallel_config.enable_expert_parallel = experts
    config.parallel_config.tensor_parallel_size = 2
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        yield config


def weights_of(folder, config, model):
    """Return what yields the tensors of a folder."""
    config.model_config.model = str(folder)
    return functools.partial(get_model_loader(config.load_config).get_all_weights, config.model_config, model)


def nodes(rank):
    return SimpleNamespace(parallel_config=SimpleNamespace(node_rank=rank), speculative_config=None)


def loaded(folder, rank, experts=False, holes=False):
    """Return a rank's parameters after a load of the folder, and what it reads if there are no `holes`."""
    with configured(folder, experts) as config:
        model = initialize_model(vllm_config=config)
        for tensor in model.parameters():
            tensor.data.fill_(-7.0)
        found, weights = None, weights_of(folder, config, model)
        if not holes:
            found = proven(model.load_weights, weights, folder, model, nodes(rank))
            assert not isinstance(found, str), found
        model.load_weights(weights())
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}, found


def with_holes(folder, found, rank):
    """Write a folder that has a share of another one, and no number elsewhere; return the share of its bytes."""
    file = folder / "model.safetensors"
    part, content = shares([[found]], file, [rank])[rank], file.read_bytes()
    holed = bytearray(b"\xff" * len(content))
    for at, size in part.runs(0, part.size):
        holed[at : at + size] = content[at : at + size]
    other = folder.with_name("holes")
    other.mkdir()
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    (other / file.name).write_bytes(holed)
    return other, part.size / part.whole


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("llama", False), ("qwen3-tied", False), ("qwen3-moe", False), ("qwen3-moe", True),
        ("deepseek", False), ("gemma3", False), ("gpt-oss", False),
    ],
)  # fmt: skip
def test_a_share_makes_the_same_model_as_the_whole(family, experts, rank, tmp_path):
    folder = tmp_path / "model"
    tiny(family).save_pretrained(folder)
    expected, found = loaded(folder, rank, experts)
    other, share = with_holes(folder, found, rank)
    again, _ = loaded(other, rank, experts, holes=True)
    assert expected.keys() == again.keys()
    assert [name for name in expected if not torch.equal(expected[name], again[name])] == []
    assert share < 0.75, f"{share} of {family}"
    own = {name for name in found.slices if ".experts." in name}
    assert not experts or {int(name.split(".")[5]) // 4 for name in own} == {rank}


def test_rows_columns_and_experts_are_read_as_they_lie(rank, tmp_path):
    folder = tmp_path / "model"
    tiny("qwen3-moe").save_pretrained(folder)
    _, found = loaded(folder, rank)
    tensors = load_file(folder / "model.safetensors")
    layer, cuts = "model.layers.1.", {}
    for name, dim in (
        ("self_attn.q_proj", 0), ("self_attn.k_proj", 0), ("self_attn.v_proj", 0), ("self_attn.o_proj", 1),
        ("mlp.experts.3.gate_proj", 0), ("mlp.experts.3.up_proj", 0), ("mlp.experts.3.down_proj", 1),
        ("self_attn.q_norm", None), ("mlp.gate", None),
    ):  # fmt: skip
        tensor = tensors[f"{layer}{name}.weight"]
        view = tensor if dim is None else tensor.chunk(2, dim)[rank]
        offset = (view.storage_offset() - tensor.storage_offset()) * 4
        cuts[f"{layer}{name}.weight"] = [slice_of(offset, view.shape, view.stride(), 4)]
    assert {name: found.slices[name] for name in cuts} == cuts


@pytest.mark.parametrize(
    ("family", "experts"),
    [("llama", False), ("qwen3-tied", False), ("qwen3-moe", False), ("qwen3-moe", True), ("gemma3", False)],
)
def test_so_it_is_where_a_running_model_loads_them(family, experts, rank, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's worker for CPUs has it
    folder = tmp_path / "model"
    tiny(family).save_pretrained(folder)
    with configured(folder, experts) as config:
        model = get_model_loader(config.load_config).load_model(config, config.model_config)

        def load(weights):
            reloading(
                reload_weights, vllm_config=config, model=model, weights_path=None, weights_iterator=weights,
                is_checkpoint_format=True,
            )  # fmt: skip

        weights = weights_of(folder, config, model)
        found = proven(load, weights, folder, model, nodes(rank))
        assert not isinstance(found, str), found
        with _noted(model) as expected:
            load(weights())
        other, share = with_holes(folder, found, rank)
        assert share < 0.75, f"{share} of {family}"
        with _noted(model) as again:
            load(weights_of(other, config, model)())
        assert again == expected
