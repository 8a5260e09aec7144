"""Weights in FP8: what an engine quantizes by itself, and what comes with scales. docs/models.md says what ran."""

import shutil
from pathlib import Path

import pytest
import torch
from engine_cases import engine_of, one_go
from fp8_models import quantize, stand_ins
from safetensors.torch import load_file, save_file
from shared_engines import MODEL, ONE_CORE, texts
from tiny_families import tiny

from seer.client import RolloutClient, SharedTensors, WeightsRefused
from seer.common.config import load
from seer.common.errors import EngineError
from seer.common.types import SamplingParams
from seer.common.vllm_settings import VllmSettings
from seer.common.weights.safetensors import stored
from seer.local.system import LocalSystem
from seer.services.engine.vllm import cpu_fp8
from seer.services.engine.weights.manifest import differences, read_manifest

SAMPLING, PROMPT = SamplingParams(max_tokens=24, ignore_eos=True), list(range(1, 30))
EXACT = 1e-5


def written(folder: Path, scale: float = 1.0) -> Path:
    """Write a tiny Llama in bfloat16, its weights times `scale`, whose layers have blocks of 128 and parts."""
    model = tiny("llama-wide")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(scale)
    model.bfloat16().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, folder)
    return folder


def check_updates(old: Path, new: Path, **settings: object) -> None:
    """An engine that loads new, old, new weights is as one that began with these; both differ."""
    settings = {"kv_blocks": 40} | settings
    with engine_of(new, **settings) as started:
        expected = one_go(started, SAMPLING, prompt=PROMPT)
    with engine_of(old, **settings) as backend:
        before = one_go(backend, SAMPLING, prompt=PROMPT)
        for folder, wanted in ((new, expected), (old, before), (new, expected)):
            backend.load_weights(folder, f"digest of {folder.name}")
            after = one_go(backend, SAMPLING, prompt=PROMPT)
            assert after.tokens == wanted.tokens
            assert after.logprobs == pytest.approx(wanted.logprobs, abs=EXACT)
    assert before.logprobs != pytest.approx(expected.logprobs, abs=1e-3)


@pytest.fixture
def any_fp8(monkeypatch):
    """Have the engine compute what vLLM does not on CPUs."""
    stand_ins(monkeypatch)
    monkeypatch.setattr(cpu_fp8, "problem", lambda *_, **__: "")


@pytest.mark.parametrize("kind", ["channel", "tensor", "block"])
def test_an_engine_quantizes_each_update(kind: str, tmp_path: Path, any_fp8: None) -> None:
    """A trainer that sends bfloat16 needs to know nothing of it."""
    settings = VllmSettings(quantization=f"fp8_per_{kind}")
    check_updates(written(tmp_path / "old"), written(tmp_path / "new", 1.1), vllm=settings)


@pytest.mark.parametrize("kind", ["channel", "tensor", "block"])
def test_updates_bring_their_scales(kind: str, tmp_path: Path, any_fp8: None) -> None:
    """The weights in FP8 are almost the same ones here, whatever `scale`: the scales make the difference."""
    old = quantize(written(tmp_path / "old"), kind)
    new = quantize(written(tmp_path / "new", 1.1), kind)
    check_updates(old, new)


@pytest.mark.parametrize("kind", ["channel", "tensor", "block"])
@pytest.mark.parametrize("quantizes", [False, True])
def test_what_such_a_load_reads_is_proved(kind: str, quantizes: bool, tmp_path: Path, any_fp8: None) -> None:
    """By loads that are equal, bit for bit: nodes copy no more of a stream then."""
    model = written(tmp_path / "model")
    folder = model if quantizes else quantize(model, kind)
    settings = {"vllm": VllmSettings(quantization=f"fp8_per_{kind}")} if quantizes else {}
    with engine_of(folder, kv_blocks=40, **settings) as backend:
        worker = backend.core.engine_core.model_executor.driver_worker.worker
        found = worker.seer_prove_reads([str(folder)])
    assert not isinstance(found, str), found
    assert found.slices == {each.name: [(0, each.size, 0, 1)] for each in stored(folder)}


def test_scales_of_another_float_type_are_taken(tmp_path: Path, any_fp8: None) -> None:
    """As slime sends float32 to engines that began with a checkpoint of Qwen's, which has bfloat16."""
    old = quantize(written(tmp_path / "old"), "block", torch.bfloat16)
    new = quantize(written(tmp_path / "new", 1.1), "block")
    assert differences(read_manifest(old), read_manifest(new)) == ""
    with engine_of(new, kv_blocks=40) as started, engine_of(old, kv_blocks=40) as backend:
        backend.load_weights(new, "digest")
        expected, after = (one_go(each, SAMPLING, prompt=PROMPT) for each in (started, backend))
        assert after.logprobs == pytest.approx(expected.logprobs, abs=EXACT)


def test_a_scale_that_is_missing_ends_the_load_and_the_next_one_mends_it(tmp_path: Path) -> None:
    """vLLM would compute with whatever lay in the memory. (Checks before a load refuse such a folder.)"""
    whole = quantize(written(tmp_path / "whole"), "channel")
    broken = shutil.copytree(whole, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight_scale"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with engine_of(whole, kv_blocks=40) as backend:
        before = one_go(backend, SAMPLING, prompt=PROMPT)
        with pytest.raises(EngineError, match=r"no new weights \(RowParallelLinear\.weight_scale\)"):
            backend.load_weights(broken, "digest of broken")
        backend.load_weights(whole, "digest of whole")
        after = one_go(backend, SAMPLING, prompt=PROMPT)
    assert after.logprobs == pytest.approx(before.logprobs, abs=EXACT)


def test_what_this_cpu_does_not_compute_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model = quantize(written(tmp_path / "model"), "tensor")
    with pytest.raises(EngineError, match=r"quantization_config: .*one scale a tensor"), engine_of(model):
        pass


@pytest.mark.timeout(300)
async def test_a_trainer_streams_scales_or_hands_them_over_in_place(tmp_path: Path) -> None:
    """As a folder has them; what is quantized in another way is refused by name, and nothing has changed."""
    plain, old = written(tmp_path / "plain"), quantize(written(tmp_path / "old"), "channel")
    new = quantize(written(tmp_path / "new", 1.1), "channel")
    sizes = ("engine.max_model_len=256", "engine.kv_blocks=40", "engine.in_place_updates=true")
    config = load(None, {}, [*ONE_CORE, f"shared.model={old}", *sizes, "pool.kind=none"])
    async with LocalSystem(config, 1) as started, RolloutClient(started.endpoint, tokenizer=MODEL) as client:

        async def tokens() -> list[list[int]]:
            sampling = SamplingParams(max_tokens=24, ignore_eos=True)
            rollout = await client.submit(texts(2), n=2, sampling=sampling, rollout_number=0, repeat=True)
            return [each.token_ids.tolist() for group in await rollout.result() for each in group.responses]

        before = await tokens()
        by_folder = await client.update_weights(1, new)
        after = await tokens()
        assert after != before
        name = "model.layers.0.mlp.down_proj.weight"  # the first one
        stored, tensors = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
        other = {key: each.half() if key == f"{name}_scale" else each for key, each in tensors.items()}
        for source, why in (
            (plain, f"tensor {name} has type BF16, the model's has F8_E4M3: send what shared.model holds"),
            (load_file(plain / "model.safetensors"), f"tensor {name} has type BF16"),
            ({key: each for key, each in tensors.items() if key != f"{name}_scale"}, f"lacks .*{name}_scale"),
            (tensors | {name: tensors[name].to(torch.float8_e5m2)}, f"{name} has type F8_E5M2"),
        ):
            with pytest.raises(WeightsRefused, match=why):
                await client.update_weights(2, source)
        assert await tokens() == after
        await client.update_weights(2, stored)
        assert await tokens() == before
        by_stream = await client.update_weights(3, tensors)
        assert by_stream.digest == by_folder.digest
        assert await tokens() == after
        await client.update_weights(4, SharedTensors(stored))
        assert await tokens() == before
        in_float16 = await client.update_weights(5, other)
        assert not in_float16.quarantined


def test_an_engine_that_quantizes_leaves_routers_out() -> None:
    """A router's rounding would send tokens to other experts than the trainer's."""
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    found = VllmSettings(quantization="fp8_per_block").arguments()
    given = resolve_quantization_config(found["quantization"], found["quantization_config"])
    assert given is not None
    config = OnlineQuantizationConfig(given)
    names = (
        "mlp.gate",
        "mlp.router",
        "mlp.gate_up_proj",
        "self_attn.qkv_proj",
        "mlp.shared_expert.gate_proj",
    )
    methods = [
        config.resolve_quant_method_cls(ColumnParallelLinear, f"model.layers.0.{each}") for each in names
    ]
    assert [method is not None for method in methods] == [False, False, True, True, True]
