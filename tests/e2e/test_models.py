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

from seer.common.vllm_settings import VllmSettings
from seer.local.pool_plan import import_problem

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).parents[2] / "bench" / "correctness" / "tiny_models.py"


def test_vllm_has_every_setting_that_is_passed_on_or_refused():
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"compilation_config", *VllmSettings.__struct_fields__} - {"cudagraph_mode"} <= names
    assert VllmSettings.REFUSED.keys() <= names


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
