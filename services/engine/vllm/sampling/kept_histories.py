"""Which tokens of histories a device keeps between steps, and which it must be sent.

Penalties count a request's tokens. Whoever keeps them on the device sends, at each step, those that are new.

Invariants:
- once the device has copied what `step` returns, it holds the history of every penalised row, whatever came
  before: rows that moved, requests that were away, drafts that were rejected, histories that got shorter;
- a history belongs to its `RequestSampling` object: one object, one request, whose history only grows while
  nobody looks. Equal objects in one batch have places of their own;
- drafts are never kept: they come with their step;
- the device holds `shape` tokens: as many rows as requests are penalised at once, and columns for the longest
  history and a token, each the next power of two. When it grows, each history keeps its row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seer.services.engine.vllm.sampling.rows import RequestSampling, RowParams, SamplingTable

_LONG = 64
"""From so many new tokens on, a history is copied in one piece: rows of a few tokens are gathered at once."""

_Owner = tuple[int, int]
"""Identity of a `RequestSampling`, and how often it came before in the same batch."""


@dataclass(frozen=True, slots=True)
class Runs:
    """New tokens, int32, and where they go: `where` is int64 [runs, 3], each (from, to, length).

    Run i copies `tokens[from : from + length]` to `to` of the device's tokens.
    """

    tokens: npt.NDArray[np.int32]
    where: npt.NDArray[np.int64]


NOTHING = Runs(np.empty(0, np.int32), np.empty((0, 3), np.int64))


class KeptHistories:
    """What one device keeps. It holds tokens [`shape`]; when `shape` grows, old ones keep row and column."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Take nothing for kept: after an error, nobody knows what was copied."""
        self._rows = self._width = 0
        self._table: SamplingTable | None = None
        self._owners: dict[_Owner, tuple[int, RequestSampling]] = {}  # the object: its identity stays its own
        self._held = np.empty(0, np.int64)
        self._places = np.empty(0, np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the device's tokens, and their width."""
        return self._rows, self._width

    def step(self, params: RowParams) -> tuple[npt.NDArray[np.int64], Runs]:
        """Return where each row's history begins on the device (-1: it needs none), and what to copy before.

        Raises `ValueError` when a penalised row has no history.
        """
        starts = np.full(len(params.records), -1, np.int64)
        rows = np.flatnonzero(params.penalised)
        if not len(rows):
            return starts, NOTHING
        slots, known = _checked(params, rows)
        self._take(params, int(known.max(initial=0)) + 1)
        starts[rows] = self._places[slots] * self._width
        longest = np.full(len(self._places), -1, np.int64)
        np.maximum.at(longest, slots, known)
        used = np.flatnonzero(longest >= 0)
        return starts, self._new(params, used, longest[used])

    def _take(self, params: RowParams, longest: int) -> None:
        """Give every penalised request of the table a place."""
        table, history = params.table, params.history
        if table is None or history is None:
            raise ValueError("histories are kept for the rows of a SamplingTable")
        penalised = table.penalised_requests
        self._rows = max(self._rows, _power_of_2(len(penalised)))
        self._width = max(self._width, min(_power_of_2(longest), history.shape[1]))
        if len(self._held) < self._rows:
            self._held = np.append(self._held, np.zeros(self._rows - len(self._held), np.int64))
        if table is self._table:
            return
        came: Counter[int] = Counter()
        places = np.full(len(history), -1, np.int64)
        wanted: list[tuple[int, _Owner, RequestSampling]] = []
        for slot, request in penalised:
            wanted.append((slot, (id(request), came[id(request)]), request))
            came[id(request)] += 1
        self._make_room({owner for _, owner, _ in wanted})
        free = sorted(set(range(self._rows)) - {place for place, _ in self._owners.values()}, reverse=True)
        for slot, owner, request in wanted:
            if owner not in self._owners:
                self._owners[owner] = (free.pop(), request)
                self._held[self._owners[owner][0]] = 0
            places[slot] = self._owners[owner][0]
        self._table, self._places = table, places

    def _make_room(self, wanted: set[_Owner]) -> None:
        """Forget the requests that are away, if those that come need their places."""
        if len(self._owners.keys() | wanted) > self._rows:
            self._owners = {owner: kept for owner, kept in self._owners.items() if owner in wanted}

    def _new(self, params: RowParams, slots: npt.NDArray[np.intp], known: npt.NDArray[np.int64]) -> Runs:
        history = params.history
        assert history is not None  # noqa: S101 - checked before
        places = self._places[slots]
        held = self._held[places]
        held[held > known] = 0
        self._held[places] = known
        new = known - held
        order = np.argsort(new < _LONG, kind="stable")  # the long ones first
        order = order[new[order] > 0]
        slots, held, new, places = slots[order], held[order], new[order], places[order]
        ends = np.cumsum(new)
        many = int((new >= _LONG).sum())
        pieces = [
            history[slot, begin : begin + count]
            for slot, begin, count in zip(slots[:many], held[:many], new[:many], strict=True)
        ]
        few = np.repeat(np.arange(many, len(new)), new[many:])
        if len(few):
            index = np.arange(ends[many] - new[many], ends[-1]) - (ends - new - held)[few]
            pieces.append(history[slots[few], index])
        where = np.stack((ends - new, places * self._width + held, new), axis=1)
        tokens = np.concatenate(pieces) if pieces else NOTHING.tokens
        return Runs(tokens, where)


def _checked(
    params: RowParams, rows: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return the slots of penalised rows and how many tokens of each are known; raise if one is not there."""
    names = ("slot", "position", "extra_start", "extra_len")  # one by one: rows of records are slow to copy
    slots, positions, extra, extra_len = (params.records[name][rows] for name in names)
    history = np.empty((0, 0), np.int32) if params.history is None else params.history
    known = positions - extra_len
    inside = (slots >= 0) & (known >= 0) & (extra_len >= 0) & (extra >= 0)
    inside &= (slots < len(history)) & (known <= history.shape[1]) & (extra + extra_len <= len(params.extra))
    if not inside.all():
        params.history_of(int(rows[np.argmin(inside)]))  # raises
    return slots, known


def _power_of_2(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
