"""Which groups this engine drafts for, and whose tokens it needs from elsewhere.

Invariants (tests/unit/test_draft_groups.py asserts them):
- a group that runs here is wanted; one that runs here no more is remembered, since chunks come back,
  until idle groups hold more than `max_idle_tokens`: then the one that ran longest ago is forgotten;
- what runs here, ended here for good, or ended a chunk here just now is not asked for: its tokens are
  known. What left for longer is, once, from its beginning on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_IDLE_TOKENS = 8_000_000
"""Tokens known of groups that do not run here: 140 MB of trees."""

RETURN_SECONDS = 2.0
"""A response that went on elsewhere for so long will not be back with its next chunk."""


@dataclass(slots=True)
class _Group:
    tokens: int = 0
    running: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    left: dict[int, float] = field(default_factory=dict)


class DraftGroups:
    """Tell it of every chunk that comes and goes, and of tokens; `now` is monotonic seconds."""

    def __init__(self, max_idle_tokens: int = MAX_IDLE_TOKENS) -> None:
        self._groups: dict[str, _Group] = {}  # in the order in which they ran last
        self._max_idle_tokens = max_idle_tokens

    def began(self, group_id: str, index: int) -> None:
        """Note that a chunk of a response starts here."""
        group = self._groups.pop(group_id, None) or _Group()
        self._groups[group_id] = group
        group.running.add(index)
        group.left.pop(index, None)

    def ended(self, group_id: str, index: int, finished: bool, now: float) -> None:
        """Note that a chunk ended or was dropped; `finished`: its response, too."""
        group = self._groups.get(group_id)
        if group is None or index not in group.running:
            return
        group.running.discard(index)
        if finished:
            group.whole.add(index)
        else:
            group.left[index] = now

    def learnt(self, group_id: str, tokens: int) -> None:
        """Note that so many tokens of a group came, from here or elsewhere."""
        if (group := self._groups.get(group_id)) is not None:
            group.tokens += tokens

    def wanted(self, now: float) -> dict[str, set[int]]:
        """Return the groups that run here, with the responses that need not be asked for."""
        wanted = {}
        for group_id, group in self._groups.items():
            if group.running:
                near = {index for index, since in group.left.items() if now - since < RETURN_SECONDS}
                wanted[group_id] = group.running | group.whole | near
        return wanted

    def forget(self) -> list[str]:
        """Return the groups that are to be forgotten by all: too much is known of idle ones."""
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
