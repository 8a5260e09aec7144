"""The kernels of GPUs, in Triton's interpreter, draw what ours for CPUs draw, also where steps are scheduled ahead.

Without Triton (`make kernel-test` has it) ours run in both: then a fresh process and the schedule are compared.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared_engines import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


AHEAD = [pytest.param(how, marks=pytest.mark.breadth) for how in ("ahead", "drafts")]


@pytest.mark.parametrize("how", ["now", *AHEAD])
def test_it_draws_what_kernels_for_cpus_draw(expected_ways: dict[str, object], how: str) -> None:
    script = Path(__file__).with_name("v2_engine.py")
    paths = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, str(script), str(MODEL), how, *expected_ways], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
    ) as process:  # fmt: skip
        if how == "drafts" and "begins" in process.stdout.readline():  # in the midst of a step, or near it
            time.sleep(0.3)
            process.send_signal(signal.SIGSTOP)
            time.sleep(5)
            process.send_signal(signal.SIGCONT)
        told, problems = process.communicate(timeout=1100)
    assert process.returncode == 0, problems[-3000:]
    module, scheduling, results = json.loads(told.splitlines()[-1])
    assert module == "vllm.v1.worker.cpu.model_runner"  # V2's
    assert scheduling == ("synchronous" if how == "now" else "asynchronous")
    assert results == json.loads(json.dumps(expected_ways))
