"""Between engines and the dgds: tokens as they are generated, and tokens of other engines to draft from.

Token ids are packed here, 3 bytes each, little-endian, in a `Bytes` array (`services/dgds/packing.py`), and
groups are named by a 63-bit digest of their id: an entry takes 20 bytes, however long the id.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from seer.common.wire.base import MAX_GROUP_SIZE, Bytes, Goodbye, Hello, Message, Refused, Welcome
from seer.common.wire.figures import ServiceStatus, StatusRequest

TOKEN_BYTES = 3
"""Bytes of one packed token id: vocabularies end below 2^24."""

Digest = Annotated[int, msgspec.Meta(ge=0)]
"""A 63-bit digest. Two ids with the same digest would share drafts, which never changes a token."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
"""A number of tokens of one response; the bound is that of `SamplingParams.max_tokens`."""

ResponseIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUP_SIZE)]

StreamIndex = Annotated[int, msgspec.Meta(ge=0, lt=2 * MAX_GROUP_SIZE)]
"""A response of the group, or from `MAX_GROUP_SIZE` on one of an earlier group of the same prompt."""

Revision = Annotated[int, msgspec.Meta(ge=0)]
"""Number of a stream's last truncation, as the dgds counts them."""


class GroupEntry(msgspec.Struct, array_like=True):
    """A group to keep; `prompt` is the digest of its prompt's tokens, 0 if unknown."""

    group: Digest
    prompt: Digest = 0


class RegisterGroups(Message, tag=True):
    """Keep these groups for `ttl_seconds` after they were last touched; 0: the dgds's default."""

    groups: Annotated[list[GroupEntry], msgspec.Meta(max_length=2**14)]
    ttl_seconds: float = 0.0


MAX_APPENDS = 2**15
"""Most entries of an `AppendBatch`: each costs the dgds about two microseconds, however short it is."""


class Append(msgspec.Struct, array_like=True, gc=False):
    """One request's new tokens in an `AppendBatch` (positional, since sent often).

    `previous` is the number of tokens between the prompt and them: by it the dgds recognises an append that
    is sent again, or a gap, which it asks for.
    """

    group: Digest
    index: ResponseIndex
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    previous: Count
    count: Count


class AppendBatch(Message, tag=True):
    """One engine flush: the new tokens of all its requests, packed one after the other."""

    appends: Annotated[list[Append], msgspec.Meta(max_length=MAX_APPENDS)]
    tokens: Bytes


class Gap(msgspec.Struct, array_like=True):
    """The dgds has only the first `have` tokens of this request: send again from there."""

    group: Digest
    index: ResponseIndex
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    have: Count


class AppendGaps(Message, tag=True):
    """Answer to an `AppendBatch` with gaps; the rest of it was applied."""

    gaps: list[Gap]


class FetchGroup(msgspec.Struct, array_like=True):
    """What a draft client already has of one group: stream index -> (revision, tokens).

    Responses in `exclude` are not sent: the client generates them itself.
    """

    group: Digest
    have: Annotated[dict[StreamIndex, tuple[Revision, Count]], msgspec.Meta(max_length=2 * MAX_GROUP_SIZE)]
    exclude: Annotated[list[ResponseIndex], msgspec.Meta(max_length=MAX_GROUP_SIZE)] = []


class Fetch(Message, tag=True):
    """Ask for what is new in these groups. The answer repeats `call_id`."""

    groups: Annotated[list[FetchGroup], msgspec.Meta(max_length=2**14)]
    call_id: int = 0


class Delta(msgspec.Struct, array_like=True):
    """Truncate a stream to `previous` tokens, then append `count`; it is then at `revision`."""

    group: Digest
    index: StreamIndex
    revision: Revision
    previous: Count
    count: Count


class Deltas(Message, tag=True):
    """Answer to `Fetch`: all that the client does not have yet, tokens packed one after the other.

    It covers the first `done` groups of the `Fetch`, and perhaps a part of the next: fetch the rest again.
    The dgds does not know the groups in `missing`.
    """

    deltas: list[Delta]
    tokens: Bytes
    missing: list[Digest] = []
    call_id: int = 0
    done: int = 0


class MessageRejected(Message, tag=True):
    """A message to the dgds was invalid, for this reason; nothing of it was applied."""

    problem: str


EngineToDgds = Hello | RegisterGroups | AppendBatch | Fetch | Goodbye | StatusRequest
DgdsToEngine = Welcome | Refused | AppendGaps | Deltas | MessageRejected | ServiceStatus
