"""What vLLM raises while it loads, and the fix that Seer names: texts that engines on CPUs and GPUs met."""

import re
import subprocess

import pytest

from seer.common.config import EngineConfig, SharedConfig
from seer.services.engine.vllm.loading import explain

SHRANK = (
    "Error in memory profiling. Initial free memory 70.1 GiB, current free memory 72.0 GiB. This happens when "
    "other processes sharing the same container release GPU memory while vLLM is profiling"
)
SHORT = (
    "Free memory on device cuda:0 (40.83/79.18 GiB) on startup is less than desired GPU memory utilization"
)


@pytest.mark.parametrize(("error", "fix"), [
    (ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer"), "cuda13 .*: flashinfer is missing"),
    (AssertionError(SHRANK), "start the engine again: another process freed memory"),
    (RuntimeError("backend='inductor' raised: CalledProcessError: Command '['gcc', ...]'"), "C compiler works"),
    (subprocess.CalledProcessError(1, ["gcc"]), "Triton is installed with its headers"),
    (ValueError(SHORT), r"lower .*engine\.gpu_memory_utilization \(now 0\.97\): there is not enough memory"),
    (ValueError("No available memory for the cache blocks"), r"raise engine\.kv_blocks"),
    (RuntimeError("something else"), r"give a model folder that vLLM can load, and an engine\.dtype"),
])  # fmt: skip
def test_each_error_names_its_own_fix(error, fix):
    config = EngineConfig(gpu_memory_utilization=0.97)
    text = explain(error, config, SharedConfig(model="m"))
    assert text.startswith("shared.model = 'm' cannot be loaded: ")
    named, _, said = text.partition(". vLLM says: ")
    assert re.search(fix, named)
    assert said
    assert "\n" not in text
