"""The buffer's images on a real disk: cut, damaged, sent twice, lost, found again; and a disk that fails."""

import asyncio
import struct
from contextlib import asynccontextmanager

import numpy as np
import pytest
from virtual_time import VIRTUAL

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.errors import ConfigError
from seer.common.prepared_image import make, name_of
from seer.common.types import MAX_IMAGE_BYTES
from seer.services.buffer.images.image_folder import NAME, ImageFolder
from seer.services.buffer.images.image_server import _MAX_QUEUED, ImageServer

pytestmark = VIRTUAL

PART = wire.IMAGE_PART_BYTES


def image(seed, values=1000):
    pixels = np.random.default_rng(seed).normal(size=(values,)).astype(np.float32)
    return make("image", {"image_grid_thw": np.array([[1, 2, 2]]), "pixel_values": pixels})


LARGE = image(0, PART)  # 8 MiB and a header: five parts


class World:
    """An image server, and who talks to it."""

    def __init__(self, folder, max_bytes=MAX_IMAGE_BYTES):
        self.arrived, self.stalled = [], []
        self.images = ImageServer(
            str(folder), max_bytes, LoopClock(), self.arrived.append, lambda *told: self.stalled.append(told)
        )

    async def ask(self, message, trainer="t"):
        """Return the answer, once there is one."""
        answer = asyncio.get_running_loop().create_future()

        async def reply(address, said):
            answer.set_result((address, said))

        self.images.put(reply, b"peer", message, trainer)
        address, said = await answer
        assert address == b"peer"
        return said

    async def open(self, prepared):
        return await self.ask(wire.OpenImage(name=prepared.name, size=prepared.size))

    async def part(self, prepared, offset, length=PART, size=None, data=None):
        data = prepared.data[offset : offset + length] if data is None else data
        size = prepared.size if size is None else size
        return await self.ask(wire.ImageData(name=prepared.name, size=size, offset=offset, data=data))

    async def send(self, prepared):
        state = await self.open(prepared)
        while not state.problem and state.have < prepared.size:
            state = await self.part(prepared, state.have)
        return state

    async def read(self, prepared):
        parts, offset = [], 0
        while offset < prepared.size:
            said = await self.ask(wire.ReadImage(name=prepared.name, offset=offset), "")
            if isinstance(said, wire.ImageState):
                return said.problem
            assert (said.name, said.size, said.offset) == (prepared.name, prepared.size, offset)
            parts.append(said.data)
            offset += len(said.data)
        return np.concatenate(parts).tobytes()


@asynccontextmanager
async def running(folder, **options):
    world = World(folder, **options)
    world.images.start()
    task = asyncio.create_task(world.images.run())
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.wait([task])


def files(folder):
    return {each.name for each in (folder / NAME).iterdir() if "seer" not in each.name}


async def test_an_image_is_read_as_it_was_sent(tmp_path):
    async with running(tmp_path) as world:
        small = image(1)
        for prepared in (LARGE, small):
            assert await world.read(prepared) == "is not in this buffer: submit it again"
            state = await world.send(prepared)
            assert (state.have, state.problem) == (prepared.size, "")
            assert await world.read(prepared) == prepared.data.tobytes()
        assert world.arrived == [LARGE.name, small.name]
        size = LARGE.size + small.size
        assert world.images.counters == {"image_received_bytes": size, "image_sent_bytes": size}
        assert files(tmp_path) == {LARGE.name, small.name}


async def test_an_image_that_is_there_is_not_sent_again(tmp_path):
    async with running(tmp_path) as world:
        await world.send(LARGE)
        assert (await world.open(LARGE)).have == LARGE.size
        assert (await world.part(LARGE, 0)).have == LARGE.size
        assert world.arrived == [LARGE.name]


async def test_parts_that_come_twice_early_or_from_two_senders_change_nothing(tmp_path):
    async with running(tmp_path) as world:
        await world.open(LARGE)
        assert (await world.part(LARGE, PART)).have == 0, "there is nothing before it"
        assert (await world.part(LARGE, 0)).have == PART
        assert (await world.part(LARGE, 0)).have == PART
        assert (await world.part(LARGE, 3 * PART)).have == PART
        assert (await world.open(LARGE)).have == PART, "another trainer goes on from there"
        assert (await world.part(LARGE, PART, length=0)).have == PART
        assert (await world.part(LARGE, PART, data=np.zeros(PART + 1, np.uint8))).have == PART
        assert not world.arrived
        await world.send(LARGE)
        assert await world.read(LARGE) == LARGE.data.tobytes()


async def test_what_is_damaged_after_it_came_is_lost_and_sent_again(tmp_path):
    async with running(tmp_path) as world:
        await world.send(LARGE)
        file = tmp_path / NAME / LARGE.name
        data = bytearray(file.read_bytes())
        data[PART] ^= 1
        file.write_bytes(data)
        assert "is not the name of these bytes" in await world.read(LARGE)
        assert await world.read(LARGE) == "is not in this buffer: submit it again"
        assert not files(tmp_path)
        await world.send(LARGE)
        assert await world.read(LARGE) == LARGE.data.tobytes()


async def test_other_bytes_under_a_name_are_refused_and_sent_anew(tmp_path):
    async with running(tmp_path) as world:
        prepared, other = image(1), image(2)
        state = await world.part(prepared, 0, data=other.data)
        assert "is not the name of these bytes" in state.problem
        assert await world.read(prepared) == "is not in this buffer: submit it again"
        assert not world.arrived
        assert not files(tmp_path)
        assert (await world.send(prepared)).have == prepared.size


async def test_a_shape_that_no_array_can_have_costs_that_one_image(tmp_path):
    async with running(tmp_path) as world:
        text = b'["image",[["a","I64",[0,67108864,67108864,67108864]]]]  '
        data = np.frombuffer(struct.pack("<Q", len(text)) + text, np.uint8)
        said = await world.ask(wire.ImageData(name=name_of(data), size=len(data), offset=0, data=data))
        assert "describe 1 to" in said.problem
        assert (await world.send(LARGE)).problem == ""


async def test_another_size_or_no_name_is_refused(tmp_path):
    async with running(tmp_path) as world:
        prepared = image(1)
        await world.open(prepared)
        said = await world.ask(wire.OpenImage(name=prepared.name, size=prepared.size + 1))
        assert said.problem == f"has {prepared.size} bytes, not {prepared.size + 1}"
        for name, size in (("../" + prepared.name[3:], 9), ("", 9), (image(2).name, 0)):
            assert (await world.ask(wire.OpenImage(name=name, size=size))).problem
        assert files(tmp_path) == set()
        assert [each.name for each in tmp_path.iterdir()] == [NAME]


async def test_what_nobody_needs_makes_room_and_what_is_needed_does_not(tmp_path):
    async with running(tmp_path) as world:
        large = [image(seed, 6 * PART) for seed in range(3)]  # of 48 MiB each: there is room for one
        small = image(5)
        await world.send(small)
        world.images.machine.refer("g", "t", "t", [large[0].name], 0.0)
        await world.send(large[0])
        assert "buffer.image_bytes" in (await world.open(large[1])).problem
        assert await world.read(small) == small.data.tobytes(), "nothing goes in vain"
        world.images.machine.release("g")
        world.images.machine.refer("h", "t", "t", [small.name], 0.0)
        assert (await world.open(large[1])).problem == ""
        assert files(tmp_path) == {small.name}
        assert await world.read(large[0]) == "is not in this buffer: submit it again"
        assert await world.read(small) == small.data.tobytes()


async def test_the_next_incarnation_has_them_once_they_were_checked(tmp_path):
    async with running(tmp_path) as world:
        for prepared in (LARGE, image(1), image(2)):
            await world.send(prepared)
        await world.part(image(3), 0, length=100)
    damaged = tmp_path / NAME / image(1).name
    damaged.write_bytes(bytes(image(1).size))
    (tmp_path / NAME / image(2).name).write_bytes(b"short")
    async with running(tmp_path) as world:
        assert await world.read(LARGE) == "is not in this buffer: submit it again"
        assert files(tmp_path) == {prepared.name for prepared in (LARGE, image(1), image(2))}
        assert world.images.machine.missing([LARGE.name]) == [LARGE.name]
        assert (await world.open(LARGE)).have == LARGE.size
        assert world.arrived == [LARGE.name]
        assert await world.read(LARGE) == LARGE.data.tobytes()
        assert (await world.open(image(1))).have == 0, "its file was damaged meanwhile"
        assert (await world.send(image(1))).have == image(1).size
        assert await world.read(image(1)) == image(1).data.tobytes()
        assert (await world.send(image(2))).have == image(2).size


async def test_a_temporary_folder_is_gone_with_its_buffer():
    async with running("") as world:
        await world.send(image(1))
        root = world.images._folder.root
        assert (root / image(1).name).exists()
    assert not root.exists()


@pytest.mark.parametrize("call", ["append", "check", "read", "remove"])
async def test_an_error_of_the_disk_costs_that_one_image(tmp_path, monkeypatch, call):
    async with running(tmp_path) as world:
        await world.send(image(2))
        if call in ("read", "remove"):
            await world.send(image(1))
        with monkeypatch.context() as patched:

            def fail(*_):
                raise OSError("the disk is full")

            patched.setattr(ImageFolder, call, fail)
            if call == "read":
                assert await world.read(image(1)) == "cannot be read: the disk is full"
            elif call == "remove":
                assert (await world.part(image(3), 0, data=image(4).data)).problem
            else:
                assert "the disk is full" in (await world.send(image(1))).problem
        assert await world.read(image(2)) == image(2).data.tobytes()
        assert (await world.send(image(1))).have == image(1).size
        assert await world.read(image(1)) == image(1).data.tobytes()


async def test_deadlines(tmp_path):
    async with running(tmp_path) as world:
        world.images.machine.refer("g", "t", "t", [LARGE.name], LoopClock().now())
        await world.part(LARGE, 0)
        await world.part(image(1), 0, length=100)
        await asyncio.sleep(wire.IMAGE_STALL_SECONDS - 1)
        await world.part(LARGE, 0)  # nothing new comes with it
        await world.open(LARGE)
        world.images.tick()
        assert not world.stalled
        await asyncio.sleep(2)
        world.images.tick()
        ((groups, why),) = world.stalled
        assert groups == ["g"]
        assert "30 s" in why
        await world.open(LARGE)
        assert files(tmp_path) == {LARGE.name + ".part"}, "nobody waits for the other one"


async def test_too_many_messages_are_dropped(tmp_path):
    world = World(tmp_path)
    for _ in range(10_000):
        world.images.put(None, b"", wire.ImageData(name="", size=1, offset=0, data=LARGE.data[:1]))
    assert world.images._turns.queue.qsize() == 4 * wire.IMAGES_AT_ONCE
    for _ in range(10_000):
        world.images.put(None, b"", wire.ReadImage(name="", offset=0))
    assert world.images._turns.queue.qsize() == _MAX_QUEUED
    world.images.tick()


def test_room_for_less_than_one_image_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"buffer\.image_bytes = 5: must have room for one image"):
        World(tmp_path, max_bytes=5)


def test_a_folder_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "mine").touch()
    with pytest.raises(ConfigError, match=r"buffer\.images = "):
        World(tmp_path).images.start()
