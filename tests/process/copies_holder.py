"""An engine's server of copies with a stream that is half there; writes the rest when told to on stdin.

python copies_holder.py: prints its endpoint, then "whole" once all parts are there.
"""

import asyncio
import random
import sys

import numpy as np

from seer.common import wire
from seer.common.blobs import checksum
from seer.common.clock import LoopClock
from seer.common.net.identity import Identity
from seer.common.net.transport.zmq import ZmqTransport
from seer.services.engine.weights.holders import Copy, Peers

NAME = "v1"
PARTS = 8


def part(number: int) -> wire.SpoolData:
    """Return the stream's part `number`, of 2 MiB."""
    data = np.frombuffer(random.Random(number).randbytes(wire.SHORT_SPOOL_BYTES), np.uint8)
    return wire.SpoolData(
        name=NAME, offset=number * wire.SHORT_SPOOL_BYTES, checksum=checksum(data), data=data
    )


async def serve() -> None:
    me = Identity(role="engine", name="holder", incarnation=1, config_hash="same")
    server = Peers(ZmqTransport(), me, LoopClock())
    endpoint = await server.start("tcp://127.0.0.1:0", "")
    copy = Copy(NAME, PARTS * wire.SHORT_SPOOL_BYTES)
    copy.begin("")
    for number in range(PARTS // 2):
        assert await copy.write(part(number))
    server.offer(copy)
    serving = asyncio.create_task(server.run())
    print(endpoint, flush=True)
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    await asyncio.wait([serving, told], return_when=asyncio.FIRST_COMPLETED)
    for number in range(PARTS // 2, PARTS):
        assert await copy.write(part(number))
    print("whole", flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(serve())
