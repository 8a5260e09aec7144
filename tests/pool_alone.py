"""A KV pool for tests that bring their own engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from seer.client.loop_thread import LoopThread
from seer.common.config import PoolConfig, load
from seer.local.system import LocalSystem


@contextlib.contextmanager
def pool_alone(model: Path) -> Iterator[PoolConfig]:
    """Have a pool, as engines of this model are told of it; nothing is too short to be fetched."""
    settings = {
        "shared.model": model, "engine.backend": "replay", "pool.kind": "mooncake", "pool.pull_tokens": 0,
        "pool.dram_gib": 0.25, "pool.lease_seconds": 1,
    }  # fmt: skip
    thread = LoopThread().start()
    system = LocalSystem(load(None, {}, [f"{key}={value}" for key, value in settings.items()]), 1)
    thread.call(system.__aenter__())
    try:
        yield system.config.pool
    finally:
        thread.call(system.__aexit__(None, None, None))
        thread.stop()
