"""`python -m seer.cli.ping ENDPOINT`: whether the service behind a socket answers a Hello; for health checks.

Any `tcp://` endpoint of `[endpoints]` that a service answers on will do, so not `events` and `estimates`;
and `http://` with `pool.metrics` for the KV pool's master.
Exit codes: 0 it answers; 1 it does not.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from seer.common.clock import LoopClock
from seer.common.errors import SeerError
from seer.common.net.channel import Channel
from seer.common.net.handshake import Identity
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.pool import ask_master
from seer.common.process.log import printable
from seer.common.wire import BufferSnapshotReply, SnapshotAsked

ANSWER_SECONDS = 5.0


async def ping(endpoint: str, seconds: float = ANSWER_SECONDS) -> None:
    """Return when the service's event loop answered. Raises `SeerError` when it does not."""
    if endpoint.startswith("http://"):
        await ask_master(endpoint.removeprefix("http://"), "/health", seconds)
        return
    transport = ZmqTransport()
    # One address per host: a check every few seconds must not look like ever new peers.
    me = Identity(role="ping", name=socket.gethostname(), incarnation=0)
    channel: Channel[SnapshotAsked, BufferSnapshotReply] = Channel(
        transport, endpoint, me, BufferSnapshotReply, LoopClock()
    )
    try:
        await channel.open(seconds)
    finally:
        channel.close()
        await transport.close()


def main(arguments: list[str]) -> int:
    """Ping the one endpoint named; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m seer.cli.ping ENDPOINT", file=sys.stderr)
        return 1
    try:
        asyncio.run(ping(arguments[0]))
    except SeerError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
