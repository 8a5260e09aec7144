"""Families of models other than the shipped one, and what vLLM calls the settings that are passed on."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

import torch
from engine_cases import engine_of, one_go
from shared_engines import MODEL
from tiny_families import tiny

from seer.common.errors import EngineError
from seer.common.types import SamplingParams
from seer.common.vllm_settings import VllmSettings
from seer.local.pool_plan import import_problem

pytestmark = pytest.mark.vllm

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
        for folder in (new, old, new):
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


def mixture(matrix: str) -> dict[str, dict]:
    """Return what `seer verify` finds in cells of a tiny Qwen3-MoE, by name, experts compared."""
    command = [sys.executable, SCRIPT, "--families", "qwen3-moe", "--matrix", matrix]
    command += ["--set", "engine.routed_experts=true"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=850, check=True)
    (found,) = json.loads(done.stdout)["families"].values()
    return {cell["name"]: cell for cell in found["cells"]}


@pytest.mark.breadth
@pytest.mark.timeout(900)
def test_a_model_with_experts_keeps_the_promise():
    cells = mixture("chunk-16,preempt,drafts-random" + (",pool-migrate" if not import_problem() else ""))
    for cell in cells.values():
        assert (cell["bug"], cell["unmet"], cell["error"], cell["other_routes"]) == (0, [], "", 0)
        assert cell["routes"] > 2 * cell["tokens"] > 2000


@pytest.mark.breadth
@pytest.mark.timeout(900)
def test_experts_that_a_chunk_got_from_the_token_before_are_called_a_bug(tmp_path, monkeypatch):
    (tmp_path / "fault").write_text("routes-shifted")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "planted"))
    monkeypatch.setenv("SEER_PLANTED", str(tmp_path / "fault"))
    monkeypatch.setenv("SEER_PLANTED_IN", "engines")
    cell = mixture("chunk-16")["chunk-16"]
    assert cell["bug"] > 10
    assert cell["other_routes"] > 500
