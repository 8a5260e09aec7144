"""Which groups this engine drafts for, and which of their responses it must fetch from the dgds.

Invariants (tests/unit/test_draft_groups.py asserts them):
- groups with chunks here are fetched; an idle group, without any, is kept, since its chunks may come back,
  until idle groups hold more than `max_idle_tokens`: then the one that ran longest ago is evicted;
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
    """Must be told of every chunk that starts and ends, and of tokens; `now` is monotonic seconds."""

    def __init__(self, max_idle_tokens: int = MAX_IDLE_TOKENS) -> None:
        self._groups: dict[str, _Group] = {}  # in the order in which they ran last
        self._max_idle_tokens = max_idle_tokens

    def chunk_started(self, group_id: str, index: int) -> None:
        """Note that a chunk of a response starts here."""
        group = self._groups.pop(group_id, None) or _Group()
        self._groups[group_id] = group
        group.running.add(index)
        group.left_at.pop(index, None)

    def chunk_ended(self, group_id: str, index: int, finished: bool, now: float) -> None:
        """Note that a chunk ended or was dropped; `finished`: its response, too."""
        group = self._groups.get(group_id)
        if group is None or index not in group.running:
            return
        group.running.discard(index)
        if finished:
            group.finished.add(index)
        else:
            group.left_at[index] = now

    def add_tokens(self, group_id: str, tokens: int) -> None:
        """Count tokens of a group, generated here or fetched."""
        if (group := self._groups.get(group_id)) is not None:
            group.tokens += tokens

    def to_fetch(self, now: float) -> dict[str, set[int]]:
        """Return the groups with chunks here, and for each the responses that need not be fetched."""
        wanted = {}
        for group_id, group in self._groups.items():
            if group.running:
                near = {index for index, since in group.left_at.items() if now - since < RETURN_SECONDS}
                wanted[group_id] = group.running | group.finished | near
        return wanted

    def evict(self) -> list[str]:
        """Forget idle groups while they hold too many tokens; return them, for others to forget, too."""
        idle = {group_id: group.tokens for group_id, group in self._groups.items() if not group.running}
        gone, held = [], sum(idle.values())
        for group_id, tokens in idle.items():
            if held <= self._max_idle_tokens:
                break
            held -= tokens
            gone.append(group_id)
            del self._groups[group_id]
        return gone

    def clear(self) -> list[str]:
        """Forget all; return the groups that were known."""
        gone, self._groups = list(self._groups), {}
        return gone
