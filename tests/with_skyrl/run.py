"""SkyRL's own generator, environments and worker with Seer, on CPUs: `make skyrl-test`.

Starts a system with a real engine here, and runs `test_adapter.py` with the interpreter that is given.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from gateway_system import MODEL, REPLAY, TEMPLATE  # noqa: E402
from up import Up  # noqa: E402


def main() -> int:
    """Return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(MODEL, model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        up = Up(model, 1, "engine.max_model_len=200", "engine.kv_blocks=400")
        experts = Up(model, 1, *REPLAY, "engine.routed_experts=true")  # the shipped model has none
        try:
            up.wait()
            experts.wait()
            told = {
                "SEER_ENDPOINT": up.endpoint,
                "SEER_EXPERTS_ENDPOINT": experts.endpoint,
                "SEER_MODEL": str(model),
                "PYTHONPATH": str(HERE.parents[1] / "src"),
            }
            command = [sys.argv[1], "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={HERE}"]
            return subprocess.run(
                [*command, str(HERE), *sys.argv[2:]], env=os.environ | told, check=False
            ).returncode
        finally:
            up.stop()
            experts.stop()


if __name__ == "__main__":
    sys.exit(main())
