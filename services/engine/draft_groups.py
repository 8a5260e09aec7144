"""Which groups this engine drafts for, and which of their responses it must fetch from the dgds.

Invariants (tests/unit/test_draft_groups.py asserts them):
- groups with chunks here are fetched; an idle group, without any, is kept, since its chunks may come back,
  until idle groups hold more than `max_idle_tokens`: then the one that is idle for longest is evicted;
- a response is not fetched while it runs here, after it finished here, nor for `RETURN_SECONDS` after a chunk
  of it ended here: its tokens are known. One that runs elsewhere for longer is fetched from its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_IDLE_TOKENS = 8_000_000
"""Most tokens of idle groups: 140 MB of trees."""

RETURN_SECONDS = 2.0
"""A response whose next chunk did not start here within this time runs elsewhere."""


@dataclass(slots=True)
class _Group:
    tokens: int = 0
    running: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    left_at: dict[int, float] = field(default_factory=dict)


class DraftGroups:
    """Must be told of every chunk that starts and ends, and of tokens; `now` is monotonic seconds.

    What is asked often takes no time for idle groups: of short responses there are tens of thousands.
    """

    def __init__(self, max_idle_tokens: int = MAX_IDLE_TOKENS) -> None:
        self._running: dict[str, _Group] = {}
        self._idle: dict[str, _Group] = {}  # those that are idle for longest first
        self._idle_tokens = 0
        self._max_idle_tokens = max_idle_tokens

    def chunk_started(self, group_id: str, index: int) -> None:
        """Note that a chunk of a response starts here."""
        group = self._running.get(group_id)
        if group is None:
            self._running[group_id] = group = self._idle.pop(group_id, None) or _Group()
            self._idle_tokens -= group.tokens
        group.running.add(index)
        group.finished.discard(index)  # another response may come to the same place
        group.left_at.pop(index, None)

    def chunk_ended(self, group_id: str, index: int, finished: bool, now: float) -> None:
        """Note that a chunk ended or was dropped; `finished`: its response, too."""
        group = self._running.get(group_id)
        if group is None or index not in group.running:
            return
        group.running.discard(index)
        if finished:
            group.finished.add(index)
        else:
            group.left_at[index] = now
        if not group.running:
            self._idle[group_id] = self._running.pop(group_id)
            self._idle_tokens += group.tokens

    def add_tokens(self, group_id: str, tokens: int) -> None:
        """Count tokens of a group, generated here or fetched."""
        if (group := self._running.get(group_id)) is not None:
            group.tokens += tokens
        elif (group := self._idle.get(group_id)) is not None:
            group.tokens += tokens
            self._idle_tokens += tokens

    def to_fetch(self, now: float) -> dict[str, set[int]]:
        """Return the groups with chunks here, and for each the responses that need not be fetched."""
        return {
            group_id: group.running
            | group.finished
            | {index for index, since in group.left_at.items() if now - since < RETURN_SECONDS}
            for group_id, group in self._running.items()
        }

    def evict(self) -> list[str]:
        """Forget idle groups while they hold too many tokens; return them, for others to forget, too."""
        gone = []
        while self._idle_tokens > self._max_idle_tokens:
            group_id = next(iter(self._idle))
            self._idle_tokens -= self._idle.pop(group_id).tokens
            gone.append(group_id)
        return gone

    def clear(self) -> list[str]:
        """Forget all; return the groups that were known."""
        gone = [*self._running, *self._idle]
        self._running, self._idle, self._idle_tokens = {}, {}, 0
        return gone
