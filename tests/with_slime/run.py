"""slime's own data source, samples, filters and rewards with Seer, on CPUs: `make slime-test SLIME=path/to/slime`.

slime is not on PyPI: the folder is a checkout of it. Nothing of it is installed, and no GPU is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from gateway_system import MODEL, REPLAY  # noqa: E402
from up import Up  # noqa: E402


def main() -> int:
    """Return pytest's exit status."""
    up = Up(MODEL, 1, "engine.max_model_len=200", "engine.kv_blocks=400")
    experts = Up(MODEL, 1, *REPLAY, "engine.routed_experts=true")  # the shipped model has none
    try:
        up.wait()
        experts.wait()
        told = {
            "SEER_ENDPOINT": up.endpoint,
            "SEER_EXPERTS_ENDPOINT": experts.endpoint,
            "SEER_MODEL": str(MODEL),
            "PYTHONPATH": sys.argv[1],
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={HERE}"]
        return subprocess.run(
            [*command, str(HERE), *sys.argv[2:]], env=os.environ | told, check=False
        ).returncode
    finally:
        up.stop()
        experts.stop()


if __name__ == "__main__":
    sys.exit(main())
