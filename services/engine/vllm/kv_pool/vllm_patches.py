"""What vLLM's Mooncake connector must be told, in vLLM 0.32, to work on CPUs and over our store.

Everything here replaces a name inside vLLM for this process. `env.prepare` refuses other series of vLLM;
a name that moved within this one is an error, not a silent default.
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

HASH_SEED = "0"


class _NoEvent:
    """For `torch.cuda.Event`, a fence before saves: a CPU has computed when the step returns."""

    def record(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


def prepare() -> None:
    """Set what is read before the connector exists; idempotent."""
    # Block hashes are keys in the pool: the chain begins alike in every engine.
    os.environ["PYTHONHASHSEED"] = HASH_SEED
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read as Mooncake is imported


@contextmanager
def replaced(make_store: Callable[[], Any], lookup_path: str) -> Iterator[None]:
    """Have a connector that is made meanwhile use our store, and look-ups go through `lookup_path`."""
    import mooncake.store

    if not torch.cuda.is_available():
        torch.cuda.Event = _NoEvent
    # Read only to call `setup`, which our store answers by its own settings.
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
