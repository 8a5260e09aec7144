"""Lets vLLM schedule ahead on a CPU, which it does not by itself: for tests of asynchronous scheduling.

The order of calls is that of a GPU: a step is scheduled and begun before the tokens of the last one are known to
the scheduler, and vLLM's own host token ids hold -1 for them. Its streams and events are those that it puts into
torch on CPUs, and have nothing to wait for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def scheduling_ahead() -> Iterator[None]:
    """Engines that are started meanwhile with `async_scheduling=True` do it."""
    from seer.services.engine.vllm import loading

    load = loading.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", lambda *arguments: _load_without_check(load, *arguments))
        yield


def _load_without_check(load: object, config: object, *rest: object) -> object:
    from vllm.platforms.cpu import CpuPlatform  # after `env.prepare`, which has to run before

    check = CpuPlatform.check_and_update_config.__func__

    def check_all_but_one(cls: type, vllm_config: object) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_all_but_one))
        return load(config, *rest)


def check_on_two_ranks(folder: Path, script: str, *arguments: object) -> None:
    """Run a script, which has engines of two ranks and prints "the same" at its end."""
    file = folder / "two_ranks.py"  # workers are spawned and import it again
    file.write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, file, *map(str, arguments)], env=environment, text=True, timeout=800, check=False,
        capture_output=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["the same"], done.stderr[-3000:]
