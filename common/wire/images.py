"""Images on their way: from a trainer to the buffer, and from there to each engine that needs them.

An image travels once on each of these ways, in parts, one at a time: the next part is sent, or asked for,
when the one before it is answered. Its name is checked against all of its bytes wherever it arrives
(`common/prepared_image.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from seer.common.types import MAX_IMAGE_BYTES
from seer.common.wire.base import Bytes, Message, ShortStr

IMAGE_PART_BYTES = 2**21
"""Data of one `ImageData`, the last one of an image apart: small enough not to delay other messages."""

IMAGE_STALL_SECONDS = 30.0
"""Who waits for images gives up when nothing of them has come for this long."""

IMAGES_AT_ONCE = 8
"""Most images that a peer sends or asks for at once."""

ImageSize = Annotated[int, msgspec.Meta(ge=0, le=MAX_IMAGE_BYTES)]
"""Bytes."""


class OpenImage(Message, tag=True):
    """Ask how much of an image of `size` bytes is there, and begin it if it is not. Answer: `ImageState`."""

    name: ShortStr
    size: ImageSize


class ImageState(Message, tag=True):
    """The buffer has the first `have` bytes of an image: send it from there on. All: send nothing.

    With a `problem` it takes no more of the image, or has it no longer.
    """

    name: ShortStr
    have: ImageSize
    problem: str = ""


class ImageData(Message, tag=True):
    """Bytes of an image of `size` bytes, from `offset` on. The buffer answers with `ImageState`."""

    name: ShortStr
    size: ImageSize
    offset: ImageSize
    data: Bytes


class ReadImage(Message, tag=True):
    """Ask for the part of an image that begins at `offset`. Answer: `ImageData`, or an `ImageState`."""

    name: ShortStr
    offset: ImageSize
