"""The process that holds the pool's memory and disk: the only one of the pool's that imports Mooncake.

Invariants:
- it says one line, `ready NAME` or why it cannot hold what it was told to, and then nothing more;
- it serves until it is killed: there is nothing to save, and Mooncake takes seconds to say goodbye.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec

READY = "ready "

_TRANSFER_BYTES = 2**24
"""Mooncake's buffer for what this process reads of others, which is nothing."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What to hold, for which master. `host` is this machine as the pool's members reach it."""

    host: str
    master: str
    protocol: str
    device: str
    dram_bytes: int
    ssd_path: str = ""


def hold(holding: Holding) -> str:
    """Hold it for as long as this process lives; return the line to say."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        return (
            f"Mooncake cannot be imported ({error}): install the extra cpu, cuda12 or cuda13, and libibverbs1"
        )
    global _store
    _store = MooncakeDistributedStore()
    code = _store.setup(
        holding.host,
        "P2PHANDSHAKE",
        holding.dram_bytes,
        _TRANSFER_BYTES,
        holding.protocol,
        holding.device,
        holding.master,
        enable_ssd_offload=bool(holding.ssd_path),
        ssd_offload_path=holding.ssd_path,
    )
    if code:
        return f"Mooncake cannot hold {holding.dram_bytes} bytes at {holding.host} (code {code}): see its log"
    return READY + str(_store.get_hostname())


_store: Any = None
"""What holds: for as long as it is referenced."""


def main() -> None:
    """Hold what the command line says, a `Holding` as JSON."""
    line = hold(msgspec.json.decode(sys.argv[1], type=Holding))
    os.write(1, line.encode() + b"\n")
    while line.startswith(READY):
        signal.pause()
    os._exit(1)  # taking Mooncake down takes seconds


if __name__ == "__main__":
    main()
