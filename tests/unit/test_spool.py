"""The spool against a disk that fails at any call, and ticks at any moment: its one task never ends."""

import asyncio
import errno
import os

import numpy as np
import pytest
from cluster_harness import roll, running
from virtual_time import VIRTUAL, eventually, run

from seer.client import WeightsRefused
from seer.client.tensor_stream import TensorStream
from seer.common import blobs, wire
from seer.common.blobs import checksum
from seer.common.clock import LoopClock
from seer.common.config import BufferConfig
from seer.services.buffer.weights.spool import Spool

pytestmark = VIRTUAL

CALLS = (
    "open",
    "close",
    "write",
    "pwrite",
    "pread",
    "mkdir",
    "rename",
    "unlink",
    "rmdir",
    "scandir",
    "statvfs",
    "stat",
)


class Disk:
    """Fails the nth call that the spool makes, and all later ones if `stays`; others' calls go through."""

    def __init__(self, monkeypatch, nth, *, stays=False):
        self.left, self.stays, self.active, self.failed = nth, stays, False, 0
        self.patch = monkeypatch
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name, call):
        def made(*args, **kwargs):
            if not self.active:
                return call(*args, **kwargs)
            self.left -= 1
            if self.left > 0 or (self.left < 0 and not self.stays):
                return call(*args, **kwargs)
            self.failed += 1
            if name == "close":
                call(*args, **kwargs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return made

    def watch(self, spool):
        disk = spool._disk

        async def watched(work, *args, **kwargs):
            def active():
                self.active = True
                try:
                    return work(*args, **kwargs)
                finally:
                    self.active = False

            return await disk(active)

        spool._disk = watched
        read = blobs.read_at

        def reading(*place):
            self.active = True
            try:
                return read(*place)
            finally:
                self.active = False

        self.patch.setattr(blobs, "read_at", reading)


class World:
    """A spool, and who talks to it: answers by address."""

    def __init__(self, folder):
        self.spool = Spool(str(folder), LoopClock())
        self.spool.start()
        self.task = asyncio.create_task(self.spool.run())
        self.said = []

    async def put(self, message, address=b"trainer", of="trainer"):
        self.spool.put(self._reply, address, message, of)
        await asyncio.sleep(0.01)
        return self.said[-1][1] if self.said else None

    async def _reply(self, address, message):
        self.said.append((address, message))

    def heard(self, address):
        return [message for to, message in self.said if to == address]

    async def stop(self):
        self.task.cancel()
        await asyncio.wait([self.task])


def part(name, offset, length=100):
    data = np.arange(offset, offset + length, dtype=np.uint8)
    return wire.SpoolData(name=name, offset=offset, checksum=checksum(data), data=data)


async def two_streams(world):
    """Two streams one after the other, with readers; the second may use the first one's file."""
    for name in ("v1-a", "v2-a", "v3-a"):
        await world.put(wire.OpenSpool(name=name, size=200))
        await world.put(wire.ReadSpool(name=name, offset=0), b"reader")
        world.spool.name(f"spool:{name}")
        for offset in (0, 100):
            await world.put(part(name, offset))
        await world.put(wire.ReadSpool(name=name, offset=0), b"reader")
        world.spool.remove_unneeded({f"spool:{name}"})
        await asyncio.sleep(0.01)
        world.spool.remove_unneeded(set())
        await asyncio.sleep(0.01)
    for message in (opening(0, 0, 100, 200), opening(1, 100, 100, 200), part_of(1, 0, 100), part_of(0, 0, 0)):
        await world.put(message)
    await world.put(wire.ReadSpool(name="v1-a", offset=0), b"reader")


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
def test_no_call_that_fails_ends_the_spool(tmp_path, stays):
    async def attempt(folder, nth):
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = Disk(monkeypatch, nth, stays=stays)
            world = World(folder)
            disk.watch(world.spool)
            await two_streams(world)
            assert not world.task.done(), world.task
            disk.left, disk.stays = -1, False  # there is room again
            await world.put(wire.OpenSpool(name="v9-a", size=100))
            await world.put(part("v9-a", 0))
            answer = await world.put(wire.ReadSpool(name="v9-a", offset=0), b"reader")
            assert isinstance(answer, wire.SpoolData), answer
            assert answer.data.tolist() == list(range(100))
            problems = [each for _, each in world.said if isinstance(each, wire.SpoolState) and each.problem]
            await world.stop()
            return disk.failed, problems

    nth, told = 1, 0
    while True:
        failed, problems = run(attempt(tmp_path / str(nth), nth))
        if not failed:
            break
        assert all("No space left" in each.problem or "open" in each.problem for each in problems[:1])
        told += bool(problems)
        nth += 1
    assert nth > 40  # calls there were
    assert told > 20  # of which somebody heard


async def test_a_tick_between_opening_and_naming_ends_no_stream(tmp_path):
    for gap in (0.0, 0.3, 0.7, 5.0, 29.0):
        world = World(tmp_path / str(gap))
        await world.put(wire.OpenSpool(name="v1-a", size=200))
        for step in (part("v1-a", 0), part("v1-a", 100)):
            world.spool.remove_unneeded(set())
            await asyncio.sleep(gap)
            world.spool.remove_unneeded(set())
            assert not (await world.put(step)).problem
        await asyncio.sleep(gap)
        world.spool.remove_unneeded(set())
        state = await world.put(wire.OpenSpool(name="v1-a"))
        assert (state.problem, state.have) == ("", 200)
        world.spool.name("spool:v1-a")  # an update names it, and is refused at once
        world.spool.remove_unneeded(set())
        assert "no longer needed" in (await world.put(wire.OpenSpool(name="v1-a"))).problem
        await world.stop()


async def test_a_stream_that_no_update_names_goes_after_a_while(tmp_path):
    world = World(tmp_path)
    await world.put(wire.OpenSpool(name="v1-a", size=100))
    await world.put(part("v1-a", 0))
    await asyncio.sleep(wire.SPOOL_STALL_SECONDS + 1)
    world.spool.remove_unneeded(set())
    assert "no longer needed" in (await world.put(wire.OpenSpool(name="v1-a"))).problem
    await world.stop()


async def test_a_trainer_with_as_many_streams_as_it_may_have_stops_no_other(tmp_path):
    world = World(tmp_path)
    for number in range(32):
        assert not (await world.put(wire.OpenSpool(name=f"v{number}-a", size=100))).problem
    refused = await world.put(wire.OpenSpool(name="v40-a", size=100))
    assert refused.problem == "trainer 'trainer' has 32 streams already: wait for an update to end"
    assert not (await world.put(wire.OpenSpool(name="v7-a"))).problem, "those that it has go on"
    for number in range(96):
        of = f"other-{number // 32}"
        assert not (await world.put(wire.OpenSpool(name=f"v{number}-{of}", size=100), of=of)).problem
    refused = await world.put(wire.OpenSpool(name="v1-b", size=100), of="last")
    assert refused.problem == "the buffer holds 128 streams already: wait for an update to end"
    world.spool.name("spool:v7-a")  # an update that ended at once
    world.spool.remove_unneeded(set())
    await asyncio.sleep(0.01)
    assert not (await world.put(wire.OpenSpool(name="v40-a", size=100))).problem
    await world.stop()


async def test_what_waits_is_bounded_in_bytes_too():
    spool = Spool("", LoopClock())
    for offset in [0] * 1000:
        spool.put(None, b"", part("v1-a", offset))
    assert spool._turns.queue.qsize() * wire.SPOOL_BYTES <= 2**28
    large = np.zeros(wire.SPOOL_BYTES + 1, dtype=np.uint8)
    spool = Spool("", LoopClock())
    spool.put(None, b"", wire.SpoolData(name="v1-a", offset=0, checksum=0, data=large))
    assert spool._turns.queue.empty()


async def test_a_full_disk_refuses_the_update_by_name_and_the_next_one_works(tmp_path, monkeypatch):
    settings = BufferConfig(chunk_size=32, spool=str(tmp_path))
    tensors = {"w": np.ones(wire.SPOOL_BYTES, dtype=np.float32)}
    async with running(engines=2, buffer=settings) as cluster, cluster.client() as client:
        expected = await roll(client)
        spool = cluster.services["buffer"]._spool
        for nth in range(1, 100, 3):
            with monkeypatch.context() as patch:
                disk = Disk(patch, nth, stays=True)
                disk.watch(spool)
                update = asyncio.create_task(client.update_weights(1, tensors))
                await asyncio.wait([update])
                del spool._disk
            if not disk.failed:
                break
            assert isinstance(update.exception(), WeightsRefused)
            assert "No space left" in str(update.exception())
            assert await roll(client) == expected
        assert update.result().version == 1
        assert nth > 20


@pytest.mark.parametrize("gap", [0.05, 0.1, 0.25, 0.5, 0.8, 3.0])
def test_an_update_survives_latency_between_any_two_messages(gap):
    async def attempt(start):
        async with running(engines=1) as cluster, cluster.client() as client:
            send = client._channel.send

            async def slow(message):
                await asyncio.sleep(gap)
                await send(message)

            client._channel.send = slow
            await asyncio.sleep(start)
            live = await client.update_weights(1, {"w": np.ones(8, dtype=np.float32)})
            server = cluster.services["buffer"]
            assert live.version == 1
            await eventually(lambda: set(server.machine.instances) == {"e0"})

    for phase in range(5):
        run(attempt(0.1 * phase))


async def test_parts_of_a_stream_whose_opening_was_lost_do_not_end_it(tmp_path):
    world = World(tmp_path)
    try:
        assert await world.put(part("v1-a", 0)) is None  # its trainer opens it again
        assert (await world.put(wire.OpenSpool(name="v1-a", size=100))).resend
        state = await world.put(part("v1-a", 0))
        assert (state.have, state.problem) == (100, "")
    finally:
        await world.stop()


async def test_what_an_earlier_incarnation_left_stays_for_engines_that_are_not_back_yet(tmp_path):
    for back in (False, True):
        world = World(tmp_path)
        await world.put(wire.OpenSpool(name="v1-a", size=100))
        await world.put(part("v1-a", 0))
        await world.stop()
        world = World(tmp_path)
        world.spool.name("spool:v1-a")  # and that update is refused: nobody is there
        world.spool.remove_unneeded(set())
        assert (await world.put(wire.OpenSpool(name="v1-a", size=0))).have == 100
        if back:
            world.spool.remove_unneeded({"spool:v1-a"})  # an engine that has it live is back
        else:
            await asyncio.sleep(wire.SPOOL_STALL_SECONDS + 1)
        world.spool.remove_unneeded(set())
        assert (await world.put(wire.OpenSpool(name="v1-a", size=0))).problem == "is no longer needed"
        await world.stop()


def tensors_of(*tensors):
    """Return a stream's bytes."""
    stream = TensorStream(*tensors)
    return stream.read(0, stream.size)


async def send(world, name, data, base=""):
    """Send a small stream; return the last answer."""
    await world.put(wire.OpenSpool(name=name, size=len(data), base=base))
    return await world.put(wire.SpoolData(name=name, offset=0, checksum=checksum(data), data=data))


STILL = np.zeros(500, "u1")
BEFORE, AFTER = (tensors_of({"w": np.full(8, each, "u1"), "x": STILL}) for each in (0, 1))
BETWEEN = tensors_of({"whole:w": np.ones(8, "u1")}, {"base": "v1-a"})


async def test_a_stream_that_is_to_be_made_takes_no_bytes_of_its_own(tmp_path):
    """Else its base could go, as if nobody needed it, before the delta comes."""
    world = World(tmp_path)
    await send(world, "v1-a", BEFORE)
    await send(world, "v2-a", AFTER, base="v1-a")
    world.spool.name("spool:v1-a")
    world.spool.remove_unneeded(set())
    await send(world, "v2-a.delta", BETWEEN)
    assert not world.task.done(), world.task
    state = await world.put(wire.OpenSpool(name="v2-a"))
    assert (state.have, state.base) == (len(AFTER), "v1-a")
    await world.stop()


async def test_a_delta_of_an_earlier_incarnation_is_sent_and_applied_again(tmp_path):
    for dies in (False, True):
        world = World(tmp_path)
        await send(world, "v1-a", BEFORE)
        await world.put(wire.OpenSpool(name="v2-a", size=len(AFTER), base="v1-a"))
        state = await world.put(wire.OpenSpool(name="v2-a.delta", size=len(BETWEEN)))
        assert state.have == 0, "its trainer sends it"
        await send(world, "v2-a.delta", BETWEEN)
        await eventually(lambda said=world.said: said[-1][1].have == len(AFTER))
        await world.stop()
        if not dies:  # as if it had ended before all of the stream was there
            (tmp_path / "seer-spool/v2-a" / blobs.NOTES).unlink()


def opening(number, start, size=100, whole=300, name="v1-a"):
    return wire.OpenSpool(name=f"{name}.part{number}", size=size, start=start, whole_size=whole)


def part_of(number, offset, begin, length=100):
    """Return bytes of a part which begins at `begin`."""
    data = np.arange(begin + offset, begin + offset + length).astype(np.uint8)
    return wire.SpoolData(name=f"v1-a.part{number}", offset=offset, checksum=checksum(data), data=data)


async def test_parts_come_in_any_order_and_engines_read_what_is_there_from_the_beginning_on(tmp_path):
    world = World(tmp_path)
    await world.put(opening(0, 0, 50))
    await world.put(opening(2, 150, 150))
    await world.put(opening(1, 50))
    have = []
    for message in (
        part_of(2, 0, 150, 100), part_of(1, 0, 50, 60), part_of(0, 0, 0, 50), part_of(2, 100, 150, 50),
        part_of(1, 60, 50, 40),
    ):  # fmt: skip
        assert not (await world.put(message)).problem
        have.append((await world.put(wire.OpenSpool(name="v1-a"), b"engine")).have)
    assert have == [0, 0, 110, 110, 300]
    answer = await world.put(wire.ReadSpool(name="v1-a", offset=0), b"engine")
    assert answer.data.tolist() == np.arange(300).astype(np.uint8).tolist()
    await world.stop()
    world = World(tmp_path)  # whose trainer is still there
    assert (await world.put(opening(1, 50))).have == 100
    assert (await world.put(wire.OpenSpool(name="v1-a"))).have == 300
    await world.stop()


async def test_a_stream_that_lacks_a_part_is_none_for_a_later_incarnation(tmp_path):
    world = World(tmp_path)
    await world.put(opening(0, 0, 200))
    await world.put(opening(1, 200))
    await world.put(part_of(0, 0, 0, 200))
    await world.stop()
    world = World(tmp_path)
    assert (await world.put(wire.OpenSpool(name="v1-a"))).problem
    state = await world.put(opening(0, 0, 200))
    assert (state.have, state.resend) == (0, True)
    await world.stop()


WRONG_PARTS = {
    "beside another": opening(1, 50),
    "at the end of another": opening(1, 99, 1),
    "beyond the end": opening(1, 250),
    "of another size": opening(1, 100, whole=400),
    "empty": opening(1, 100, 0),
    "of a part": opening(1, 100, name="v1-a.part0"),
    "of a part of a delta": opening(1, 100, name="v1-a.delta.part0"),
    "of a delta to nothing": opening(1, 100, name="v1-a.delta"),
    "of nothing": wire.OpenSpool(name="v1-b", size=100, whole_size=300),
    "of no name": wire.OpenSpool(name=".part1", size=100, whole_size=300),
}


@pytest.mark.parametrize("wrong", WRONG_PARTS.values(), ids=WRONG_PARTS)
async def test_what_is_no_part_is_refused_and_costs_no_other(tmp_path, wrong):
    world = World(tmp_path)
    await world.put(opening(0, 0))
    refused = await world.put(wrong)
    assert refused.problem
    assert refused.have == 0
    assert not (await world.put(opening(1, 100, 200))).problem
    await world.put(part_of(0, 0, 0))
    await world.put(part_of(1, 0, 100, 200))
    assert (await world.put(wire.OpenSpool(name="v1-a"))).have == 300
    await world.stop()


async def test_a_stream_that_is_sent_as_a_whole_takes_no_parts(tmp_path):
    world = World(tmp_path)
    await world.put(wire.OpenSpool(name="v1-a", size=300))
    await world.put(part("v1-a", 0))
    assert "sent as a whole" in (await world.put(opening(0, 0))).problem
    await world.stop()


async def test_a_rank_that_sends_no_more_ends_its_stream_and_all_of_its_parts(tmp_path):
    world = World(tmp_path)
    await world.put(opening(0, 0))
    await world.put(opening(1, 100, 200))
    await world.put(part_of(0, 0, 0))
    for step in range(5):  # one goes on
        await asyncio.sleep(wire.SPOOL_STALL_SECONDS / 2)
        await world.put(part_of(1, 20 * step, 100, 20))
        world.spool.remove_unneeded({"spool:v1-a"})
    assert (await world.put(wire.OpenSpool(name="v1-a"))).have == 200
    await asyncio.sleep(wire.SPOOL_STALL_SECONDS + 1)
    world.spool.remove_unneeded({"spool:v1-a"})
    for name in ("v1-a", "v1-a.part0", "v1-a.part1"):
        assert "sent nothing for 30 s" in (await world.put(wire.OpenSpool(name=name))).problem
    assert not world.spool._streams
    await world.stop()


async def test_parts_count_as_one_stream(tmp_path):
    world = World(tmp_path)
    for number in range(40):
        assert not (await world.put(opening(number, number, 1))).problem
    assert not (await world.put(wire.OpenSpool(name="v2-a", size=100))).problem
    await world.stop()


HALVES = [(1, BETWEEN[-8:], len(BETWEEN) - 8), (0, BETWEEN[:-8], 0)]


async def send_half(world, half):
    number, data, start = HALVES[half]
    state = await world.put(opening(number, start, len(data), len(BETWEEN), name="v2-a.delta"))
    if not state.problem:
        name = f"v2-a.delta.part{number}"
        await world.put(wire.SpoolData(name=name, offset=0, checksum=checksum(data), data=data))
    return state


async def test_a_delta_that_comes_in_parts_is_applied_once_all_are_there(tmp_path):
    world = World(tmp_path)
    await send(world, "v1-a", BEFORE)
    assert "cannot be applied" in (await send_half(world, 0)).problem, "there is nothing that it is to"
    await world.put(wire.OpenSpool(name="v2-a", size=len(AFTER), base="v1-a"))
    stream = world.spool._streams["v2-a"]
    await asyncio.sleep(wire.SPOOL_STALL_SECONDS)
    assert not (await send_half(world, 0)).problem
    assert stream.grew_at >= wire.SPOOL_STALL_SECONDS, "or it would count as stalled"
    assert (stream.have, stream.making) == (0, None)
    await send_half(world, 1)
    await eventually(lambda: world.said[-1][1].have == len(AFTER))
    answer = await world.put(wire.ReadSpool(name="v2-a", offset=0), b"engine")
    assert answer.data.tobytes() == AFTER.tobytes()
    assert (await world.put(opening(0, 0, 9, len(AFTER), name="v2-a"))).have == 9, "a late rank sends nothing"
    world.spool.name("spool:v2-a")
    world.spool.remove_unneeded(set())
    assert (await send_half(world, 0)).problem
    assert not world.spool._streams
    await world.stop()


async def test_once_a_rank_sends_all_no_part_of_the_delta_is_taken(tmp_path):
    world = World(tmp_path)
    await send(world, "v1-a", BEFORE)
    await world.put(wire.OpenSpool(name="v2-a", size=len(AFTER), base="v1-a"))
    assert "a delta to it" in (await world.put(opening(0, 0, 9, len(AFTER), name="v2-a"))).problem
    await send_half(world, 0)
    await world.put(wire.OpenSpool(name="v2-a", size=len(AFTER)))
    assert not (await world.put(opening(0, 0, len(AFTER), len(AFTER), name="v2-a"))).problem
    for half in (0, 1):
        assert "the whole stream" in (await send_half(world, half)).problem
    data = wire.SpoolData(name="v2-a.part0", offset=0, checksum=checksum(AFTER), data=AFTER)
    assert (await world.put(data)).have == len(AFTER)
    await world.stop()
