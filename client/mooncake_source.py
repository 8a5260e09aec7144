"""Weights that engines read from the trainer's memory themselves, with Mooncake's transfer engine.

Invariants:
- engines read a copy of the tensors, laid out as a stream: training may go on once the update is over;
- the copy's memory is registered once, and again only if tensors need more;
- the copy is complete before an engine is told of it, and stays until the next update or `close`;
- an engine that reads it later, or while it changes, finds a wrong digest and reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import numpy as np

from seer.client.tensor_stream import TensorStream
from seer.common.errors import InvalidField
from seer.common.weights.digest import BLAKE3
from seer.common.weights.mooncake import SCHEME, RegisteredMemory, TransferEngine, Transport, open_engine
from seer.common.wire import Bytes

_COPY_BYTES = 2**25


class MooncakeSource:
    """A source for `update_weights`: `tensors` (numpy or torch) by name, copied at each update.

    Use one object for all updates. `host` is this machine's address for the engines; `device` names RDMA
    devices, default all. Needs memory for one copy of the tensors. Mooncake opens ports on all interfaces,
    and whoever reaches them can read and write that copy: keep them inside the cluster's own network.
    Raises `InvalidField`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        host: str = "127.0.0.1",
        protocol: Transport = "tcp",
        device: str = "",
    ) -> None:
        if protocol not in get_args(Transport):
            raise InvalidField("protocol", protocol, "choose tcp or rdma")
        self.tensors = tensors
        self._host, self._protocol, self._device = host, protocol, device
        self._engine: TransferEngine | None = None
        self._room: Bytes = np.empty(0, dtype=np.uint8)

    def offer(self, name: str, tag: str = BLAKE3) -> tuple[str, str]:
        """Copy the tensors; return the source that engines read from, and the digest. Blocks."""
        stream = TensorStream(self.tensors)
        engine = self._engine = self._engine or open_engine(self._host, self._protocol, self._device)
        if stream.size > len(self._room):
            self._register(engine, stream.size)
        for offset in range(0, stream.size, _COPY_BYTES):
            data = stream.read(offset, _COPY_BYTES)
            self._room[offset : offset + len(data)] = data
        memory = RegisteredMemory(
            name=name,
            session=f"{self._host}:{engine.get_rpc_port()}",
            protocol=self._protocol,
            pointer=self._room.ctypes.data,
            size=stream.size,
        )
        return SCHEME + msgspec.json.encode(memory).decode(), stream.digest(tag)

    def close(self) -> None:
        """Free the copy's memory: no engine can read it any more."""
        if self._engine is not None and len(self._room):
            self._engine.unregister_memory(self._room.ctypes.data)
            self._room = self._room[:0].copy()

    def _register(self, engine: TransferEngine, size: int) -> None:
        self.close()
        room = np.empty(size, dtype=np.uint8)
        if code := engine.register_memory(room.ctypes.data, size):
            fix = (
                f"Mooncake cannot register this many bytes (code {code}): see its log, and ulimit -l for RDMA"
            )
            raise InvalidField("source", size, fix)
        self._room = room
