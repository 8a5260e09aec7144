"""When a trainer's adapter is sent alone: engines then have the bits that merging it would give them."""

import importlib.util
import logging
from types import SimpleNamespace

import pytest

if any(importlib.util.find_spec(each) is None for each in ("peft", "trl", "vllm")):
    pytest.skip("needs the engine extra, TRL and PEFT", allow_module_level=True)

import torch
from lora import adapt
from transformers import Qwen3Config, Qwen3ForCausalLM

from seer.client import LoraAdapter, WeightsLive, WeightsRefused
from seer.common.weights.digest import digest_of_folder
from seer.integrations.trl.session import Session
from seer.services.engine.vllm.merging import Adapter

FLOAT, HALF = torch.float32, torch.bfloat16
LIVE = WeightsLive(version=1, digest="d")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Checkpoints of one model, by type."""
    folders = {}
    config = Qwen3Config(
        vocab_size=70, hidden_size=48, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(config)
    for dtype in (FLOAT, HALF):
        folders[dtype] = tmp_path_factory.mktemp("base")
        model.to(dtype).save_pretrained(folders[dtype])
    return folders


class Client:
    """Takes updates; `refuse` says why it takes no adapter."""

    def __init__(self, refuse=""):
        self.refuse, self.sent = refuse, []

    def update_weights(self, version, source):
        if isinstance(source, dict):
            source = {name: tensor.clone() for name, tensor in source.items()}
        self.sent.append(source)
        if self.refuse and isinstance(source, LoraAdapter):
            raise WeightsRefused(version, {"engine-0": self.refuse})
        return LIVE


def update(session, model):
    accelerator = SimpleNamespace(
        num_processes=1, is_main_process=True, unwrap_model=lambda model, **_: model,
        get_state_dict=lambda model: model.state_dict(),
    )  # fmt: skip
    trainer = SimpleNamespace(accelerator=accelerator, model=model, model_wrapped=model)
    return session._update_adapter(trainer, 1) or session._update_all(trainer, 1)


def written(adapter, folder):
    (folder / "model.safetensors").write_bytes(adapter.stream.read(0, adapter.stream.size).tobytes())
    return folder


@pytest.mark.parametrize("stored", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True, "rank_pattern": {"q_proj": 3}}], ids=str
)  # fmt: skip
def test_engines_get_the_bits_that_merging_gives(bases, tmp_path, stored, settings):
    client = Client()
    session = Session(client, bases[stored], None, None)
    model = adapt(bases[stored], dtype=FLOAT, size=0.1, **settings)
    for _ in range(2):
        update(session, model)
    alone, again = client.sent
    assert isinstance(alone, LoraAdapter)
    assert alone.base_digest() == digest_of_folder(bases[stored])
    assert again.digest() == alone.digest()
    session._merged = "to compare"
    update(session, model)
    whole = client.sent[-1]
    base = {
        name: tensor.to(stored)
        for name, tensor in Qwen3ForCausalLM.from_pretrained(bases[stored], dtype=FLOAT).state_dict().items()
    }
    merged = dict(Adapter(written(alone, tmp_path), bases[stored]).merged(base.items()))
    assert merged.keys() == whole.keys()
    for name, tensor in whole.items():
        assert tensor.dtype == merged[name].dtype == stored
        assert torch.equal(tensor, merged[name]), name


@pytest.mark.parametrize(
    ("stored", "own", "settings", "why"),
    [
        (FLOAT, FLOAT, {"use_dora": True}, "use_dora"),
        (FLOAT, FLOAT, {"bias": "all"}, "bias"),
        (HALF, FLOAT, {"target_modules": ["embed_tokens"]}, "merges into these differently"),
        (FLOAT, HALF, {}, "merges into these differently"),
    ],
)
def test_else_it_is_merged_and_the_log_says_once_why(bases, caplog, stored, own, settings, why):
    client = Client()
    session = Session(client, bases[stored], None, None)
    model = adapt(bases[stored], dtype=own, **settings)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            update(session, model)
    assert [type(source) for source in client.sent] == [dict, dict]
    (line,) = [record.getMessage() for record in caplog.records if "adapter" in record.getMessage()]
    assert line.startswith("the adapter is merged before it is sent: ")
    assert why in line


def test_a_base_that_the_trainer_has_changed_is_merged(bases):
    client = Client()
    session = Session(client, bases[HALF], None, None)
    model = adapt(bases[HALF], dtype=FLOAT)
    model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.data *= 1.0001
    update(session, model)
    assert [type(source) for source in client.sent] == [dict]
    assert "the trainer has it as torch.float32" in session._merged


def test_several_adapters_and_half_ones_are_merged(bases):
    model = adapt(bases[FLOAT])
    model.add_adapter("second", model.peft_config["default"])
    client = Client()
    session = Session(client, bases[FLOAT], None, None)
    update(session, model)
    assert "other adapters" in session._merged
    model = adapt(bases[FLOAT])
    for name, tensor in model.named_parameters():
        if "lora_" in name:
            tensor.data = tensor.data.half()
    session = Session(client, bases[FLOAT], None, None)
    update(session, model)
    assert "torch.float16, not in float32" in session._merged
    assert [type(source) for source in client.sent] == [dict, dict]


def test_an_adapter_that_engines_refuse_at_first_is_merged_and_later_an_error(bases):
    model = adapt(bases[FLOAT])
    client = Client(refuse="for another base")
    session = Session(client, bases[FLOAT], None, None)
    assert update(session, model) == LIVE
    assert [type(source) for source in client.sent] == [LoraAdapter, dict]
    assert "for another base" in session._merged
    client = Client()
    session = Session(client, bases[FLOAT], None, None)
    update(session, model)
    client.refuse = "engines were started anew"
    with pytest.raises(WeightsRefused):
        update(session, model)
