"""The light parts stay light: no torch, no vllm, no transformers in a process that generates nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import seer

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


def test_code_in_a_models_folder_runs_only_if_somebody_asked_for_it():
    folder = Path(seer.__file__).parent
    files = [*(Path(__file__).parents[2] / "src" / "seer").glob("**/*.py"), *folder.glob("**/*.py")]
    assert any(file.parent.name == "slime" for file in files)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert not (isinstance(node.value, ast.Constant) and node.value.value), file
