"""What trainer and engines agree on when weights go through Mooncake's transfer engine.

Invariants:
- the transport is the one that was asked for, or an error: left to itself, Mooncake takes RDMA wherever
  it finds a device, and TCP without a word where it finds none;
- mooncake is imported when a transfer engine is opened.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Annotated, Literal, Protocol, cast

import msgspec

from seer.common.errors import InvalidField

SCHEME = "mooncake:"
"""Begins a `source` of weights that is a `RegisteredMemory` as JSON."""

Transport = Literal["tcp", "rdma"]


class RegisteredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer holds a stream of weights; `name` is another one for each update."""

    name: str
    session: str
    """Host and port of the trainer's transfer engine."""
    protocol: Transport
    pointer: Annotated[int, msgspec.Meta(gt=0)]
    size: Annotated[int, msgspec.Meta(gt=0)]


class TransferEngine(Protocol):
    """What is used of `mooncake.engine.TransferEngine`. Returns 0, or the code of a failure."""

    def get_rpc_port(self) -> int:
        """Return the port that others reach this engine at."""
        ...

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """Let others read and write these bytes, and this engine use them for its own transfers."""
        ...

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Take that back."""
        ...

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Copy bytes of a peer's registered memory to registered memory here; frees the GIL."""
        ...


def own_address(peer: str) -> str:
    """Return this machine's address on the way to a peer, `host:port`. Raises `OSError`, `ValueError`."""
    host, _, port = peer.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def open_engine(host: str, protocol: Transport, device: str = "") -> TransferEngine:
    """Return a transfer engine that needs no metadata server.

    `host`: this machine's address; `device`: RDMA devices, comma-separated, all by default.
    Raises `InvalidField` where Mooncake, or the transport, is not there.
    """
    try:
        from mooncake import engine as mooncake
    except ImportError as error:
        fix = (
            f"Mooncake cannot be imported ({error}): install the extra cpu, cuda12 or cuda13, and libibverbs1"
        )
        raise InvalidField("source", "mooncake", fix) from error
    engine = mooncake.TransferEngine()
    before = os.environ.pop("MC_FORCE_TCP", None)
    try:
        if protocol == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, device)
    finally:
        os.environ.pop("MC_FORCE_TCP", None)
        if before is not None:
            os.environ["MC_FORCE_TCP"] = before
    if code:
        raise InvalidField(
            "host", host, f"Mooncake opens no transfer engine there (code {code}): see its log"
        )
    if protocol == "rdma" and not _devices(engine.get_local_topology()):
        raise InvalidField("protocol", "rdma", f"no RDMA device {device or 'at all'} is here: give tcp")
    return cast("TransferEngine", engine)


def _devices(topology: str) -> set[str]:
    """Return the RDMA devices in Mooncake's description: preferred and other ones by place of memory."""
    return {device for places in json.loads(topology).values() for devices in places for device in devices}
