"""One engine's copy of a stream, and the server that sends it on."""

import asyncio

import numpy as np
import pytest
from virtual_time import eventually, virtual

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.errors import ConfigError
from seer.common.net.channel import Channel
from seer.common.net.handshake import Identity
from seer.common.net.transport.memory import MemoryNetwork, MemoryTransport
from seer.common.weights.digest import checksum
from seer.services.engine.weights import copy_server
from seer.services.engine.weights.copies import GONE, MAX_DAMAGED, StreamCopy, copy_parts, on_this_machine
from seer.services.engine.weights.copy_server import CopyServer

SIZE = 3 * wire.SPOOL_BYTES + 100
BYTES = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)


def part(offset, damaged=False):
    data = BYTES[offset : offset + wire.SPOOL_BYTES]
    return wire.SpoolData(name="v1", offset=offset, checksum=checksum(data) ^ damaged, data=data)


def made():
    copy = StreamCopy("v1", SIZE)
    copy.begin()
    return copy


async def filled():
    copy = made()
    for offset in copy.missing():
        assert await copy.write(part(offset))
    return copy


async def test_a_copy_has_exactly_the_parts_that_arrived_whole():
    copy = made()
    assert not await copy.write(part(0, damaged=True))
    short = part(0)
    short.data = short.data[:-1]
    assert not await copy.write(short)
    assert (copy.have, copy.arrived) == (0, 0)
    assert await copy.write(part(wire.SPOOL_BYTES))
    assert (copy.have, copy.arrived) == (0, wire.SPOOL_BYTES)
    assert await copy.write(part(0))
    assert copy.have == 2 * wire.SPOOL_BYTES
    assert list(copy.missing()) == [2 * wire.SPOOL_BYTES, 3 * wire.SPOOL_BYTES]
    await copy.delete()
    assert not copy.folder.exists()


async def test_who_waits_for_a_part_gets_it_or_hears_that_it_is_gone():
    copy = made()
    first, last = (asyncio.create_task(copy.part(offset)) for offset in (0, 3 * wire.SPOOL_BYTES))
    await asyncio.sleep(0)
    await copy.write(part(0))
    got = await first
    assert (got.data == BYTES[: wire.SPOOL_BYTES]).all()
    assert got.checksum == checksum(got.data)
    await copy.delete()
    with pytest.raises(ValueError, match=GONE):
        await last
    for offset in (SIZE, 5):
        with pytest.raises(ValueError, match="no such part"):
            await copy.part(offset)


async def test_a_linked_copy_outlives_the_one_that_it_was_linked_to():
    theirs, ours = await filled(), made()
    await ours.write(part(0))
    assert on_this_machine(theirs.state)
    assert await ours.link(theirs.folder)
    await theirs.delete()
    assert not on_this_machine(theirs.state)
    assert (ours.have, ours.file.read_bytes()) == (SIZE, BYTES.tobytes())
    other = made()
    assert not await other.link(theirs.folder)
    assert other.have == 0
    for copy in (ours, other):
        await copy.delete()


async def test_a_source_of_damaged_parts_alone_is_given_up():
    class Damaged:
        asked = 0

        async def ask(self, question):
            self.asked += 1

        async def next(self, questions):
            return part(questions[0].offset, damaged=True)

    copy, source = made(), Damaged()
    with pytest.raises(ValueError, match=f"{MAX_DAMAGED} parts in a row arrived damaged"):
        await copy_parts(copy, source)
    assert source.asked < 2 * MAX_DAMAGED
    await copy.delete()


def identity(name):
    return Identity(role="engine", name=name, incarnation=1, config_hash="same")


@virtual
async def test_a_server_says_what_it_has_and_sends_parts_as_they_arrive(monkeypatch):
    monkeypatch.setattr(copy_server, "MAX_READS", 2)
    network, server = MemoryNetwork(), CopyServer(identity("a"))
    endpoint = await server.start(MemoryTransport(network), "tcp://a:0", "tcp://head:7102")
    serving = asyncio.create_task(server.run())
    reader = Channel(MemoryTransport(network), endpoint, identity("b"), wire.HolderToEngine, LoopClock())
    await reader.open(5)
    await reader.send(wire.OpenSpool(name="v1"))
    while not isinstance(state := await reader.recv(), wire.SpoolState):
        pass
    assert (state.size, state.problem) == (0, "")
    copy = made()
    server.offer(copy)
    for offset in (0, wire.SPOOL_BYTES, 2 * wire.SPOOL_BYTES, 0):
        await reader.send(wire.ReadSpool(name="v1", offset=offset))
    await eventually(lambda: len(server._reads) == 2)
    await copy.write(part(0))
    got = await reader.recv()
    assert (got.offset, len(got.data)) == (0, wire.SPOOL_BYTES)
    server.withdraw(copy)
    await copy.delete()
    assert (await reader.recv()).problem == GONE
    await reader.send(wire.OpenSpool(name="v1"))
    assert (await reader.recv()).problem == GONE
    serving.cancel()
    await asyncio.wait([serving])
    reader.close()
    server.close()


@pytest.mark.parametrize(
    ("configured", "buffer", "bound"),
    [
        ("", "ipc:///tmp/buffer", False),
        ("", "tcp://127.0.0.1:7102", False),
        ("", "tcp://no.such.host.invalid:7102", False),
        ("off", "tcp://10.0.0.1:7102", False),
        ("tcp://a:7", "tcp://127.0.0.1:7102", True),
    ],
)
async def test_where_an_engine_listens(configured, buffer, bound):
    server = CopyServer(identity("a"))
    endpoint = await server.start(MemoryTransport(MemoryNetwork()), configured, buffer)
    assert endpoint == ("tcp://a:7" if bound else "")
    server.close()


async def test_an_endpoint_that_is_taken_is_refused_by_the_setting():
    transport = MemoryTransport(MemoryNetwork())
    await transport.router("tcp://a:7")
    with pytest.raises(ConfigError, match=r"engine\.weights_endpoint = 'tcp://a:7': cannot bind"):
        await CopyServer(identity("a")).start(transport, "tcp://a:7", "")
