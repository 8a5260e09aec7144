"""Responses of earlier groups, by prompt: what the prompt's next group drafts from at first.

Invariants (tests/unit/test_dgds_memory.py and tests/property/test_dgds_store.py assert them):
- the tokens held, plus an overhead per prompt and stream, never exceed `max_tokens`: the least recently used
  prompts are dropped first, and a group that alone is too large is not taken;
- each prompt has the streams of its latest group, and behind them, if these have less than half of its
  tokens, as where the group was cut short, those of the last group that had more; equal streams keep their
  revision.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seer.common.wire import MAX_GROUP_SIZE, TOKEN_BYTES

OVERHEAD_TOKENS = 160
"""Counted for each group, stream and prompt besides its tokens: about 500 bytes of objects, at 3 a token."""


@dataclass(frozen=True, slots=True)
class PastGroup:
    """One prompt's streams, packed; `revision` as in `store.Delta`.

    `whole`: those of its last group that was not cut short.
    """

    revision: int
    streams: tuple[bytes, ...]
    whole: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Tokens that it counts as, overhead included."""
        held = sum(len(stream) // TOKEN_BYTES + OVERHEAD_TOKENS for stream in self.streams)
        return held + OVERHEAD_TOKENS


class PastGroups:
    """See the module's docstring. `changes` counts the groups taken; `counters` are totals."""

    def __init__(self, max_tokens: int) -> None:
        self.counters: Counter[str] = Counter()
        self.held = 0
        self.changes = 0
        self._max_tokens = max_tokens
        self._prompts: OrderedDict[int, PastGroup] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, prompt: int) -> PastGroup | None:
        """Return the streams of a prompt's latest group, and count it as used."""
        found = self._prompts.get(prompt)
        if found is not None:
            self._prompts.move_to_end(prompt)
        return found

    def put(self, prompt: int, streams: Sequence[bytes], revision: int) -> None:
        """Keep a group's streams for its prompt, in place of an earlier group's, or in front of these."""
        old, whole = self._prompts.get(prompt), tuple(streams)
        earlier: tuple[bytes, ...] = ()
        if old is not None and 2 * sum(map(len, whole)) < sum(map(len, old.whole)):
            earlier = whole = old.whole[: MAX_GROUP_SIZE - len(streams)]
        new = PastGroup(revision, (*streams, *earlier), whole)
        if not streams or (old is not None and old.streams == new.streams):
            return
        if new.size > self._max_tokens:
            self.counters["too_large"] += 1
            return
        self.changes += 1
        self._drop(prompt)
        self._prompts[prompt] = new
        self.held += new.size
        while self.held > self._max_tokens:
            self._drop(next(iter(self._prompts)))
            self.counters["forgotten"] += 1

    def items(self) -> Iterator[tuple[int, tuple[bytes, ...]]]:
        """Yield prompts and their streams, least recently used first."""
        for prompt, remembered in self._prompts.items():
            yield prompt, remembered.streams

    def _drop(self, prompt: int) -> None:
        old = self._prompts.pop(prompt, None)
        if old is not None:
            self.held -= old.size
