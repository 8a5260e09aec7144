"""Sends the copy that this engine has, or makes, of a stream of weights to other engines.

Invariants (tests/unit/test_stream_copies.py, tests/cluster/test_fan_out.py):
- a part is sent once its checksum was right here, also while the copy still grows;
- an engine that has not begun a copy says so; one that has deleted it says that, at once, to all who wait;
- at most `MAX_READS` questions wait, and an engine that does not read delays no other.
"""

from __future__ import annotations

import asyncio

from seer.common import wire
from seer.common.errors import ConfigError
from seer.common.net.handshake import Identity
from seer.common.net.hub import Hub
from seer.common.net.keys import with_key
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.common.weights.mooncake import own_address
from seer.services.engine.weights.copies import GONE, StreamCopy

MAX_READS = 512
"""Bound on questions that wait for their parts; those beyond it are asked again."""

OFF = "off"


class CopyServer:
    """Call `start` before all else. `copy`: what is sent; None: nothing."""

    def __init__(self, me: Identity) -> None:
        self._me = me
        self._copy: StreamCopy | None = None
        self._gone = ""
        self._hub: Hub[wire.HolderToEngine, wire.EngineToHolder] | None = None
        self._reads: set[tuple[bytes, int]] = set()

    async def start(self, transport: Transport, configured: str, buffer: str, key: str = "") -> str:
        """Listen at the `configured` endpoint; return where, or nothing if there is no need.

        `key` is the public one that answers there. Default: the address by which this machine reaches the
        `buffer`. Raises `ConfigError`.
        """
        endpoint = configured or await asyncio.to_thread(_default_endpoint, buffer)
        if endpoint in ("", OFF):
            return ""
        try:
            router = await transport.router(endpoint)
        except ConfigError as error:
            raise ConfigError(f"engine.weights_endpoint = {configured!r}: {error}") from error
        self._hub = Hub(
            router, self._me, wire.EngineToHolder, require_config_hash=True, roles=frozenset({"engine"})
        )
        return with_key(router.endpoint, key)

    def offer(self, copy: StreamCopy) -> None:
        """Send this copy from now on."""
        self._copy = copy

    def withdraw(self, copy: StreamCopy) -> None:
        """Send it no more."""
        if self._copy is copy:
            self._copy, self._gone = None, copy.name

    async def run(self) -> None:
        """Answer questions until cancelled."""
        hub = self._hub
        if hub is None:
            return
        async with asyncio.TaskGroup() as tasks:
            while True:
                address, message = await hub.recv()
                match message:
                    case wire.OpenSpool():
                        await hub.reply(address, self._state(message.name))
                    case wire.ReadSpool(name=name, offset=offset):
                        key = address, offset
                        if self._copy is None or self._copy.name != name:
                            await hub.reply(address, self._state(name))
                        elif key not in self._reads and len(self._reads) < MAX_READS:
                            self._reads.add(key)
                            tasks.create_task(self._read(hub, self._copy, key))

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._hub is not None:
            self._hub.close()

    def _state(self, name: str) -> wire.SpoolState:
        if self._copy is not None and self._copy.name == name:
            return self._copy.state
        return wire.SpoolState(name=name, size=0, have=0, problem=GONE if name == self._gone else "")

    async def _read(
        self,
        hub: Hub[wire.HolderToEngine, wire.EngineToHolder],
        copy: StreamCopy,
        key: tuple[bytes, int],
    ) -> None:
        address, offset = key
        answer: wire.SpoolState | wire.SpoolData
        try:
            answer = await copy.part(offset)
        except (OSError, ValueError) as error:
            answer = wire.SpoolState(name=copy.name, size=copy.size, have=copy.have, problem=str(error))
        finally:
            self._reads.discard(key)
        await hub.reply(address, answer)


def _default_endpoint(buffer: str) -> str:
    """Return a free port of the address that reaches the buffer; empty if the buffer is on this machine."""
    scheme, _, address = buffer.partition("://")
    if scheme != "tcp":
        return ""
    try:
        own = own_address(address)
    except (OSError, ValueError) as error:
        get_logger().warning("weights are not sent on to other engines", buffer=buffer, why=str(error))
        return ""
    return "" if own.startswith("127.") else f"tcp://{own}:0"
