"""Lets vLLM schedule ahead on a CPU, which it does not by itself: for tests of asynchronous scheduling.

The order of calls is that of a GPU: a step is scheduled and begun before the tokens of the last one are known to
the scheduler, and vLLM's own host token ids hold -1 for them. Its streams and events are those that it puts into
torch on CPUs, and have nothing to wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
