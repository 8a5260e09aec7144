"""What the buffer tells of its groups: its machine returns these, the context service's machine takes them.

`common/wire/events.py` has the messages in which they travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tagged arrays, as all that a buffer's machines answer."""


class GroupOpened(_Event, frozen=True):
    """A group of `size` requests was accepted; no response is longer than `cap` tokens.

    They are `first` to `first + size - 1` of the group `shared_id`, which may have more, if it is named.
    """

    group_id: str
    size: int
    prompt_len: int
    cap: int
    shared_id: str = ""
    first: int = 0


class RequestProgress(_Event, frozen=True):
    """Response `index` has `generated` tokens, and gets no more if `finished`.

    `drafted` tokens were verified since the last one, and `accepted` of them accepted, both by cell
    (`common/policy/draft_costs.py`).
    """

    group_id: str
    index: int
    generated: int
    finished: bool
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()


class GroupClosed(_Event, frozen=True):
    """A group left the buffer: finished, failed or cancelled. It needs no estimate any more."""

    group_id: str


GroupEvent = GroupOpened | RequestProgress | GroupClosed
