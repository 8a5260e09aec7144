"""Images in prompts: what a trainer gives, checked before anything is sent, and how they come to the buffer.

Invariants (tests/unit/test_image_uploads.py):
- an image is sent once, however many prompts and rollouts show it at a time, and not at all if the buffer has
  it; after a loss the upload goes on from where the buffer says. The buffer is asked after each submission:
  it may have dropped an image that it had before;
- an image that the buffer does not take fails the prompts that show it, by name, and nothing else;
- at most `IMAGES_AT_ONCE` are on their way, a part of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seer.client.calls import Calls
from seer.common import types
from seer.common.errors import InvalidField
from seer.common.image_models import TENSORS
from seer.common.prepared_image import PreparedImage, make
from seer.common.types import check_placed
from seer.common.wire import IMAGE_PART_BYTES, IMAGES_AT_ONCE, ImageData, ImageState, OpenImage, Tokens

ASK_SECONDS = 5.0
"""Silence after which the buffer is asked again how much of an image it has."""

Send = Callable[[OpenImage | ImageData], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Placed:
    """An image in a prompt: it stands for `length` tokens, the model's placeholder, from `offset` on."""

    image: PreparedImage
    offset: int
    length: int

    @property
    def on_wire(self) -> types.Placed:
        """Its name and place, as messages have them."""
        return types.Placed(self.image.name, self.offset, self.length)


def prepared_image(modality: str, **tensors: Any) -> PreparedImage:  # noqa: ANN401 - numpy arrays or torch tensors
    """Return an image, to be placed in any prompts: `prepared_image("image", pixel_values=..., ...)`.

    Of one image, what the model's Hugging Face processor returns: `pixel_values`, float32 [patches, numbers
    per patch], and `image_grid_thw`, int64 [1, 3]. They are copied. Raises `InvalidField` for all else.
    """
    if modality != "image":
        raise InvalidField("modality", modality, "give images: nothing else can be run")
    if set(tensors) != set(TENSORS):
        fix = f"give {' and '.join(TENSORS)} of one image; neither URLs nor embeddings can be run"
        raise InvalidField("image", sorted(tensors), fix)
    return make(modality, tensors)


def check_images(images: Sequence[Placed], tokens: int, field: str = "images") -> tuple[Placed, ...]:
    """Return images that may stand in a prompt of so many tokens. Raises `InvalidField`."""
    for place, each in enumerate(images):
        if not isinstance(each, Placed) or not isinstance(each.image, PreparedImage):
            fix = "give Placed(prepared_image(...), offset, length); seer.client.images.prepare makes them"
            raise InvalidField(f"{field}[{place}]", type(each).__name__, fix)
    check_placed([each.on_wire for each in images], tokens, field)
    return tuple(images)


def placeholders(tokens: Tokens, images: Iterable[Placed]) -> frozenset[int]:
    """Return the token ids that images in these tokens stand in place of."""
    return frozenset(int(tokens[each.offset]) for each in images)


def check_shown(tokens: Tokens, images: Iterable[Placed], known: frozenset[int]) -> None:
    """Raise `InvalidField` for placeholders, known ones, that no image in these tokens stands for.

    Engines would read them as text there: what is not in a prompt, the model may have sampled.
    """
    bare = np.isin(tokens, list(known))
    for each in images:
        bare[each.offset : each.offset + each.length] = False
    if left := int(bare.sum()):
        fix = "no images stand for them: give all images that the tokens have places for"
        raise InvalidField("tokens", f"{left} placeholders of images", fix)


class ImageUploads:
    """Sends images to the buffer. `lost(name, why)` is called for one that the buffer does not take."""

    def __init__(self, lost: Callable[[str, str], Awaitable[None]]) -> None:
        self._lost = lost
        # Bounded by the images of prompts that are under way.
        self._queue: asyncio.Queue[PreparedImage] = asyncio.Queue()
        self._pending: set[str] = set()  # queued, or on their way
        self._again: set[str] = set()  # pending images of prompts that were submitted since
        self._answers: Calls[ImageState] = Calls()

    def add(self, images: Iterable[Placed]) -> None:
        """Send what the buffer lacks of these images: the buffer knows by now which prompts show them."""
        for name, one in {each.image.name: each.image for each in images}.items():
            if name not in self._pending:
                self._pending.add(name)
                self._queue.put_nowait(one)
            else:  # what the buffer says of it may be older than these prompts, and no longer hold
                self._again.add(name)

    def answer(self, state: ImageState) -> None:
        """Take the buffer's answer; one that nobody waits for changes nothing."""
        self._answers.answer(state.name, state)

    async def run(self, send: Send) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(IMAGES_AT_ONCE):
                tasks.create_task(self._work(send))

    async def _work(self, send: Send) -> None:
        while True:
            one = await self._queue.get()
            problem, asked = "", False
            while not problem and (not asked or one.name in self._again):
                self._again.discard(one.name)
                problem, asked = await self._upload(one, send), True
            self._pending.discard(one.name)
            self._again.discard(one.name)
            if problem:
                await self._lost(one.name, problem)

    async def _upload(self, one: PreparedImage, send: Send) -> str:
        """Send one image; return why the buffer does not take it."""
        begin = OpenImage(name=one.name, size=one.size)
        message: OpenImage | ImageData = begin
        while True:
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    state = await self._answers.ask(one.name, send(message))
            except TimeoutError:  # the question or its answer was lost
                message = begin
                continue
            if state.problem or state.have >= one.size:
                return state.problem
            part = one.data[state.have : state.have + IMAGE_PART_BYTES]
            message = ImageData(name=one.name, size=one.size, offset=state.have, data=part)
