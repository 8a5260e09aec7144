"""What of a LoRA adapter is refused, by name, before anything changes; and what its digest depends on."""

import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from seer.client import InvalidField, LoraAdapter
from seer.client.tensor_stream import TensorStream
from seer.common.weights.digest import digest_of_folder
from seer.common.weights.lora import (
    METADATA,
    LoraConfig,
    base_of,
    digest_of_adapter,
    inner_source,
    is_adapter,
    parse_config,
    read_config,
    source_of,
)
from seer.services.engine.weights.adapter import Pair, plan_merge, read_adapter
from seer.services.engine.weights.manifest import read_manifest, resolve_beneath

CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 6,
    "bias": "none",
    "target_modules": ["q"],
    "use_dora": False,
}
Q = "base_model.model.q"


def array(*shape, fill=1.0, dtype="float32"):
    return np.full(shape, fill, dtype)


def write(folder, tensors, config=None, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    stream = TensorStream(tensors)
    (folder / name).write_bytes(stream.read(0, stream.size).tobytes())
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


BASE = {
    "q.weight": array(4, 3),
    "embed.weight": array(5, 4),
    "lm_head.weight": array(5, 4),
    "n.bias": array(4),
    "n.weight": array(4),
}
GOOD = {f"{Q}.lora_A.weight": array(2, 3), f"{Q}.lora_B.weight": array(4, 2)}


def read(tmp_path, tensors=GOOD, config=CONFIG, base=BASE, source=None):
    model = write(tmp_path / "base", base)
    folder = write(tmp_path / "adapter", tensors, config, "adapter_model.safetensors")
    return read_adapter(source or f"lora::{folder}", folder, model, read_manifest(model))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("bias", "all"),
        ("use_dora", True),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("target_parameters", ["experts.w"]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("a_setting_of_a_later_release", 1),
    ],
)
def test_settings_that_are_not_merged_exactly_are_refused_by_name(tmp_path, name, value):
    with pytest.raises(InvalidField, match=rf"{name} = .* is not supported: send merged weights"):
        read(tmp_path, config=CONFIG | {name: value})
    with pytest.raises(InvalidField, match=f"{name} = "):
        LoraAdapter(GOOD, CONFIG | {name: value}, base="0" * 32)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"r": 0}, "r"),
        ({"r": "two"}, "r"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"(q+)+": 2}}, r"the pattern '\(q\+\)\+' cannot be used"),
        ({"alpha_pattern": {".*.*.*q": 2}}, "cannot be used"),
        ({"alpha_pattern": {"[": 2}}, "cannot be used"),
        (
            {"alpha_pattern": {"[[a]": 2}},
            r"alpha_pattern: the pattern '\[\[a\]' cannot be used: .*none in others",
        ),
        ({"rank_pattern": {"q[]a--b]": 2}}, r"rank_pattern: the pattern .* cannot be used"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(change, why):
    with pytest.raises(ValueError, match=why):
        parse_config(json.dumps(CONFIG | change).encode())
    for text in (b"", b"[]", b"[" * 100_000, b"{" + b" " * 2**20, b'{"peft_type": "LORA", "r": 2}'):
        with pytest.raises(ValueError, match="adapter_config"):
            parse_config(text)
    with pytest.raises(ValueError, match="out of range"):
        parse_config(json.dumps(CONFIG | {"lora_alpha": 1e999}).encode().replace(b"Infinity", b"1e999"))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({f"{Q}.lora_A.weight": array(2, 3)}, r"has .*lora_A\.weight, and lacks .*lora_B\.weight"),
        ({"base_model.model.k.lora_A.weight": array(2, 3), "base_model.model.k.lora_B.weight": array(4, 2)}, r"k\.weight, which the base lacks"),
        (GOOD | {"base_model.model.q.lora_magnitude_vector": array(4)}, "which the base lacks"),
        (GOOD | {f"{Q}.lora_A.default.weight": array(2, 3)}, "which the base lacks"),
        (GOOD | {f"{Q}.lora_A.weight": array(3, 3), f"{Q}.lora_B.weight": array(4, 3)}, r"for rank 2 and q\.weight of shape \[4, 3\] it must have \[2, 3\]"),
        (GOOD | {f"{Q}.lora_A.weight": array(2, 4)}, r"has shape \[2, 4\]"),
        (GOOD | {f"{Q}.lora_B.weight": array(3, 2)}, r"has shape \[3, 2\]"),
        (GOOD | {f"{Q}.lora_A.weight": array(2, 3, dtype="float64")}, "has type F64"),
        (GOOD | {f"{Q}.weight": array(4, 3)}, r"two changes of q\.weight"),
        (GOOD | {f"{Q}.base_layer.weight": array(3, 4)}, r"q\.base_layer\.weight has shape \[3, 4\], the base's has \[4, 3\]"),
        (GOOD | {f"{Q}.base_layer.weight": array(4, 3), f"{Q}.weight": array(4, 3)}, r"two changes of q\.weight"),
        (GOOD | {f"{Q}.base_layer.weight": array(4, 3, fill=np.nan)}, "not finite"),
        (GOOD | {f"{Q}.base_layer.weight": array(4, 3, fill=3e38)}, r"may make values of q\.weight larger than F32"),
        ({f"{Q}.lora_A.weight": array(2, 3), f"{Q}.base_layer.weight": array(4, 3)}, r"lacks .*lora_B\.weight"),
        ({"base_model.model.k.base_layer.weight": array(4, 3)}, r"is for k\.weight, which the base lacks"),
        (GOOD | {f"{Q}.lora_embedding_A": array(2, 4), f"{Q}.lora_embedding_B": array(3, 2), f"{Q}.base_layer.weight": array(4, 3)}, r"two changes of q\.weight"),
        ({"base_model.model.n.lora_A.weight": array(2, 3), "base_model.model.n.lora_B.weight": array(4, 2)}, r"n\.lora_A\.weight is for n\.weight, which is no matrix: \[4\]"),
        (GOOD | {"base_model.model.n.bias": array(5)}, r"shape \[5\], the base's has \[4\]"),
        (GOOD | {f"{Q}.lora_B.weight": array(4, 2, fill=np.inf)}, r"lora_B\.weight has values that are not finite"),
        (GOOD | {f"{Q}.lora_A.weight": array(2, 3, fill=np.nan, dtype="float16")}, "not finite"),
        (GOOD | {f"{Q}.lora_A.weight": array(2, 3, fill=1e38)}, r"may make values of q\.weight larger than F32"),
        (GOOD | {"base_model.model.n.bias": array(4, fill=3e38)}, r"may make values of n\.bias larger than F32"),
    ],
)  # fmt: skip
def test_tensors_without_their_place_in_the_base_are_refused_by_name(tmp_path, tensors, why):
    with pytest.raises(InvalidField, match=why):
        read(tmp_path, tensors)


def test_a_base_that_an_adapter_does_not_fit_is_refused_by_name(tmp_path):
    digest = digest_of_folder(write(tmp_path / "base", BASE))
    read(tmp_path, source=f"lora:{digest}:/x")
    with pytest.raises(InvalidField, match=f"for a base with digest {'1' * 32}, the engine's has {digest}"):
        read(tmp_path, source=f"lora:{'1' * 32}:/x")
    with pytest.raises(InvalidField, match="a model that is not quantized"):
        read(tmp_path, base=BASE | {"q.weight": array(4, 3, dtype="int8")})
    embedding = {"embed.lora_embedding_A": array(2, 5), "embed.lora_embedding_B": array(4, 2)}
    read(tmp_path, embedding)
    tied = {name: tensor for name, tensor in BASE.items() if name != "lm_head.weight"}
    output = {"lm_head.lora_A.weight": array(2, 4), "lm_head.lora_B.weight": array(5, 2)}
    for each in (embedding, {"embed.weight": array(5, 4)}, output, {"lm_head.weight": array(5, 4)}):
        with pytest.raises(InvalidField, match=r"uses embeddings as lm_head\.weight, too: leave both out of"):
            read(tmp_path, each, base=tied)


def test_a_base_whose_files_changed_is_refused(tmp_path):
    model = write(tmp_path / "base", BASE)
    known = read_manifest(model)
    folder = write(tmp_path / "adapter", GOOD, CONFIG)
    (model / "model.safetensors").touch()
    assert read_adapter("lora::x", folder, model, known).digest
    write(model, BASE | {"q.weight": array(4, 3, fill=2.0)})
    with pytest.raises(InvalidField, match="its files have changed since this engine was started"):
        read_adapter("lora::x", folder, model, known)


def test_what_becomes_of_each_tensor(tmp_path):
    config = parse_config(json.dumps(CONFIG).encode())
    tensors = GOOD | {"base_model.model.n.bias": array(4)}
    folder = write(tmp_path / "adapter", tensors)
    plan = plan_merge(
        config, read_manifest(folder).tensors, read_manifest(write(tmp_path / "b", BASE)).tensors
    )
    assert plan == {
        "q.weight": Pair(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", 3.0, embedding=False),
        "n.bias": "base_model.model.n.bias",
    }


def test_what_becomes_of_the_layer_below_an_adapter(tmp_path):
    config = parse_config(json.dumps(CONFIG).encode())
    below = {"embed.base_layer.weight": array(5, 4), "n.base_layer.bias": array(4)}
    pair = {"embed.lora_embedding_A": array(2, 5), "embed.lora_embedding_B": array(4, 2)}
    base = read_manifest(write(tmp_path / "b", BASE)).tensors
    found = read_manifest(write(tmp_path / "pair", below | pair)).tensors
    assert plan_merge(config, found, base) == {
        "embed.weight": Pair(*pair, 3.0, embedding=True, onto="embed.base_layer.weight"),
        "n.bias": "n.base_layer.bias",
    }
    alone = read_manifest(write(tmp_path / "alone", below)).tensors  # another adapter's embeddings
    assert plan_merge(config, alone, base)["embed.weight"] == "embed.base_layer.weight"


def test_scales_are_those_of_the_first_pattern_that_matches():
    config = LoraConfig(
        r=4, lora_alpha=8, rank_pattern={"q": 2, "a.k": 16}, alpha_pattern={r"\d+.q": 1, "q": 3}
    )
    scales = {name: config.scale(name) for name in ("v", "b.q", "b.1.q", "a.k", "b.a.k", "ba.k", "qq")}
    assert scales == {"v": 2, "b.q": 1.5, "b.1.q": 0.5, "a.k": 0.5, "b.a.k": 0.5, "ba.k": 2, "qq": 2}
    assert LoraConfig(r=4, lora_alpha=8, use_rslora=True).scale("q") == 4


def test_the_digest_is_of_base_tensors_and_what_says_how_they_are_merged(tmp_path):
    base = digest_of_folder(write(tmp_path / "base", BASE))
    one = LoraAdapter(GOOD, CONFIG, base=base)
    assert one.digest() == read(tmp_path, source=f"lora:{base}:/x").digest
    same = {"target_modules": ["k", "q"], "lora_dropout": 0.1, "rank_pattern": {}, "alpha_pattern": None}
    assert (
        LoraAdapter(GOOD, SimpleNamespace(to_dict=lambda: CONFIG | same), base=tmp_path / "base").digest()
        == one.digest()
    )
    others = [
        LoraAdapter(GOOD, CONFIG, base="2" * 32),
        LoraAdapter(GOOD, CONFIG | {"lora_alpha": 7}, base=base),
        LoraAdapter(GOOD, CONFIG | {"use_rslora": True}, base=base),
        LoraAdapter(GOOD, CONFIG | {"rank_pattern": {"k": 2}}, base=base),
        LoraAdapter(GOOD, CONFIG | {"alpha_pattern": {"q": 7, "k": 8}}, base=base),
        LoraAdapter(GOOD, CONFIG | {"alpha_pattern": {"k": 8, "q": 7}}, base=base),
        LoraAdapter(GOOD | {f"{Q}.lora_A.weight": array(2, 3, fill=2.0)}, CONFIG, base=base),
    ]
    assert len({each.digest() for each in (one, *others)}) == len(others) + 1
    assert digest_of_adapter(base, "t", LoraConfig(r=1, lora_alpha=1)) != base


def test_a_stream_has_its_settings_in_its_header(tmp_path):
    adapter = LoraAdapter(GOOD, CONFIG, base="0" * 32)
    stream = adapter.stream
    assert (adapter.folder, stream.digest()) == ("", TensorStream(GOOD).digest())
    (tmp_path / "model.safetensors").write_bytes(stream.read(0, stream.size).tobytes())
    assert read_config(tmp_path) == parse_config(json.dumps(CONFIG).encode())
    write(tmp_path, GOOD)
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        read_config(tmp_path)
    text = json.dumps({"__metadata__": {METADATA: 7}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        read_config(tmp_path)


def test_settings_lie_in_the_weights_root_as_well(tmp_path):
    folder = write(tmp_path / "root", GOOD)
    (tmp_path / "elsewhere.json").write_text(json.dumps(CONFIG))
    (folder / "adapter_config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(InvalidField, match=r"adapter_config\.json is not in engine\.weights_root"):
        resolve_beneath(folder, folder)


def test_sources():
    for inner in ("/a:b/c", "spool:v1-2", ""):
        for base in ("", "0" * 32):
            source = source_of(inner, base)
            assert (is_adapter(source), base_of(source), inner_source(source)) == (True, base, inner)
    assert (is_adapter("/lora:"), inner_source("/lora::x")) == (False, "/lora::x")


def test_what_is_missing_is_asked_for_by_name(tmp_path):
    with pytest.raises(InvalidField, match="config"):
        LoraAdapter(GOOD, base="0" * 32)
    with pytest.raises(InvalidField, match="base"):
        LoraAdapter(GOOD, CONFIG)
    with pytest.raises(InvalidField, match="config"):
        LoraAdapter(tmp_path, CONFIG)
    with pytest.raises(InvalidField, match="give a model folder, or a digest"):
        LoraAdapter(tmp_path, base=tmp_path / "nowhere").base_digest()
    folder = LoraAdapter(tmp_path)
    assert (folder.folder, folder.base_digest(), folder.digest(), folder.stream) == (
        str(tmp_path),
        "",
        "",
        None,
    )
