"""Connects an engine to Mooncake Store, with no memory of its own in the pool."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from seer.common.errors import EngineError
from seer.common.mooncake import without_harmless_lines
from seer.services.engine.vllm.kv_pool.guarded_store import StoreSettings

BUFFER_BYTES = 2**24
"""Mooncake's buffer for copies, which our calls do not use: they pass addresses."""


@cache
def store_class() -> Any:  # noqa: ANN401 - Mooncake has no types
    """Return Mooncake's class. Kept: the name is replaced while vLLM creates a connector (`vllm_patches`)."""
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore


def open_store(settings: StoreSettings) -> Any:  # noqa: ANN401 - Mooncake has no types
    """Return a connected store. Raises `EngineError`; may block for as long as Mooncake likes."""
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(int(settings.call_seconds * 1000)))
    if settings.protocol == "tcp":  # Mooncake would take RDMA wherever it finds a device
        os.environ["MC_FORCE_TCP"] = "1"
    store = store_class()()
    with without_harmless_lines():
        code = store.setup(
            settings.host,
            "P2PHANDSHAKE",
            0,
            BUFFER_BYTES,
            settings.protocol,
            settings.device,
            settings.master,
        )
    if code:
        raise EngineError(
            f"pool.master = {settings.master!r}: no Mooncake master answers there (code {code})"
        )
    return store
