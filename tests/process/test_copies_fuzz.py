"""Hostile peers at the socket from which engines copy weights: an honest engine gets all parts, memory is bounded."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from living import resident
from process.copies_holder import NAME, PARTS, part
from process.fuzz_messages import Maker

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.common.net.transport.zmq import QUEUE_BYTES, ZmqTransport

KINDS = ("random", "hostile", "truncated", "flipped", "wrong union", "replayed", "bad hello")
PEERS, MUTE, MESSAGES = 12, 3, 1_000
GROWTH = MUTE * QUEUE_BYTES + 128 * 2**20
"""What may wait for peers that do not read, and what reading parts takes."""


def identity(name: str, number: int = 1) -> Identity:
    return Identity(role="engine", name=name, incarnation=number, config_hash="same")


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).parent / "copies_holder.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(holder: subprocess.Popen[str]) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline().strip()


class Hostile:
    """Peers that shake hands or do not, and send what no honest engine sends; the first ones never read."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.maker = Maker(random.Random(0), [NAME, "v2"])
        self.maker.members["copies"] = [wire.Hello, wire.OpenSpool, wire.ReadSpool]
        self.sockets = []
        for number in range(PEERS):
            who = identity(f"h{number}", number)
            socket = self.context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IDENTITY, who.address())
            socket.setsockopt(zmq.RCVHWM, 1 if number < MUTE else 1000)
            socket.connect(endpoint)
            if number < MUTE or number % 3:
                socket.send_multipart(self.maker.hello(who))
            self.sockets.append((who, socket))

    def attack(self) -> None:
        """Ask for every part many times, in and beyond the stream, and send nonsense."""
        rng = self.maker.rng
        for turn in range(MESSAGES):
            for number, (who, socket) in enumerate(self.sockets):
                frames = self.maker.made(rng.choice(KINDS), "copies", who)
                if number < MUTE or rng.random() < 0.3:
                    offset = rng.choice((turn % (2 * PARTS) * wire.SHORT_SPOOL_BYTES, turn, 2**62, 2**63 - 1))
                    asked = {"type": "ReadSpool", "name": NAME, "offset": offset}
                    if rng.random() < 0.5:
                        asked["length"] = rng.choice((1, wire.SPOOL_BYTES, 2**62))
                    frames = [msgspec.msgpack.encode(asked)]
                if socket.poll(0, zmq.POLLOUT):
                    socket.send_multipart(frames)
                while number >= MUTE and socket.poll(0, zmq.POLLIN):
                    socket.recv_multipart()

    def close(self) -> None:
        self.context.destroy(linger=0)


async def copied(reader: Channel[wire.EngineToHolder, wire.HolderToEngine], first: int, last: int) -> None:
    """Copy some parts, as an engine does: what is not answered is asked for again."""
    missing = {number * wire.SHORT_SPOOL_BYTES for number in range(first, last)}
    while missing:
        for offset in missing:
            await reader.send(wire.ReadSpool(name=NAME, offset=offset))
        try:
            async with asyncio.timeout(1):
                while missing:
                    message = await reader.recv()
                    if isinstance(message, wire.SpoolData) and message.offset in missing:
                        expected = part(message.offset // wire.SHORT_SPOOL_BYTES)
                        assert message.checksum == expected.checksum
                        assert np.array_equal(message.data, expected.data)
                        missing.discard(message.offset)
        except TimeoutError:
            continue


async def test_hostile_peers_keep_no_engine_from_its_copy(holder: subprocess.Popen[str]) -> None:
    endpoint = said(holder)
    transport = ZmqTransport()
    reader: Channel[wire.EngineToHolder, wire.HolderToEngine] = Channel(
        transport, endpoint, identity("honest"), wire.HolderToEngine, LoopClock()
    )
    hostile = Hostile(endpoint)
    try:
        async with asyncio.timeout(120):
            await reader.open(10)
            await copied(reader, 0, 1)
            before = resident(holder.pid)
            attack = asyncio.create_task(asyncio.to_thread(hostile.attack))
            await copied(reader, 0, PARTS // 2)
            await attack
            assert holder.stdin is not None
            holder.stdin.write("\n")
            holder.stdin.flush()
            assert await asyncio.to_thread(said, holder) == "whole"
            attack = asyncio.create_task(asyncio.to_thread(hostile.attack))
            await copied(reader, 0, PARTS)
            await attack
            await copied(reader, 0, PARTS)
        assert holder.poll() is None
        assert resident(holder.pid) - before < GROWTH
    finally:
        reader.close()
        hostile.close()
        await transport.close()
