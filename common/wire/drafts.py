"""Between engines and the dgds: tokens as they come, and what to draft from.

Token ids are packed here, 3 bytes each, little-endian, in a `Bytes` array (`services/dgds/packing.py`),
and groups are named by the 63-bit digest of their id: a hot header of 20 bytes, whatever the id.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from seer.common.wire.base import MAX_GROUP_SIZE, Bytes, Goodbye, Hello, Message, Refused, Welcome

TOKEN_BYTES = 3
"""Bytes of one packed token id: vocabularies end below 2^24."""

Digest = Annotated[int, msgspec.Meta(ge=0)]
"""A 63-bit digest. Two ids with one digest would share drafts, never tokens of an answer."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
"""A number of tokens of one response; the bound is that of `SamplingParams.max_tokens`."""

ResponseIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUP_SIZE)]

StreamIndex = Annotated[int, msgspec.Meta(ge=0, lt=2 * MAX_GROUP_SIZE)]
"""A response of the group, or from `MAX_GROUP_SIZE` on one of an earlier group of the same prompt."""

Revision = Annotated[int, msgspec.Meta(ge=0)]
"""The number of a stream's last cut; the dgds numbers them itself."""


class GroupEntry(msgspec.Struct, array_like=True):
    """A group to keep; `prompt` is the digest of its prompt's tokens, 0 if unknown."""

    group: Digest
    prompt: Digest = 0


class RegisterGroups(Message, tag=True):
    """Keep these groups for `ttl_seconds` after they were last touched; 0: the dgds's default."""

    groups: list[GroupEntry]
    ttl_seconds: float = 0.0


class Append(msgspec.Struct, array_like=True, gc=False):
    """One request's new tokens in an `AppendBatch` (positional: hot).

    `previous` is the number of output tokens that precede them: a re-sent append is recognised
    by it, a gap is asked for again.
    """

    group: Digest
    index: ResponseIndex
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    previous: Count
    count: Count


class AppendBatch(Message, tag=True):
    """One engine flush: the new tokens of all its requests, packed one after the other."""

    appends: list[Append]
    tokens: Bytes


class Gap(msgspec.Struct, array_like=True):
    """The dgds holds only `have` tokens of this request: send again from there."""

    group: Digest
    index: ResponseIndex
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    have: Count


class AppendGaps(Message, tag=True):
    """Answer to an `AppendBatch` that left gaps; the rest of it was taken."""

    gaps: list[Gap]


class FetchGroup(msgspec.Struct, array_like=True):
    """What a draft client already holds of one group: stream index -> (revision, tokens).

    Responses in `leave_out` are not sent: the asker generates them itself.
    """

    group: Digest
    have: dict[StreamIndex, tuple[Revision, Count]]
    leave_out: list[ResponseIndex] = []


class Fetch(Message, tag=True):
    """Ask for what is new in these groups. `question` tells an answer from that to an earlier one."""

    groups: list[FetchGroup]
    question: int = 0


class Delta(msgspec.Struct, array_like=True):
    """Cut a stream to `previous` tokens, then append `count`; it is then at `revision`."""

    group: Digest
    index: StreamIndex
    revision: Revision
    previous: Count
    count: Count


class Deltas(Message, tag=True):
    """Answer to `Fetch`: what brings the asker up to date, its tokens packed one after the other.

    It covers the first `done` groups asked for, and perhaps a part of the next: ask again for the
    rest. `missing` groups are unknown.
    """

    deltas: list[Delta]
    tokens: Bytes
    missing: list[Digest] = []
    question: int = 0
    done: int = 0


class NotTaken(Message, tag=True):
    """A message to the dgds made no sense, for this reason; nothing of it was applied."""

    problem: str


EngineToDgds = Hello | RegisterGroups | AppendBatch | Fetch | Goodbye
DgdsToEngine = Welcome | Refused | AppendGaps | Deltas | NotTaken
