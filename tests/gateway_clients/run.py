"""Unmodified clients from their packages against a real system: `make gateway-test`.

Runs the tests of this folder in this environment (TRL, and the openai that vLLM brings), and in those whose
interpreters are given (other versions, packages that conflict). Tests of what is not installed are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from gateway_clients.scripted import scripted  # noqa: E402
from gateway_system import REPLAY, GatewaySystem  # noqa: E402

ENGINE = ("engine.backend=vllm", "engine.kv_blocks=256", "engine.max_model_len=1024")
EXPERTS = (*REPLAY, "engine.routed_experts=true")
"""The shipped model has none."""


def main() -> int:
    """Return 0 if both environments' tests pass."""
    with GatewaySystem(*ENGINE) as system, GatewaySystem(*EXPERTS) as experts, scripted() as tools:
        for each in (system, experts):
            for name in ("buffer", "context", "dgds", "engine-0"):
                each.start(name)
            each.start_gateways({"gateway": ("gateway.tool_parser=hermes",)})
        told = {f"GATEWAY_{name.upper()}": url for name, url in system.urls["gateway"].items()}
        told["GATEWAY_EXPERTS"] = experts.urls["gateway"]["data"]
        environ = os.environ | told | {"GATEWAY_MODEL": str(system.model), "GATEWAY_TOOLS": tools}
        failed = []
        for python in (sys.executable, *sys.argv[1:]):
            print(f"--- {python}", flush=True)
            command = [
                python,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--confcutdir={HERE}",
                str(HERE),
            ]
            if subprocess.run(command, env=environ, check=False).returncode:
                failed.append(python)
        print(f"counters: {system.counts('gateway')}")
        if failed:
            print(system.log[-5000:])
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
