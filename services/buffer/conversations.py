"""Which prompts of a session go on from an earlier one: a table of the contexts that were answered. Pure.

A context is a prompt and its response, as token ids. Only its length and a hash are kept; the hashes of all
beginnings of a prompt are computed at once.

Invariants (tests/unit/test_conversations.py):
- a prompt that begins with the whole context of an earlier prompt of its session goes on from that one; from
  the longest context, if there are several. Whoever submits them: all gateways and their processes have the
  same sessions. The session without a name is one of them;
- a conversation that goes on is under way until its prompt is answered: no other prompt goes on from it;
- a prompt of a session with a name that goes on from no context there, and is no first prompt of the
  session's conversations, has a rewritten history: the prompt begins a segment. If the session has one
  conversation that is not under way, the segment takes that conversation's name;
- at most `most` conversations are known; the one that was used longest ago is forgotten first. A context of
  over `MOST_CONTEXT` tokens is not kept.

No token depends on any of this: a hash that is equal by chance, or a buffer that starts again and knows no
conversation, costs time alone.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from seer.common.types import MAX_CONTEXT, Placed, TurnSpec
from seer.common.wire import Tokens

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.intp]
Kind = Literal["first", "later", "segment"]

MOST = 10_000
"""Conversations that are known; each takes about 50 bytes."""

MOST_CONTEXT = 2**20
"""Tokens of a longest context: the buffer does nothing else for 10 ms while it looks one up."""

_GROWTH = 8192
"""Positions for which factors are drawn at once, at least."""

_COLUMNS: dict[str, npt.DTypeLike] = {
    "length": np.int64,  # 0: free
    "hash": np.uint64,
    "first": np.uint64,
    "session": np.uint64,
    "used": np.int64,
    "under_way": np.bool_,
    "number": np.int64,
    "prompt_len": np.int64,
    "generated": np.int64,
}
"""Each is an array of its own: one is searched for every prompt, of which a message has thousands."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of a conversation. `number` names the conversation, `row` is its place in the table.

    `prompt_len` tokens are the prompt that the conversation, or its segment, began with; `generated` of the
    others came from the model. `length` and `hash` are of this turn's own prompt; `used` is its time.
    """

    kind: Kind
    number: int
    prompt_len: int
    generated: int
    row: int
    used: int
    length: int
    hash: int

    @property
    def name(self) -> str:
        """The name of the conversation."""
        return f"conversation-{self.number}"

    def spec(self, max_tokens: int) -> TurnSpec:
        """Return it as a turn for which no update waits: nobody knows whether another one will come."""
        cap = min(self.generated + max_tokens, MAX_CONTEXT)
        return TurnSpec(self.prompt_len, self.generated, cap, 0.0, self.name)


class Conversations:
    """See the module's docstring. `seed` fixes the hash. `counters` has totals since the start.

    `later_turns` went on from an earlier prompt, `segments` did not, as their history was rewritten.
    """

    def __init__(self, most: int = MOST, seed: int | None = None) -> None:
        self._table = {name: np.zeros(most, kind) for name, kind in _COLUMNS.items()}
        self._random = np.random.default_rng(seed)
        self._factors: Words = np.zeros(0, np.uint64)
        self._clock = 0
        self._numbers = 0
        self._under_way: dict[str, Turn] = {}  # by group
        self.counters = Counter(later_turns=0, segments=0)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._table["length"]))

    def begin(self, group_id: str, prompt: Tokens, session: str) -> Turn:
        """Return what the prompt of a group is a turn of; `answered` or `failed` must follow."""
        name = _session_hash(session)
        beginnings = self._hashes(prompt, 0)
        row = self._goes_on(beginnings, name)
        if row is not None:
            self.counters["later_turns"] += 1
            return self._turn("later", group_id, row, len(prompt), beginnings[-1])
        whole = beginnings[-1]
        known = self._rewritten(name, whole) if session else None
        row = int(np.argmin(self._table["used"])) if known is None or known < 0 else known
        number = int(self._table["number"][row])
        if row != known:
            self._numbers += 1
            number = self._numbers
        self._set(row, (len(prompt), whole, whole, name, 0, True, number, len(prompt), 0))
        self.counters["segments"] += known is not None
        return self._turn("first" if known is None else "segment", group_id, row, len(prompt), whole)

    def answered(self, group_id: str, tokens: Tokens) -> None:
        """Take note of the answer to a turn, if the group is one: later prompts may go on from it."""
        turn = self._under_way.get(group_id)
        if turn is not None and turn.length + len(tokens) > MOST_CONTEXT:
            self.failed(group_id)
            return
        turn = self._ended(group_id)
        if turn is None:
            return
        table, row = self._table, turn.row
        table["length"][row] = turn.length + len(tokens)
        table["hash"][row] = self._hashes(tokens, turn.length, turn.hash)[-1] if len(tokens) else turn.hash
        table["generated"][row] += len(tokens)
        table["under_way"][row] = False

    def failed(self, group_id: str) -> None:
        """Forget a turn that has no answer, if the group is one: the turn may come again."""
        turn = self._ended(group_id)
        if turn is None:
            return
        if turn.kind == "later":
            self._table["under_way"][turn.row] = False
        else:
            self._set(turn.row, (0,) * len(_COLUMNS))

    def _ended(self, group_id: str) -> Turn | None:
        """Return the turn that a group was, unless its conversation was forgotten meanwhile."""
        turn = self._under_way.pop(group_id, None)
        return turn if turn is not None and self._table["used"][turn.row] == turn.used else None

    def _goes_on(self, beginnings: Words, session: np.uint64) -> int | None:
        """Return the row of the longest context that a prompt begins with; None: there is none."""
        rows, table = self._of(session), self._table
        rows = rows[(table["length"][rows] <= len(beginnings)) & ~table["under_way"][rows]]
        rows = rows[beginnings[table["length"][rows] - 1] == table["hash"][rows]]
        return int(rows[np.argmax(table["length"][rows])]) if len(rows) else None

    def _rewritten(self, session: np.uint64, whole: np.uint64) -> int | None:
        """Return the row that a rewritten history takes; -1: a new row; None: no rewritten history."""
        rows = self._of(session)
        if not len(rows) or np.any(self._table["first"][rows] == whole):
            return None
        return int(rows[0]) if len(rows) == 1 and not self._table["under_way"][rows[0]] else -1

    def _of(self, session: np.uint64) -> Rows:
        rows = np.flatnonzero(self._table["session"] == session)
        return rows[self._table["length"][rows] > 0]

    def _set(self, row: int, values: Sequence[int | np.uint64]) -> None:
        for column, value in zip(self._table.values(), values, strict=True):
            column[row] = value

    def _turn(self, kind: Kind, group_id: str, row: int, length: int, whole: np.uint64) -> Turn:
        self._clock += 1
        table = self._table
        table["used"][row], table["under_way"][row] = self._clock, True
        number, prompt_len, generated = (
            int(table[name][row]) for name in ("number", "prompt_len", "generated")
        )
        turn = self._under_way[group_id] = Turn(
            kind, number, prompt_len, generated, row, self._clock, length, int(whole)
        )
        return turn

    def _hashes(self, tokens: Tokens, start: int, before: int = 0) -> Words:
        """Return the hash of each beginning that ends in `tokens`, which follow on `start` others."""
        lacking = start + len(tokens) - len(self._factors)
        if lacking > 0:
            drawn = self._random.integers(0, 2**64, max(lacking, _GROWTH), np.uint64)
            self._factors = np.concatenate([self._factors, drawn])
        factors = self._factors[start : start + len(tokens)]
        sums = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * factors, dtype=np.uint64)
        return sums + np.uint64(before)


def _session_hash(session: str) -> np.uint64:
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def context(tokens: Tokens, images: Sequence[Placed]) -> Tokens:
    """Return tokens that tell images apart: in place of each, numbers from its name."""
    if not images:
        return tokens
    found = np.array(tokens)
    for each in images:
        found[each.offset : each.offset + each.length] = zlib.crc32(each.name.encode()) >> 1
    return found
