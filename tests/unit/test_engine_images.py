"""Images of an engine's chunks: asked once, checked, kept within bounds; and a chunk that lacks one waits alone."""

import asyncio

import numpy as np
import pytest
from engine_system import engine
from virtual_time import VIRTUAL, eventually

from seer.common import wire
from seer.common.errors import ConfigError
from seer.common.prepared_image import make
from seer.common.types import MAX_IMAGE_BYTES, Placed
from seer.services.engine.images import ASK_SECONDS, EngineImages

pytestmark = VIRTUAL

PART = wire.IMAGE_PART_BYTES


def image(seed, values=100):
    return make("image", {"pixel_values": np.full(values, seed, np.float32)})


ONE, TWO, LARGE = image(1), image(2), image(3, PART)


class World:
    """Images of an engine, and what they said: chunks that are ready, chunks that failed."""

    def __init__(self, max_bytes=2**30):
        self.time = 0.0
        self.ready, self.failed = [], []
        self.images = EngineImages(
            max_bytes,
            self,
            self.ready.append,
            lambda chunk, error: self.failed.append((chunk, str(error))),
            lambda: None,
        )

    def now(self):
        return self.time

    def questions(self):
        found = []
        while (question := self.images.question()) is not None:
            found.append((question.name, question.offset))
        return found

    def part(self, image, offset=0, length=PART, **changes):
        data = image.data[offset : offset + length]
        whole = {"name": image.name, "size": image.size, "offset": offset, "data": data}
        self.images.arrived(wire.ImageData(**(whole | changes)))

    async def give(self, *images):
        """Answer all questions, with these images; let complete ones be checked."""
        data = {image.name: image for image in images}
        while questions := self.questions():
            for name, offset in questions:
                self.part(data[name], offset)
            await asyncio.sleep(0.01)

    @classmethod
    async def running(cls, **options):
        world = cls(**options)
        world.task = asyncio.create_task(world.images.run())
        return world


async def test_a_chunk_is_ready_once_all_its_images_were_checked():
    world = await World.running()
    world.images.hold("a", [ONE.name, TWO.name])
    assert world.questions() == [(ONE.name, 0), (TWO.name, 0)]
    world.part(ONE)
    await asyncio.sleep(0.01)
    assert not world.ready
    world.part(TWO)
    await asyncio.sleep(0.01)
    assert world.ready == ["a"]
    assert world.images.get(TWO.name).tensors["pixel_values"].tolist() == TWO.tensors["pixel_values"].tolist()


async def test_an_image_is_asked_for_once_and_kept_for_the_next_chunks():
    world = await World.running()
    for chunk in "abc":
        world.images.hold(chunk, [LARGE.name, LARGE.name])
    assert world.questions() == [(LARGE.name, 0)]
    world.part(LARGE)
    assert world.questions() == [(LARGE.name, PART)], "one part after the other"
    world.part(LARGE, PART)
    await world.give(LARGE)
    assert world.ready == ["a", "b", "c"]
    for chunk in "abc":
        world.images.release(chunk)
    world.images.hold("d", [LARGE.name])
    assert world.ready[-1] == "d"
    assert not world.questions()


async def test_chunks_behind_one_that_waits_do_not_wait_for_it():
    world = await World.running()
    world.images.hold("a", [ONE.name])
    world.images.hold("b", [TWO.name])
    world.questions()
    world.part(TWO)
    await asyncio.sleep(0.01)
    assert world.ready == ["b"]


async def test_parts_that_come_twice_or_unasked_change_nothing():
    world = await World.running()
    world.part(ONE)
    world.images.hold("a", [LARGE.name])
    world.part(LARGE)
    assert world.questions() == [(LARGE.name, 0)], "it came unasked"
    world.part(LARGE)
    assert world.questions() == [(LARGE.name, PART)]
    world.part(LARGE)
    world.part(LARGE, 2 * PART)
    world.part(LARGE, PART)
    await world.give(LARGE)
    assert world.ready == ["a"]
    assert world.images.get(LARGE.name).data.tobytes() == LARGE.data.tobytes()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda world: world.part(ONE, data=TWO.data), "is not the name of these bytes"),
        (lambda world: world.part(ONE, data=ONE.data[:0]), "a part of 0 bytes does not fit"),
        (lambda world: world.part(ONE, size=5), "does not fit at 0 of 5"),
        (lambda world: world.images.arrived(wire.ImageState(name=ONE.name, have=0, problem="gone")), "gone"),
        (lambda world: world.images.arrived(wire.ImageState(name=ONE.name, have=9)), "has it no longer"),
    ],
)
async def test_an_image_that_is_another_or_cannot_be_had_fails_its_chunks_alone(answer, says):
    world = await World.running()
    world.images.hold("a", [ONE.name, TWO.name])
    world.images.hold("b", [TWO.name])
    world.images.hold("c", [ONE.name])
    world.questions()
    answer(world)
    await asyncio.sleep(0.01)
    assert [chunk for chunk, _ in world.failed] == ["a", "c"]
    assert all(why.startswith(f"images: {ONE.name}: ") and says in why for _, why in world.failed)
    world.part(TWO)
    await asyncio.sleep(0.01)
    assert world.ready == ["b"]
    world.images.hold("a", [ONE.name])  # another attempt
    await world.give(ONE)
    assert world.ready == ["b", "a"]


async def test_a_question_is_repeated_and_then_given_up():
    world = await World.running()
    world.images.hold("a", [ONE.name])
    asked = 0
    for _ in range(int(2 * wire.IMAGE_STALL_SECONDS)):
        world.images.tick()
        asked += len(world.questions())
        world.time += 1.0
        if world.failed:
            break
    assert asked == wire.IMAGE_STALL_SECONDS // ASK_SECONDS
    ((chunk, why),) = world.failed
    assert chunk == "a"
    assert "sent nothing for 30 s" in why


async def test_few_are_asked_for_at_once_and_those_of_dropped_chunks_do_not_count():
    world = await World.running()
    images = [image(seed) for seed in range(20)]
    for place, each in enumerate(images):
        world.images.hold(str(place), [each.name])
    assert len(world.questions()) == wire.IMAGES_AT_ONCE
    for place in range(wire.IMAGES_AT_ONCE):
        world.images.release(str(place))
    assert [name for name, _ in world.questions()] == [each.name for each in images[8:16]]
    await world.give(*images)
    await asyncio.sleep(0.1)
    for each in images[8:16]:
        world.part(each)
    await world.give(*images)
    assert world.ready == [str(place) for place in range(8, 20)]


async def test_memory_is_bounded_and_chunks_wait_in_line_for_room():
    world = await World.running(max_bytes=MAX_IMAGE_BYTES + 4 * 5 * PART - 1)
    big = [image(seed, 5 * PART) for seed in range(4)]  # of 40 MiB each
    for place, each in enumerate(big):
        world.images.hold(str(place), [each.name])
    for place in range(4):
        await world.give(*big)
        assert world.ready == [str(each) for each in range(place + 1)], "one after the other"
        assert world.images._bytes <= MAX_IMAGE_BYTES + 4 * 5 * PART - 1
        world.images.release(str(place))
    assert not world.images._users
    world.images.hold("again", [big[3].name])
    assert world.ready[-1] == "again", "the most recently used one is still here"


async def test_a_chunk_whose_images_exceed_the_bound_runs_alone():
    world = await World.running(max_bytes=MAX_IMAGE_BYTES)
    big = [image(seed, 5 * PART) for seed in range(3)]
    world.images.hold("small", [ONE.name])
    world.images.hold("large", [each.name for each in big])
    world.images.hold("after", [TWO.name])
    await world.give(ONE, TWO, *big)
    assert world.ready == ["small"]
    world.images.release("small")
    await world.give(ONE, TWO, *big)
    assert world.ready == ["small", "large"]
    world.images.release("large")
    await world.give(ONE, TWO, *big)
    assert world.ready == ["small", "large", "after"]
    assert world.images._bytes <= MAX_IMAGE_BYTES


async def test_an_image_that_is_dropped_while_it_is_checked_harms_nothing(monkeypatch):
    checking, late = asyncio.Event(), asyncio.Event()

    async def slow(work, *args):
        checking.set()
        await late.wait()
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", slow)
    world = await World.running()
    world.images.hold("a", [ONE.name])
    world.questions()
    world.part(ONE, data=TWO.data)
    await checking.wait()
    world.images._max_bytes = 0  # as if others took all room
    world.images.release("a")
    world.images.hold("b", [ONE.name])
    late.set()
    await asyncio.sleep(0.01)
    assert not world.failed
    await world.give(ONE)
    assert world.ready == ["b"]
    world.images.release("b")
    late.clear()
    world.images.hold("c", [ONE.name])
    world.questions()
    world.part(ONE, data=TWO.data)
    world.images.release("c")
    late.set()
    await asyncio.sleep(0.01)
    assert not world.task.done()


def test_room_for_less_than_one_image_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.image_bytes = 5: must have room for one image"):
        World(max_bytes=5)


# --- in the server ------------------------------------------------------------------------------------

PLACED = [Placed(ONE.name, 0, 1), Placed(LARGE.name, 1, 2)]


async def test_a_chunk_with_images_waits_for_them_and_others_run():
    async with engine() as (buffer, server, *_):
        assert buffer.said[0].capacity.image_tokens > 0
        await buffer.run(0, images=PLACED)
        await buffer.run(1)
        await eventually(lambda: len(buffer.results()) == 1)
        assert list(server.running) == ["r/p#0"]
        assert await buffer.give(ONE, LARGE) == 2 + LARGE.size // PART
        await eventually(lambda: len(buffer.results()) == 2)
        await buffer.run(2, images=PLACED)
        await eventually(lambda: len(buffer.results()) == 3)
        assert await buffer.give(ONE, LARGE) == 0, "each image comes once"


async def test_images_are_part_of_what_is_generated():
    async with engine() as (buffer, *_):
        tokens = []
        for attempt, images in enumerate(([], PLACED, PLACED[:1], PLACED), 1):
            await buffer.run(attempt=attempt, images=images)
            await buffer.give(ONE, LARGE)
            await eventually(lambda count=attempt: len(buffer.results()) == count)
            tokens.append(buffer.heard(wire.ChunksDone)[-1].tokens.tolist())
        assert tokens[1] == tokens[3]
        assert tokens[0] != tokens[1] != tokens[2] != tokens[0]


async def test_a_chunk_that_is_dropped_while_it_waits_is_forgotten():
    async with engine() as (buffer, server, *_):
        await buffer.run(0, images=PLACED)
        await buffer.run(1, images=PLACED)
        await asyncio.sleep(0.1)
        await buffer.send(wire.DropChunk(request_id="r/p#0", attempt=1))
        await buffer.give(ONE, LARGE)
        await eventually(lambda: len(buffer.results()) == 1)
        assert set(buffer.results()) == {("1", 1)}
        assert not server.running
        assert not server._held
        assert not server._images._users


async def test_a_chunk_whose_images_do_not_come_fails_and_may_be_tried_again():
    async with engine() as (buffer, server, *_):
        await buffer.run(0, images=PLACED)
        await asyncio.sleep(wire.IMAGE_STALL_SECONDS + 3)
        (failed,) = buffer.heard(wire.ChunkFailed)
        assert (failed.request_id, failed.fatal) == ("r/p#0", False)
        assert failed.message.startswith("images: ")
        assert not server.running
        buffer.answered = len(buffer.heard(wire.ReadImage))
        await buffer.run(0, attempt=2, images=PLACED)
        await asyncio.sleep(0.1)
        await buffer.give(ONE, LARGE)
        await eventually(lambda: ("0", 2) in buffer.results())


async def test_images_outside_of_the_tokens_are_refused_by_name():
    async with engine() as (buffer, *_):
        await buffer.run(0, images=[Placed(ONE.name, 2, 2)])
        await eventually(lambda: buffer.heard(wire.ChunkFailed))
        (failed,) = buffer.heard(wire.ChunkFailed)
        assert failed.fatal
        assert failed.message.startswith("images[0].length")


async def test_a_buffer_that_comes_back_finds_nothing_waiting():
    async with engine() as (buffer, server, *_):
        await buffer.run(0, images=PLACED)
        await asyncio.sleep(0.1)
        server._rejoin()
        assert not server.running
        assert not server._held
        buffer.answered = len(buffer.heard(wire.ReadImage))
        await buffer.run(0, images=PLACED)
        await asyncio.sleep(0.1)
        await buffer.give(ONE, LARGE)
        await eventually(lambda: len(buffer.results()) == 1)
