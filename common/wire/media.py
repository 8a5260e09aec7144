"""Media on their way: from a trainer to the buffer, and from there to each engine that needs them.

A medium travels once on each of these ways, in parts, one at a time: the next part is sent, or asked for,
when the one before it is answered. Its name is checked against all of its bytes wherever it arrives
(`common/media.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from seer.common.types import MAX_MEDIUM_BYTES
from seer.common.wire.base import Bytes, Message, ShortStr

MEDIUM_PART_BYTES = 2**21
"""Data of one `MediumData`, the last one of a medium apart: small enough not to delay other messages."""

MEDIUM_STALL_SECONDS = 30.0
"""Who waits for media gives up when nothing of them has come for this long."""

MEDIA_AT_ONCE = 8
"""Most media that a peer sends or asks for at once."""

MediumSize = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEDIUM_BYTES)]
"""Bytes."""


class OpenMedium(Message, tag=True):
    """Ask how much of a medium of `size` bytes is there, and begin it if it is not. Answer: `MediumState`."""

    name: ShortStr
    size: MediumSize


class MediumState(Message, tag=True):
    """The buffer has the first `have` bytes of a medium: send it from there on. All: send nothing.

    With a `problem` it takes no more of the medium, or has it no longer.
    """

    name: ShortStr
    have: MediumSize
    problem: str = ""


class MediumData(Message, tag=True):
    """Bytes of a medium of `size` bytes, from `offset` on. The buffer answers with `MediumState`."""

    name: ShortStr
    size: MediumSize
    offset: MediumSize
    data: Bytes


class ReadMedium(Message, tag=True):
    """Ask for the part of a medium that begins at `offset`. Answer: `MediumData`, or a `MediumState`."""

    name: ShortStr
    offset: MediumSize
