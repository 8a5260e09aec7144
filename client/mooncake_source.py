"""Weights that engines read from the trainer's memory themselves, with Mooncake's transfer engine.

Invariants:
- engines read a copy of the tensors that is laid out as a stream: training goes on once an update is over;
- its memory is registered once, and again only for tensors that need more;
- an update's copy is whole before an engine hears of it, and is there until the next one or `close`;
- who reads it later, or while it changes, sees another digest and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import numpy as np

from seer.client.tensor_stream import TensorStream
from seer.common.errors import InvalidField
from seer.common.weights.mooncake import SCHEME, RegisteredMemory, TransferEngine, Transport, open_engine
from seer.common.wire import Bytes

_COPY_BYTES = 2**25


class MooncakeSource:
    """A source for `update_weights`: `tensors` (numpy or torch) by name, read anew at each update.

    Keep one for all updates. `host` is this machine's address as engines reach it; `device` names
    RDMA devices, all by default. Takes memory for one copy of the tensors. Anybody who reaches the
    ports that Mooncake opens, on all interfaces, can read that copy, and write it: keep them inside
    the cluster's own network. Raises `InvalidField`.
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

    def offer(self, name: str) -> tuple[str, str]:
        """Lay out what the tensors hold now; return where engines find it, and its digest. Blocks."""
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
        return SCHEME + msgspec.json.encode(memory).decode(), stream.digest()

    def close(self) -> None:
        """Give the copy's memory back: no engine can load it any more."""
        if self._engine is not None and len(self._room):
            self._engine.unregister_memory(self._room.ctypes.data)
            self._room = self._room[:0].copy()

    def _register(self, engine: TransferEngine, size: int) -> None:
        self.close()
        room = np.empty(size, dtype=np.uint8)
        if code := engine.register_memory(room.ctypes.data, size):
            fix = f"Mooncake cannot register so many bytes (code {code}): see its log, and ulimit -l for RDMA"
            raise InvalidField("source", size, fix)
        self._room = room
