"""The process that holds the pool's memory and disk: the only process of the pool that imports Mooncake.

Invariants:
- it prints one line, `ready NAME` or why it cannot mount its segment, and then nothing more;
- it serves until it is killed: there is nothing to save, and a clean shutdown of Mooncake takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec

from seer.common.mooncake import load_cuda_runtime, without_harmless_lines

READY = "ready "

_TRANSFER_BYTES = 2**24
"""Mooncake's buffer for reads from other processes; this one makes none."""


class SegmentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A Mooncake segment to mount, and its master. `host` is this machine as the pool's members reach it."""

    host: str
    master: str
    protocol: str
    device: str
    dram_bytes: int
    ssd_path: str = ""


def mount(segment: SegmentConfig) -> str:
    """Mount it for as long as this process lives; return the line to print."""
    load_cuda_runtime()
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        return f"Mooncake cannot be imported ({error}): install the extra cpu or cuda13, and libibverbs1"
    global _store
    _store = MooncakeDistributedStore()
    with without_harmless_lines():
        code = _store.setup(
            segment.host,
            "P2PHANDSHAKE",
            segment.dram_bytes,
            _TRANSFER_BYTES,
            segment.protocol,
            segment.device,
            segment.master,
            enable_ssd_offload=bool(segment.ssd_path),
            ssd_offload_path=segment.ssd_path,
        )
    if code:
        return f"Mooncake cannot hold {segment.dram_bytes} bytes at {segment.host} (code {code}): see its log"
    return READY + str(_store.get_hostname())


_store: Any = None
"""The segment is mounted for as long as this is referenced."""


def main() -> None:
    """Mount the segment that the command line describes, a `SegmentConfig` as JSON."""
    line = mount(msgspec.json.decode(sys.argv[1], type=SegmentConfig))
    os.write(1, line.encode() + b"\n")
    while line.startswith(READY):
        signal.pause()
    os._exit(1)  # a clean shutdown of Mooncake takes seconds


if __name__ == "__main__":
    main()
