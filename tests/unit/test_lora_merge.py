"""Merged weights are those of PEFT's own `merge_and_unload`."""

import importlib.util

import pytest

if importlib.util.find_spec("peft") is None or importlib.util.find_spec("vllm") is None:
    pytest.skip("needs the engine extra, and PEFT", allow_module_level=True)

import torch
from lora import ATTENTION, MLP, adapt, save_adapter, save_merged
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from seer.services.engine.vllm.merging import Adapter, merge
from seer.services.engine.weights.adapter import Pair, read_adapter
from seer.services.engine.weights.manifest import read_manifest

EVERYTHING = [*ATTENTION, *MLP]
BOTH = [*EVERYTHING, "embed_tokens", "lm_head"]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def base(request, tmp_path_factory):
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=70, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(config).to(request.param).save_pretrained(folder, max_shard_size="40KB")
    return folder


def tensors(folder):
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "r": 16, "lora_alpha": 7},
        {"r": 1, "target_modules": ["q_proj"]},
        {
            "rank_pattern": {"q_proj": 3, r"^model\.layers\.0\.mlp\..*": 5},
            "alpha_pattern": {"layers.1.self_attn.k_proj": 40},
        },
        {"modules_to_save": ["lm_head", "norm"], "layers_to_transform": [1]},
        {"target_modules": BOTH, "r": 4},
        {"target_modules": [*EVERYTHING, "embed_tokens"], "modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "rslora", "rank 1", "patterns", "saved", "embeddings", "embeddings and saved"],
)
def test_weights_are_those_that_peft_merges(tmp_path, base, settings):
    adapted = adapt(base, **settings)
    folder = save_adapter(adapted, tmp_path / "adapter")
    read_adapter(f"lora::{folder}", folder, base, read_manifest(base))
    before = tensors(base)
    merged = dict(Adapter(folder, base).merged(before.items()))
    expected = tensors(save_merged(adapted, base, tmp_path / "merged"))
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, expected[name]), name
    assert not torch.equal(
        merged["model.layers.1.self_attn.q_proj.weight"], before["model.layers.1.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_peft_saves_below_embeddings_stand_for_the_bases(tmp_path, base, trained):
    adapted = adapt(base, target_modules=BOTH, dtype=trained)
    for name, tensor in adapted.named_parameters():
        if name.endswith(("lm_head.base_layer.weight", "embed_tokens.base_layer.weight")):
            tensor.data.add_(0.125)
    folder = save_adapter(adapted, tmp_path / "adapter")
    read_adapter(f"lora::{folder}", folder, base, read_manifest(base))
    merged = dict(Adapter(folder, base).merged(tensors(base).items()))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    expected = tensors(save_merged(loaded, base, tmp_path / "merged"))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(merged[name], expected[name]), name
        assert (merged[name] - tensors(base)[name]).float().mean() > 0.1


def test_the_number_of_threads_does_not_matter():
    torch.manual_seed(0)
    weight, a, b = torch.randn(1024, 768), torch.randn(16, 768), torch.randn(1024, 16)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(merge(weight, a, b, Pair("a", "b", 0.7, embedding=False)))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
