"""Model runner V2 draws what V1 draws, also where it schedules ahead.

`make kernel-test` runs the same with V2's own kernels, in Triton's interpreter, in place of ours for CPUs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)
from ways import BLOCKS, WAYS

from seer.common.config import EngineConfig, SharedConfig
from seer.services.engine.vllm.backend import VllmBackend

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"


@pytest.fixture(scope="module")
def expected() -> dict[str, object]:
    """What each way gives with model runner V1."""
    cores = os.sched_getaffinity(0)
    config = EngineConfig(
        kv_blocks=BLOCKS, max_num_seqs=32, max_model_len=256, cpu_cores=str(min(cores)), model_runner="v1"
    )
    backend = VllmBackend(config, SharedConfig(model=str(MODEL)))
    backend.start()
    results = {way.__name__: way(backend) for way in WAYS}
    backend.close()
    os.sched_setaffinity(0, cores)
    return json.loads(json.dumps(results))


AHEAD = [pytest.param(how, marks=pytest.mark.breadth) for how in ("ahead", "drafts")]


@pytest.mark.parametrize("how", ["now", *AHEAD])
def test_it_draws_what_v1_draws(expected: dict[str, object], how: str) -> None:
    script = Path(__file__).with_name("v2_engine.py")
    paths = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(MODEL), how, *expected],
        capture_output=True, check=False, text=True, timeout=500, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    module, scheduling, results = json.loads(done.stdout.splitlines()[-1])
    assert module == "vllm.v1.worker.cpu.model_runner"  # V2's; V1's is vllm.v1.worker.cpu_model_runner
    assert scheduling == ("synchronous" if how == "now" else "asynchronous")
    assert results == expected
