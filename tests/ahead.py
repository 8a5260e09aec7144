"""Lets vLLM schedule ahead on a CPU, which it does not by itself: for tests of asynchronous scheduling.

The order of calls is that of a GPU: a step is scheduled and begun before the tokens of the last one are known to
the scheduler, and vLLM's own host token ids hold -1 for them. Its streams and events have nothing to wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


class _Nothing:
    """Stands for `torch.cuda.Event` and `torch.cuda.Stream`."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass


@contextlib.contextmanager
def scheduling_ahead() -> Iterator[None]:
    """Engines that are started meanwhile with `async_scheduling=True` do it; they need this until they close."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for name in ("Event", "Stream"):
            patch.setattr(torch.cuda, name, _Nothing)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", _Nothing)
        # After `env.prepare`, which has to run before vllm is imported.
        from seer.services.engine.vllm import loading

        load = loading.load
        patch.setattr(loading, "load", lambda *arguments: _load_without_check(patch, load, *arguments))
        yield


def _load_without_check(patch: pytest.MonkeyPatch, load: object, config: object, *rest: object) -> object:
    from vllm.platforms.cpu import CpuPlatform

    from seer.services.engine.vllm.kv_pool import vllm_patches

    patch.setattr(vllm_patches, "_NoEvent", _Nothing)
    check = CpuPlatform.check_and_update_config.__func__

    def check_all_but_one(cls: type, vllm_config: object) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(CpuPlatform, "check_and_update_config", classmethod(check_all_but_one))
        return load(config, *rest)
