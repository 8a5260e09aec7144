"""Strangers in numbers at a service with keys: handshakes that break, stand still, or come again."""

import asyncio
import contextlib
import itertools
import os
import resource
import socket
import time

import zmq
from keyed_system import System

from seer.client import SamplingParams
from seer.common.errors import Unauthorized, Unreachable

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
CURVE = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
NULL = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
HELLO = CURVE + b"\x04\xc8\x05HELLO" + bytes(194)
TALKS = (b"", b"GET / HTTP/1.1\r\n\r\n", GREETING[:5], NULL, CURVE, HELLO)
BROKEN = 10_000
OPEN_AT_ONCE = 500
DEADLINE = 60


class Buffer(System):
    """A buffer with keys, alone; a replay engine on demand."""

    async def __aenter__(self):
        await self.start("buffer", "buffer", "server")
        self.port = int(self.config.endpoints.trainers.rpartition(":")[2])
        return self

    async def __aexit__(self, *_):
        for child in self.children.values():
            child.kill_group()
            await child.gone(10)

    def log(self):
        text = next(self.folder.glob("buffer*.log")).read_text()
        return [line for line in text.splitlines() if "peers were not let in" in line]

    def talk(self, said):
        """Open a connection and say something, without waiting."""
        made = socket.socket()
        made.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            made.connect(("127.0.0.1", self.port))
        with contextlib.suppress(OSError):  # not yet connected: it stays silent
            made.send(said)
        return made


class Honest:
    """Asks for the status twenty times a second; `slowest` in seconds."""

    def __init__(self, client):
        self.client, self.asked, self.slowest = client, 0, 0.0
        self.task = asyncio.create_task(self._ask())

    async def _ask(self):
        while True:
            started = time.monotonic()
            await self.client.status(DEADLINE)
            self.slowest = max(self.slowest, time.monotonic() - started)
            self.asked += 1
            await asyncio.sleep(0.05)


async def test_an_honest_peer_works_beside_10_000_broken_handshakes(tmp_path):
    context = zmq.Context()
    async with Buffer(tmp_path) as buffer, buffer.client("observer-top") as client:
        honest, opened = Honest(client), []
        for number, said in zip(range(BROKEN), itertools.cycle(TALKS), strict=False):
            opened.append(buffer.talk(said))
            if number % 50 == 0:  # a process with a key that nobody admitted, or that of another cluster
                public, secret = zmq.curve_keypair()
                dealer = context.socket(zmq.DEALER)
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
                dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
                server = (buffer.keys / "public" / "server.pub").read_bytes().strip()
                dealer.setsockopt(zmq.CURVE_SERVERKEY, public if number % 100 else server)
                dealer.connect(buffer.config.endpoints.trainers)
                opened.append(dealer)
                await asyncio.sleep(0)
            while len(opened) > OPEN_AT_ONCE:
                opened.pop(0).close()
        async with buffer.client("trainer-run") as newcomer:
            await newcomer.status(DEADLINE)
        await asyncio.sleep(2)  # the count is logged once a second at most, and once a minute after that
        assert not honest.task.done(), honest.task.exception()
        honest.task.cancel()
        (line,) = buffer.log()
        assert "without_key=" in line
        for each in opened:
            each.close()
    context.destroy(linger=0)
    assert honest.asked > 10


async def test_connections_that_stand_still_are_closed_and_keep_out_nobody_for_long(tmp_path):
    async with Buffer(tmp_path) as buffer, buffer.client("observer-top") as client:
        pid = buffer.children["buffer"].process.pid
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == most
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, most))
        honest = Honest(client)
        opened = [
            buffer.talk(said) for _, said in zip(range(600), itertools.cycle((b"", CURVE)), strict=False)
        ]
        async with asyncio.timeout(DEADLINE):
            while len(os.listdir(f"/proc/{pid}/fd")) <= 200:  # noqa: PTH208 - what blocks is no disk
                await asyncio.sleep(0.1)
        while True:  # the flood goes on to hold every connection that it gets
            try:
                async with buffer.client("trainer-run") as newcomer:
                    await newcomer.status(DEADLINE)
                break
            except (Unauthorized, Unreachable):  # its handshakes came to nothing for a while
                assert honest.asked < 20 * DEADLINE
        assert not honest.task.done(), honest.task.exception()
        honest.task.cancel()
        for each in opened:
            each.close()


async def test_a_conversation_that_is_said_again_changes_nothing(tmp_path):
    said = bytearray()

    async def pass_on(reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", buffer.port)

        async def forward(source, target, keep):
            while data := await source.read(1 << 16):
                if keep:
                    said.extend(data)
                target.write(data)

        await asyncio.gather(forward(reader, back, True), forward(there, writer, False))

    async with Buffer(tmp_path) as buffer:
        await buffer.start("engine", "e0", "engine-e0")
        server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with buffer.client("observer-top") as observer:
            async with buffer.client("trainer-run", f"tcp://127.0.0.1:{port}") as client:
                rollout = await client.submit(
                    [[1, 2]], n=2, sampling=SamplingParams(max_tokens=8, ignore_eos=True)
                )
                await rollout.result()
            for _ in range(50):  # what the client acknowledged as it left may come late
                before = await observer.status()
                if not before.rollouts:
                    break
                await asyncio.sleep(0.1)
            assert before.counters["tokens"] == 16
            reader, writer = await asyncio.open_connection("127.0.0.1", buffer.port)
            writer.write(said)
            assert len(await asyncio.wait_for(reader.read(), 30)) < 1000  # and then it is closed
            writer.close()
            for _ in range(50):
                if buffer.log():
                    break
                await asyncio.sleep(0.1)
            after = await observer.status()
            assert after.counters == before.counters
            assert after.rollouts == before.rollouts
            assert buffer.log()
        server.close()
