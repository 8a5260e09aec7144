"""Runs `WAYS` on an engine with model runner V2, on a CPU, and prints what they gave as JSON. Runs as a script.

V2's kernels are Triton's, which vLLM wants to compile for a CPU. Triton's interpreter runs them as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from types import SimpleNamespace

from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # before vllm looks for it

from ahead import scheduling_ahead  # noqa: E402 - after that
from ways import BLOCKS, WAYS  # noqa: E402

from seer.common.config import EngineConfig, SharedConfig  # noqa: E402
from seer.services.engine.vllm import env  # noqa: E402
from seer.services.engine.vllm.backend import VllmBackend  # noqa: E402


def main(model: str, ahead: bool, names: list[str]) -> None:
    env._FORCED["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    core = str(min(os.sched_getaffinity(0)))
    config = EngineConfig(
        kv_blocks=BLOCKS, max_num_seqs=32, max_model_len=256, cpu_cores=core, async_scheduling=ahead
    )
    with scheduling_ahead() if ahead else contextlib.nullcontext():
        backend = VllmBackend(config, SharedConfig(model=model))
        backend.start()
        runner = backend.core.engine_core.model_executor.driver_worker.worker.model_runner
        results = {way.__name__: way(backend) for way in WAYS if way.__name__ in names}
    print(json.dumps([type(runner).__module__, backend.versions["scheduling"], results]), flush=True)
    os._exit(0)  # vLLM's threads would be waited for


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "ahead", sys.argv[3:])
