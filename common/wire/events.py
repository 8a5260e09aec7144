"""Between the buffer and the context service: how far groups are, how long their responses will be.

Both publish, each message after a `Sequenced`, and tell their whole state to a subscriber that asks.
"""

from __future__ import annotations

from seer.common.wire.base import Counts, Hello, Message, Percent, Refused, ShortStr, Welcome


class GroupOpened(Message, tag=True):
    """A group was accepted. `cap` is max_tokens: the estimate until a response finishes."""

    group_id: ShortStr
    size: int
    prompt_len: int
    cap: int


class RequestProgress(Message, tag=True):
    """A request reached `generated` tokens at a chunk boundary, or finished there.

    `drafted` and `accepted` count what was verified since it was last heard of; not in snapshots.
    """

    group_id: ShortStr
    index: int
    generated: int
    finished: bool
    drafted: Counts = []
    accepted: Counts = []


class GroupClosed(Message, tag=True):
    """A group left the buffer: finished, failed or cancelled."""

    group_id: ShortStr


class Estimates(Message, tag=True):
    """What changed: group id -> median output tokens of its responses; `common/policy/length.py` says more.

    `acceptance` likewise says how often its drafts are right; the empty id stands for all groups.
    `spreads` are those of estimates, in natural log; 0 where none is given.
    """

    estimates: dict[str, float]
    acceptance: dict[str, Percent] = {}
    spreads: dict[str, float] = {}


class Sequenced(Message, tag=True):
    """Header of every PUB message: the publisher's life and a gapless sequence number."""

    incarnation: int
    sequence: int


class SnapshotRequest(Message, tag=True):
    """A subscriber saw a gap (or just joined) and asks for the whole state."""


class BufferSnapshot(Message, tag=True):
    """Every open group with its requests' progress, as of `sequence`; `page` of `pages`, each a part."""

    incarnation: int
    sequence: int
    opened: list[GroupOpened]
    progress: list[RequestProgress]
    page: int = 0
    pages: int = 1


class ContextSnapshot(Message, tag=True):
    """All estimates that differ from their cap, as of `sequence`, and all acceptance worth saying.

    `page` of `pages`, each a part.
    """

    incarnation: int
    sequence: int
    estimates: dict[str, float]
    acceptance: dict[str, Percent] = {}
    spreads: dict[str, float] = {}
    page: int = 0
    pages: int = 1


BufferPublished = GroupOpened | RequestProgress | GroupClosed
ContextPublished = Estimates
SnapshotAsked = Hello | SnapshotRequest
BufferSnapshotReply = Welcome | Refused | BufferSnapshot
ContextSnapshotReply = Welcome | Refused | ContextSnapshot
