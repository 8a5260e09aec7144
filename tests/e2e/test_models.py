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

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).parents[2] / "bench" / "correctness" / "tiny_models.py"


def test_vllm_has_every_setting_that_is_passed_on_or_refused():
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"compilation_config", *VllmSettings.__struct_fields__} - {"cudagraph_mode"} <= names
    assert VllmSettings.REFUSED.keys() <= names


@pytest.mark.breadth
@pytest.mark.timeout(900)
def test_a_model_with_experts_keeps_the_promise():
    command = [sys.executable, SCRIPT, "--families", "qwen3-moe", "--matrix", "chunk-16,drafts-random"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=850, check=True)
    (found,) = json.loads(done.stdout)["families"].values()
    assert found["exit"] == 0, done.stderr
    for cell in found["cells"]:
        assert (cell["bug"], cell["unmet"], cell["error"]) == (0, [], "")
        assert cell["tokens"] > 1000
