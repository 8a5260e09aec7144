"""Patches for vLLM 0.32, so that its Mooncake connector works on CPUs and uses our store.

Each replaces a name inside vLLM in this process. `env.prepare` refuses other series of vLLM; a name that is
missing is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker
from vllm.distributed.mooncake_store import MooncakeStoreConfig

from seer.common.errors import EngineError
from seer.services.engine.vllm.kv_pool.connect import store_class

HASH_SEED = "0"


class _NoEvent:
    """Stands for `torch.cuda.Event`, which vLLM waits for before saves: on a CPU, KV is ready by then."""

    def __init__(self, **_: object) -> None:
        """Take what model runner V2 asks of its own."""

    def record(self, *_: object) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


def prepare() -> None:
    """Set the environment that is read before the connector exists; idempotent."""
    # Block hashes are keys in the pool: they must be the same in every engine.
    os.environ["PYTHONHASHSEED"] = HASH_SEED
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read as Mooncake is imported


@contextmanager
def patched(make_store: Callable[[], Any], lookup_path: str) -> Iterator[None]:
    """Have a connector that is created meanwhile use our store, and `lookup_path` for look-ups."""
    import mooncake.store

    store_class()  # another connector's store may connect meanwhile
    if not torch.cuda.is_available():
        torch.cuda.Event = _NoEvent
    # vLLM only passes it to `setup`, which our store ignores.
    unused = MooncakeStoreConfig("", "", "", "", mode="standalone-store", global_segment_size=0)
    changes = [
        (mooncake.store, "MooncakeDistributedStore", make_store),
        (worker.MooncakeStoreConfig, "load_from_config", staticmethod(lambda: unused)),
        (worker, "get_zmq_rpc_path_lookup", lambda config: lookup_path),
    ]
    before = [(where, name, _existing(where, name)) for where, name, _ in changes]
    try:
        for where, name, value in changes:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)


def _existing(where: Any, name: str) -> Any:  # noqa: ANN401 - names of vLLM
    try:
        return vars(where)[name]
    except KeyError:
        raise EngineError(f"pool.kind = 'mooncake': this vLLM has no {where.__name__}.{name}") from None
