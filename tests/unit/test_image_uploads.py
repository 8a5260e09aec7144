"""Images that a client submits: checked at once, sent once, resumed, and lost by name."""

import asyncio
import contextlib

import numpy as np
import pytest
from prepared_images import placed, prepared
from virtual_time import VIRTUAL, eventually

from seer.client import Placed, Prompt, prepared_image
from seer.client.image_uploads import ASK_SECONDS, ImageUploads
from seer.client.prompts import prepare
from seer.common.errors import InvalidField
from seer.common.types import MAX_IMAGES
from seer.common.wire import IMAGE_PART_BYTES, IMAGES_AT_ONCE, ImageData, ImageState, OpenImage

pytestmark = VIRTUAL

LARGE = prepared(0, IMAGE_PART_BYTES // 2)  # 4 MiB and a header: three parts
GRID, PIXELS = np.array([[1, 2, 2]]), np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("modality", "tensors", "says"),
    [
        ("video", {"pixel_values_videos": PIXELS}, "modality = 'video': give images"),
        ("audio", {"input_features": PIXELS}, "modality = 'audio': give images"),
        ("image", {"image_embeds": PIXELS, "image_grid_thw": GRID}, "neither URLs nor embeddings"),
        ("image", {"url": "https://example.org/a.png"}, "neither URLs nor embeddings"),
        ("image", {"pixel_values": PIXELS}, "give image_grid_thw and pixel_values"),
        ("image", {"pixel_values": PIXELS, "image_grid_thw": GRID, "min_pixels": 4}, "give image_grid_thw"),
        (
            "image",
            {"pixel_values": PIXELS.astype(np.float64), "image_grid_thw": GRID},
            "pixel_values = 'float64'",
        ),
    ],
)
def test_what_is_no_image_is_refused_by_name(modality, tensors, says):
    with pytest.raises(InvalidField, match=says):
        prepared_image(modality, **tensors)


@pytest.mark.parametrize(
    ("images", "field"),
    [
        ([placed(1, 5)], "prompts[0].images[0].offset"),
        ([placed(1, 4, 2)], "prompts[0].images[0].length"),
        ([placed(1, -1)], "prompts[0].images[0].offset"),
        ([placed(1, 2), placed(2, 1)], "prompts[0].images[1].offset"),
        ([placed(1, 1, 0)], "prompts[0].images[0].length"),
        ([prepared(1)], "prompts[0].images[0]"),
        ([Placed("https://example.org/a.png", 0, 1)], "prompts[0].images[0]"),
        ([placed(1, place) for place in range(5)] * 13, "prompts[0].images"),
    ],
)
def test_images_that_cannot_stand_in_a_prompt_are_refused_by_field(images, field):
    assert len(images) <= 5 or len(images) > MAX_IMAGES
    with pytest.raises(InvalidField) as refused:
        prepare([Prompt("p", token_ids=[1, 2, 3, 4, 5], images=images)], None)
    assert refused.value.field == field


def test_images_in_text_are_refused():
    with pytest.raises(InvalidField, match=r"prompts\[0\]\.images = 1: give token_ids with placeholders"):
        prepare([Prompt("p", text="what is <image>?", images=[placed(1, 0)])], None)


class Buffer:
    """What a buffer has of images: answers each message, unless it is told to lose it."""

    def __init__(self):
        self.have, self.said, self.problems = {}, [], {}
        self.losing, self.restarts = set(), set()  # numbers of messages
        self.most = self.busy = 0
        self.lost = []
        self.uploads = ImageUploads(self.note)

    async def note(self, name, why):
        self.lost.append((name, why))

    async def send(self, message):
        self.said.append(message)
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0.001)
        self.busy -= 1
        if len(self.said) in self.restarts:
            self.have.clear()
        if len(self.said) in self.losing:
            return
        data = self.have.setdefault(message.name, bytearray())
        if isinstance(message, ImageData) and message.offset == len(data):
            assert len(message.data) <= IMAGE_PART_BYTES
            data += message.data.tobytes()
        problem = self.problems.get(message.name, "")
        self.uploads.answer(ImageState(name=message.name, have=len(data), problem=problem))

    def parts(self, name):
        return [each.offset for each in self.said if isinstance(each, ImageData) and each.name == name]


@contextlib.asynccontextmanager
async def uploading():
    buffer = Buffer()
    task = asyncio.create_task(buffer.uploads.run(buffer.send))
    yield buffer
    task.cancel()
    await asyncio.wait([task])


def whole(buffer, *images):
    return all(bytes(buffer.have.get(each.name, b"")) == each.data.tobytes() for each in images)


async def test_an_image_is_sent_once_in_order_however_often_it_is_shown():
    async with uploading() as buffer:
        for _ in range(3):
            buffer.uploads.add([Placed(LARGE, 0, 1), placed(1, 1), Placed(LARGE, 2, 1)])
        await eventually(lambda: whole(buffer, LARGE, prepared(1)))
        await asyncio.sleep(3 * ASK_SECONDS)
        questions = [each.name for each in buffer.said if isinstance(each, OpenImage)]
        assert sorted(questions) == sorted([LARGE.name, prepared(1).name]), (
            "no worker waits for another's answer"
        )
        assert buffer.parts(LARGE.name) == [0, IMAGE_PART_BYTES, 2 * IMAGE_PART_BYTES]
        assert buffer.parts(prepared(1).name) == [0]


async def test_an_image_that_the_buffer_has_is_not_sent():
    async with uploading() as buffer:
        buffer.have[LARGE.name] = bytearray(LARGE.data.tobytes())
        buffer.uploads.add([Placed(LARGE, 0, 1)])
        await asyncio.sleep(1)
        assert [type(each) for each in buffer.said] == [OpenImage]


async def test_an_image_that_is_dropped_as_the_buffer_says_it_has_it_is_sent_to_later_prompts():
    async with uploading() as buffer:
        buffer.have[LARGE.name] = bytearray(LARGE.data.tobytes())
        buffer.uploads.add([Placed(LARGE, 0, 1)])
        await asyncio.sleep(0.0005)
        assert buffer.busy
        buffer.uploads.add([Placed(LARGE, 0, 1)])  # the answer under way is older than these prompts
        await asyncio.sleep(0.0006)
        del buffer.have[LARGE.name]
        await eventually(lambda: whole(buffer, LARGE))
        await asyncio.sleep(1)
        assert buffer.parts(LARGE.name) == [0, IMAGE_PART_BYTES, 2 * IMAGE_PART_BYTES]
        assert not buffer.uploads._pending
        assert not buffer.uploads._again


async def test_an_image_goes_on_from_where_the_buffer_says_after_a_loss():
    async with uploading() as buffer:
        buffer.have[LARGE.name] = bytearray(LARGE.data[:1000].tobytes())
        buffer.uploads.add([Placed(LARGE, 0, 1)])
        buffer.losing, buffer.restarts = {3, 4}, {6}
        await asyncio.sleep(4 * ASK_SECONDS)
        assert whole(buffer, LARGE)
        second = 1000 + IMAGE_PART_BYTES
        assert buffer.parts(LARGE.name)[:3] == [1000, second, second], "one of them was lost"
        assert buffer.parts(LARGE.name)[3:] == [0, IMAGE_PART_BYTES, 2 * IMAGE_PART_BYTES]


async def test_an_image_that_is_not_taken_is_reported_and_the_next_ones_are_sent():
    async with uploading() as buffer:
        buffer.problems[prepared(1).name] = "no room"
        buffer.uploads.add([placed(1, 0), placed(2, 1)])
        await eventually(lambda: whole(buffer, prepared(2)))
        assert buffer.lost == [(prepared(1).name, "no room")]
        buffer.problems.clear()
        buffer.uploads.add([placed(1, 0)])
        await eventually(lambda: whole(buffer, prepared(1)))


async def test_few_are_on_their_way_at_once():
    async with uploading() as buffer:
        many = [placed(seed, 0) for seed in range(50)]
        buffer.uploads.add(many)
        await eventually(lambda: whole(buffer, *(each.image for each in many)))
        assert buffer.most == IMAGES_AT_ONCE


async def test_answers_that_nobody_waits_for_change_nothing():
    async with uploading() as buffer:
        buffer.uploads.answer(ImageState(name="x", have=3, problem="late"))
        assert not buffer.lost
