"""Between the buffer and the context service: progress of groups one way, length estimates the other.

Both publish, each message after a `Sequenced`, and send their whole state to a subscriber that requests it.
"""

from __future__ import annotations

from seer.common.wire.base import Counts, Hello, Message, Percent, Refused, ResponseIndex, ShortStr, Welcome
from seer.common.wire.figures import ServiceStatus, StatusRequest


class GroupOpened(Message, tag=True):
    """A group was accepted. `cap` is `max_tokens`: the estimate until there is a better one.

    Its responses are those from `first` on of the group `shared_id`; empty: of no other group.
    """

    group_id: ShortStr
    size: int
    prompt_len: int
    cap: int
    shared_id: ShortStr = ""
    first: ResponseIndex = 0


class RequestProgress(Message, tag=True):
    """A request reached `generated` tokens at a chunk boundary, or finished there.

    `drafted` and `accepted` count tokens verified since its last message, by cell; empty in snapshots.
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
    """Estimates that changed: group id -> median output tokens of its responses (`common/policy/length.py`).

    `spreads` are their standard deviations in natural log; 0 where left out. `acceptance` are acceptance
    rates of drafts by cell, of groups whose rates differ from those of all groups.
    """

    estimates: dict[str, float]
    acceptance: dict[str, Percent] = {}
    spreads: dict[str, float] = {}


class Sequenced(Message, tag=True):
    """Header of every PUB message: the publisher's incarnation and a gapless sequence number."""

    incarnation: int
    sequence: int


class SnapshotRequest(Message, tag=True):
    """A subscriber saw a gap (or just joined) and requests the whole state."""


class BufferSnapshot(Message, tag=True):
    """`page` of `pages` of the state after message `sequence`: open groups, their requests' progress."""

    incarnation: int
    sequence: int
    opened: list[GroupOpened]
    progress: list[RequestProgress]
    page: int = 0
    pages: int = 1


class ContextSnapshot(Message, tag=True):
    """`page` of `pages` of the state after message `sequence`: estimates other than the cap, acceptance."""

    incarnation: int
    sequence: int
    estimates: dict[str, float]
    acceptance: dict[str, Percent] = {}
    spreads: dict[str, float] = {}
    page: int = 0
    pages: int = 1


BufferPublished = GroupOpened | RequestProgress | GroupClosed
ContextPublished = Estimates
SnapshotAsked = Hello | SnapshotRequest | StatusRequest
BufferSnapshotReply = Welcome | Refused | BufferSnapshot
ContextSnapshotReply = Welcome | Refused | ContextSnapshot | ServiceStatus
