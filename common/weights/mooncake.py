"""Weights that engines read from a trainer's memory with Mooncake's transfer engine: what both sides use.

Invariants:
- the transport is the requested one, or there is an error: by default Mooncake uses RDMA wherever it finds a
  device, and silently TCP where it finds none;
- mooncake is imported only when a transfer engine is opened.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Annotated, Literal, Protocol, cast

import msgspec

from seer.common.errors import InvalidField
from seer.common.mooncake import load_cuda_runtime

SCHEME = "mooncake:"
"""Prefix of a `source` of weights that is a `RegisteredMemory` as JSON."""

Transport = Literal["tcp", "rdma"]


class RegisteredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a trainer that holds a stream of weights; `name` is unique for each update."""

    name: str
    session: str
    """Host and port of the trainer's transfer engine."""
    protocol: Transport
    pointer: Annotated[int, msgspec.Meta(gt=0)]
    size: Annotated[int, msgspec.Meta(gt=0)]


class TransferEngine(Protocol):
    """The part of `mooncake.engine.TransferEngine` that is used. Calls return 0, or an error code."""

    def get_rpc_port(self) -> int:
        """Return the port at which other transfer engines reach this one."""

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """Register memory for transfers: of this engine, and for reads and writes by others."""

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Undo `register_memory`."""

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Copy bytes of a peer's registered memory to registered memory here; releases the GIL."""


def own_address(peer: str) -> str:
    """Return the local IP address used to reach a peer (`host:port`). Raises `OSError`, `ValueError`."""
    host, _, port = peer.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def open_engine(host: str, protocol: Transport, device: str = "") -> TransferEngine:
    """Return a transfer engine that needs no metadata server.

    `host`: this machine's address; `device`: RDMA devices, comma-separated, all by default.
    Raises `InvalidField` if Mooncake, or the transport, is not available.
    """
    load_cuda_runtime()
    try:
        from mooncake import engine as mooncake
    except ImportError as error:
        fix = f"Mooncake cannot be imported ({error}): install the extra cpu or cuda13, and libibverbs1"
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
    """Return the RDMA devices in Mooncake's topology: lists of preferred and other devices by location."""
    return {device for places in json.loads(topology).values() for devices in places for device in devices}
