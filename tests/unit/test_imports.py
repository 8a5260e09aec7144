"""The light parts stay light: no torch, no vllm, no transformers in a process that generates nothing."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "transformers", "mooncake", "trl", "accelerate", "verl", "ray")


@pytest.mark.parametrize(
    "module",
    [
        "seer.client",
        "seer.integrations.trl",
        "seer.integrations.verl.config",
        "seer.integrations.verl.sessions",
        "seer.cli.main",
        "seer.gateway.server",
        "seer.local.system",
        "seer.services.buffer.server",
        "seer.services.context.server",
        "seer.services.dgds.server",
        "seer.services.engine.server",
        "seer.services.pool.master",
        "seer.services.pool.owner",
    ],
)
def test_light_modules_import_nothing_heavy(module):
    script = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
