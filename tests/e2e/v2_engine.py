"""Runs `WAYS` on an engine on a CPU, and prints what they gave as JSON. Runs as a script.

V2's kernels are Triton's. Ours for CPUs take their place, unless Triton is here: then its interpreter runs them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

if importlib.util.find_spec("triton") is not None:
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(
        driver=SimpleNamespace(is_active=lambda: True)
    )  # before vllm looks for it

from engine_cases import engine_of
from interpreted import take_masks_of_any_type
from ways import BLOCKS, WAYS

from seer.common.config import DraftsConfig
from seer.services.engine.vllm.core import CoreHandle


def with_our_kernels(describe: object) -> object:
    """Return a `CoreHandle.describe` after which rows are sampled by the kernels of GPUs, interpreted."""

    def described(core: object, *arguments: object) -> None:
        from seer.services.engine.vllm import slot_sampler
        from seer.services.engine.vllm.sampling.triton_slots import TritonSlotRows

        slot_sampler.slot_rows = lambda device, history: TritonSlotRows(history)
        describe(core, *arguments)

    return described


def main(model: str, how: str, names: list[str]) -> None:
    drafts = DraftsConfig(max_draft=4, cache=tempfile.mkdtemp()) if how == "drafts" else None
    take_masks_of_any_type()
    if importlib.util.find_spec("triton") is not None:
        CoreHandle.describe = with_our_kernels(CoreHandle.describe)
    with engine_of(Path(model), drafts, kv_blocks=BLOCKS, async_scheduling=how != "now") as backend:
        if drafts is not None:  # any number in any step
            backend._drafting.start_always()
            backend._drafting._length = None
        runner = backend.core.engine_core.model_executor.driver_worker.worker.model_runner
        print("begins", flush=True)
        results = {way.__name__: way(backend) for way in WAYS if way.__name__ in names}
        assert drafts is None or backend.stats().accepted_tokens
        print(json.dumps([type(runner).__module__, backend.versions["scheduling"], results]), flush=True)
        os._exit(0)  # vLLM's threads would be waited for


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
