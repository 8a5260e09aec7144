"""Families of models other than the shipped one, and what vLLM calls the settings that are passed on."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import ways
from engine_cases import engine_of, one_go
from heads import with_prediction
from shared_engines import MODEL
from tiny_families import tiny

from seer.common.config import DraftsConfig
from seer.common.errors import EngineError
from seer.common.types import SamplingParams
from seer.common.vllm_settings import VllmSettings
from seer.local.pool_plan import import_problem

CELLS = "chunk-16,preempt,drafts-random" + ("" if import_problem() else ",pool-migrate")
SCRIPT = Path(__file__).parents[2] / "bench" / "correctness" / "tiny_models.py"


def test_vllm_has_every_setting_that_is_passed_on_or_refused():
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"compilation_config", *VllmSettings.__struct_fields__} - {"cudagraph_mode"} <= names
    assert VllmSettings.REFUSED.keys() <= names


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "qwen3-moe", "gemma3"])
def test_new_weights_of_a_family_are_as_those_of_a_start(family: str, tmp_path: Path) -> None:
    """vLLM packs some weights at a load. An engine that has loaded twice is as one that began with these."""
    old, new = scaled(family, 1.0, tmp_path / "old"), scaled(family, 1.1, tmp_path / "new")
    sampling, prompt = SamplingParams(max_tokens=24, ignore_eos=True), list(range(1, 30))
    with engine_of(new, kv_blocks=40) as started:
        expected = one_go(started, sampling, prompt=prompt)
    with engine_of(old, kv_blocks=40) as backend:
        before = one_go(backend, sampling, prompt=prompt)
        for folder, laid_out in ((new, False), (old, False), (new, True), (old, True), (new, False)):
            if laid_out:  # mixtures are not: their kernels' state is that of the live ones
                backend.lay_out_weights(folder, f"digest of {folder.name}")
                while backend.lays_out():
                    time.sleep(0.01)
                assert bool(backend.core._laid_out) is (family != "qwen3-moe")
            backend.load_weights(folder, f"digest of {folder.name}")
            after = one_go(backend, sampling, prompt=prompt)
            assert after.tokens == (expected if folder == new else before).tokens
        assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert before.logprobs != pytest.approx(expected.logprobs, abs=1e-3)


def test_weights_that_vllm_would_leave_out_are_refused(tmp_path: Path) -> None:
    """Its loader of gpt-oss copies experts and sinks into parameters that it puts back afterwards."""
    folder = scaled("gpt-oss", 1.0, tmp_path / "model")
    with engine_of(folder, kv_blocks=40) as backend, pytest.raises(EngineError, match="RoutedExperts"):
        backend.load_weights(folder, "digest")


def scaled(family: str, scale: float, folder: Path) -> Path:
    """Write a tiny model of a family, its weights times `scale`."""
    model = tiny(family)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(scale)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((MODEL / file).read_bytes())
    return folder


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_ranks_that_divide_experts_have_the_tokens_and_the_updates_of_one(tmp_path: Path) -> None:
    """vLLM's kernel for CPUs would take another rank's experts for its own (`cpu_experts`)."""
    old, new = scaled("qwen3-moe", 1.0, tmp_path / "old"), scaled("qwen3-moe", 1.1, tmp_path / "new")
    sampling, prompt = SamplingParams(max_tokens=24, ignore_eos=True), list(range(1, 30))
    with engine_of(old, kv_blocks=40) as whole:
        before = one_go(whole, sampling, prompt=prompt)
        whole.load_weights(new, "digest of new")
        after = one_go(whole, sampling, prompt=prompt)
    assert before.logprobs != pytest.approx(after.logprobs, abs=1e-3)
    divided = {"vllm": VllmSettings(enable_expert_parallel=True), "tensor_parallel": 2, "cpu_cores": None}
    with engine_of(old, kv_blocks=40, **divided) as ranks:
        for folder, expected in ((old, before), (new, after), (old, before)):
            ranks.load_weights(folder, f"digest of {folder.name}")
            found = one_go(ranks, sampling, prompt=prompt)
            assert found.tokens == expected.tokens
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("weighs_input", [False, True])
def test_what_ranks_experts_add_is_what_all_experts_give(weighs_input: bool) -> None:
    """`weighs_input`: a token has one expert, and its input has the expert's weight already."""
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    from seer.services.engine.vllm.cpu_experts import divide_experts

    divide_experts()
    experts, each, tokens, hidden = 6, 1 if weighs_input else 3, 9, 32
    made = torch.Generator().manual_seed(3)
    w13, w2 = (torch.randn(experts, *shape, generator=made) for shape in ((64, hidden), (hidden, 32)))
    x = torch.randn(tokens, hidden, generator=made)
    weights, ids = torch.rand(tokens, experts, generator=made).topk(each)

    def given(first: int, end: int, places: torch.Tensor | None) -> torch.Tensor:
        kernel = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
        kernel._use_zentorch, kernel.quant_config = False, SimpleNamespace(w1_bias=None, w2_bias=None)
        packed = [cpu_prepack_moe_weight(each[first:end].contiguous(), kernel.isa) for each in (w13, w2)]
        out = torch.empty(tokens, hidden)
        kernel.apply(
            output=out, hidden_states=x, w1=packed[0], w2=packed[1], topk_weights=weights,
            topk_ids=ids.int(), activation=MoEActivation.SILU, global_num_experts=experts, expert_map=places,
            a1q_scale=None, a2_scale=None, workspace13=None, workspace2=None, expert_tokens_meta=None,
            apply_router_weight_on_input=weighs_input,
        )  # fmt: skip
        return out

    own = torch.tensor([0, 1, 2, 3, -1, -1]), torch.tensor([-1, -1, -1, -1, 0, 1])
    added = given(0, 4, own[0].int()) + given(4, 6, own[1].int())
    assert torch.allclose(added, given(0, experts, None), rtol=1e-5, atol=1e-4)


def verified(family: str, matrix: str, *settings: str) -> dict[str, dict]:
    """Return what `seer verify` finds in cells of a tiny model, by name."""
    command = [sys.executable, SCRIPT, "--families", family, "--matrix", matrix]
    command += [part for each in settings for part in ("--set", each)]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=850, check=True)
    (found,) = json.loads(done.stdout)["families"].values()
    return {cell["name"]: cell for cell in found["cells"]}


@pytest.mark.breadth
@pytest.mark.timeout(900)
def test_a_model_with_experts_keeps_the_promise():
    for cell in verified("qwen3-moe", CELLS, "engine.routed_experts=true").values():
        assert (cell["bug"], cell["unmet"], cell["error"], cell["other_routes"]) == (0, [], "", 0)
        assert cell["routes"] > 2 * cell["tokens"] > 2000


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_ranks_that_divide_experts_keep_the_promise():
    """The reference has one rank, and so all experts in it."""
    sets = ("engine.routed_experts=true", "engine.vllm.enable_expert_parallel=true")
    for cell in verified("qwen3-moe", "tp-2,drafts-tp-2", *sets).values():
        assert (cell["bug"], cell["unmet"], cell["error"], cell["other_routes"]) == (0, [], "", 0)
        assert cell["routes"] > 2 * cell["tokens"] > 2000


@pytest.mark.breadth
@pytest.mark.timeout(900)
def test_weights_in_fp8_keep_the_promise():
    fp8 = ("engine.dtype=bfloat16", "engine.vllm.quantization=fp8_per_channel")
    for cell in verified("llama", CELLS, *fp8).values():
        assert (cell["bug"], cell["unmet"], cell["error"]) == (0, [], "")
        assert cell["tokens"] > 1000


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_data_parallel_ranks_keep_the_promise():
    for cell in verified("qwen3-moe", "dp-2,pool-dp-2", "engine.routed_experts=true").values():
        assert (cell["bug"], cell["unmet"], cell["error"], cell["other_routes"]) == (0, [], "", 0)
        assert cell["routes"] > 2 * cell["tokens"] > 2000


@pytest.mark.breadth
@pytest.mark.timeout(900)
def test_experts_that_a_chunk_got_from_the_token_before_are_called_a_bug(tmp_path, monkeypatch):
    (tmp_path / "fault").write_text("routes-shifted")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "planted"))
    monkeypatch.setenv("SEER_PLANTED", str(tmp_path / "fault"))
    monkeypatch.setenv("SEER_PLANTED_IN", "engines")
    cell = verified("qwen3-moe", "chunk-16", "engine.routed_experts=true")["chunk-16"]
    assert cell["bug"] > 10
    assert cell["other_routes"] > 500


def test_a_models_own_layers_draft(tmp_path: Path) -> None:
    """The layers are random: nothing is said about their drafts, but that no token changes."""
    old = with_prediction(
        tmp_path / "old", 3
    )  # vLLM has the layer share the model's embeddings, as they are equal
    updates = [
        with_prediction(tmp_path / "new", 4, of_its_own=0.3),
        with_prediction(tmp_path / "without", 5, layer=False),
    ]
    found = []
    for drafts in (None, DraftsConfig(max_draft=4, head="mtp", source="own", cache=str(tmp_path))):
        with engine_of(old, drafts, kv_blocks=ways.BLOCKS) as backend:
            if drafts is not None:
                backend._drafting.start_always()
                backend._drafting.begin = lambda _: ""  # no chunk has a tree
            found.append([ways.in_one_go(backend)])
            for folder in updates:
                backend.load_weights(folder, folder.name)
                found[-1].append(ways.in_one_go(backend))
            assert drafts is None or backend.stats().drafted_tokens
    assert found[0] == found[1]
    assert found[0][0] != found[0][1] != found[0][2]
