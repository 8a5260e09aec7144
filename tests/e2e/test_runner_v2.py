"""The kernels of GPUs, in Triton's interpreter, draw what ours for CPUs draw, also where steps are scheduled ahead.

Without Triton (`make kernel-test` has it) ours run in both: then a fresh process and the schedule are compared.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)
from ways import BLOCKS, WAYS

from seer.common.config import EngineConfig, SharedConfig
from seer.services.engine.vllm.backend import VllmBackend

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"


@pytest.fixture(scope="module")
def expected() -> dict[str, object]:
    """What each way gives in this process, one step at a time, with our kernels for CPUs."""
    cores = os.sched_getaffinity(0)
    config = EngineConfig(kv_blocks=BLOCKS, max_num_seqs=32, max_model_len=256, cpu_cores=str(min(cores)))
    backend = VllmBackend(config, SharedConfig(model=str(MODEL)))
    backend.start()
    results = {way.__name__: way(backend) for way in WAYS}
    backend.close()
    os.sched_setaffinity(0, cores)
    return json.loads(json.dumps(results))


AHEAD = [pytest.param(how, marks=pytest.mark.breadth) for how in ("ahead", "drafts")]


@pytest.mark.parametrize("how", ["now", *AHEAD])
def test_it_draws_what_kernels_for_cpus_draw(expected: dict[str, object], how: str) -> None:
    script = Path(__file__).with_name("v2_engine.py")
    paths = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, str(script), str(MODEL), how, *expected], stdout=subprocess.PIPE,
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
    assert results == expected
