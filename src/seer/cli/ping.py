"""`python -m seer.cli.ping ENDPOINT`: checks that a service answers a `Hello`.

Health checks that an earlier release deployed run this command; this release's health checks read
`SEER_ALIVE_FILE`.

ENDPOINT is any of `[endpoints]` except `events` and `estimates`, which do not answer, or `http://` with
`pool.metrics` for the KV pool's master.
Exit codes: 0 it answers; 1 it does not.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from seer.common.clock import LoopClock
from seer.common.config import SecurityConfig
from seer.common.errors import SeerError
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.common.net.keys import load_keys, security_of
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.pool_metrics import ask_master
from seer.common.process.log import printable
from seer.common.wire import BufferSnapshotReply, Message, SnapshotAsked, Welcome

ANSWER_SECONDS = 5.0


async def ping(endpoint: str, seconds: float = ANSWER_SECONDS) -> None:
    """Return when the service's event loop answered. Raises `SeerError` without an answer."""
    if endpoint.startswith("http://"):
        await ask_master(endpoint.removeprefix("http://"), "/health", seconds)
        return
    # The same address for all checks of a host, which would be new peers every few seconds otherwise.
    me = Identity(role="ping", name=socket.gethostname(), incarnation=0)
    await greeted(endpoint, me, BufferSnapshotReply, seconds, security_of(os.environ))


async def greeted(
    endpoint: str, me: Identity, union: object, seconds: float, security: SecurityConfig
) -> Welcome:
    """Return a service's answer to a `Hello`. Raises `SeerError` without an answer."""
    transport = ZmqTransport(keys=load_keys(security))
    channel: Channel[SnapshotAsked, Message] = Channel(transport, endpoint, me, union, LoopClock())
    try:
        return await channel.open(seconds)
    finally:
        channel.close()
        await transport.close()


def main(arguments: list[str]) -> int:
    """Ping an endpoint; return the exit code."""
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
