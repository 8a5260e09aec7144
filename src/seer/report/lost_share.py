"""Where the time went that a rollout's engines had: into its tokens, or into what cost the rest. Pure.

An engine that is there for a second could make as many tokens as in the best second that it has shown. All
of that, from the rollout's submission to its end, is the whole. The tokens of the rollout's responses are the
useful part. At each moment the rest is lost, for every engine by the causes that `Part` names. How fast an
engine is with few chunks follows from its best rate, and from the time per token of a lone request if that is
known: a step takes a fixed time, and as much again for each request in it.

Invariants (tests/property/test_lost_share.py):
- no part is negative, and all parts together are the whole;
- useful part and `LONGEST` together are, as a share of the whole, the rollout's bound ÷ the time that it took
  (`common/policy/rollout_bound.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seer.common.policy.fleet import SPARE_PART
from seer.report.records import Chunk, End, EngineIncarnation, Response, Rollout, Timeline
from seer.report.trajectories import away

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


FULL_SECONDS = 1.0
"""A best rate is measured over a second; an engine is full with as many chunks as it ran for as long."""


class Part(Enum):
    """What an engine's time went into: a name, and what is counted."""

    USEFUL = "useful", "the tokens of the responses, at each engine's best speed"
    LONGEST = "longest response", "what no schedule could use: the longest response alone takes so long"
    KV_FULL = "KV full", "responses waited, fewer ran than can at best, and the next did not fit in free KV"
    TAIL = "tail", "nine tenths had finished, and too few responses were left for the engine"
    FEW = "few responses", "the same before the tail: all open responses ran"
    AWAY = "away", "the same while trajectories were away, between turns"
    WAITS = "waits", "responses waited though the engine had room; weights loading, sleep, no buffer"
    LOST = "lost chunks", "chunks that were lost, dropped or did not end, and tokens computed again"
    OTHERS = "other rollouts", "tokens of other rollouts"
    OVERHEAD = (
        "overhead",
        "slower than at best for as many chunks: prompts, fetched KV, long contexts, drafts, load",
    )

    def __init__(self, title: str, meaning: str) -> None:
        self.title, self.meaning = title, meaning


_GIVES_WAY = (
    Part.TAIL, Part.FEW, Part.AWAY, Part.WAITS, Part.KV_FULL, Part.OVERHEAD, Part.OTHERS, Part.LOST,
)  # fmt: skip
"""Of which parts `LONGEST` is: the end of the rollout first."""


@dataclass(frozen=True, slots=True)
class LostShare:
    """`parts` in tokens at the best speeds of the engines, and their sum, the `whole`."""

    whole: float
    parts: dict[Part, float]

    @property
    def possible(self) -> float:
        """The least time that these engines could take, as a share of the time that the rollout took."""
        return min(1.0, (self.parts[Part.USEFUL] + self.parts[Part.LONGEST]) / self.whole)

    def per_mille(self) -> dict[Part, int]:
        """Return the parts in thousandths, rounded so that they add up to 1000; without those of 0."""
        exact = {part: 1000 * tokens / self.whole for part, tokens in self.parts.items()}
        rounded = {part: int(share) for part, share in exact.items()}
        left = sorted(exact, key=lambda part: rounded[part] - exact[part])[: 1000 - sum(rounded.values())]
        for part in left:
            rounded[part] += 1
        return {part: share for part, share in rounded.items() if share}


def lost_share(
    timeline: Timeline, rollout: Rollout, chunks: Mapping[str, Sequence[Chunk]], tail_start: float
) -> LostShare | None:
    """Return where a rollout's time went; None: the log does not have the engines' speeds.

    `chunks`: by engine, those of this rollout, and others that ran meanwhile. Times as in the records.
    """
    start, end = rollout.submitted, rollout.end
    fastest = max((each.best_rate for each in timeline.speeds.values()), default=0.0)
    made = {response: made_in_log(response) for response in rollout.responses}
    useful = float(sum(made.values()))
    if not (fastest and useful and end > start):
        return None
    kept = {
        each: made[each] / max(sum(chunk.tokens for chunk in each.chunks), 1) for each in rollout.responses
    }
    state = _State(timeline, rollout, tail_start)
    lost = dict.fromkeys(Part, 0.0)
    whole = 0.0
    alone = [each.seconds_alone for each in timeline.speeds.values() if each.seconds_alone]
    for name in sorted(chunks.keys() | {each.name for each in timeline.incarnations}):
        speed = timeline.speeds.get(name)
        engine = _Engine(
            state, chunks.get(name, ()), [each for each in timeline.incarnations if each.name == name],
            speed.best_rate if speed and speed.best_rate else fastest, min(alone, default=0.0), kept,
        )  # fmt: skip
        whole += engine.rate * engine.seconds
        for part, tokens in engine.losses(state).items():
            lost[part] += tokens
    return _added_up(
        max(whole, useful), useful, lost, max(made.values()) * min(alone, default=0.0) / (end - start)
    )


def _added_up(whole: float, useful: float, lost: dict[Part, float], longest: float) -> LostShare:
    """Scale losses so that parts add up; `longest`: the longest response's time alone ÷ the whole time.

    They differ a little where chunks' tokens, spread evenly over their time, exceed the engine's best rate.
    """
    rest, found = whole - useful, sum(lost.values())
    parts = {part: tokens * rest / found if found else 0.0 for part, tokens in lost.items()}
    if not found:
        parts[Part.OVERHEAD] = rest
    parts[Part.USEFUL] = useful
    need = max(0.0, min(1.0, longest) * whole - useful)
    for part in _GIVES_WAY:
        moved = min(need, parts[part])
        parts[part] -= moved
        parts[Part.LONGEST] += moved
        need -= moved
    return LostShare(whole, parts)


def made_in_log(response: Response) -> int:
    """Return how many of its tokens were generated by chunks in the log, once."""
    return min(response.generated, sum(chunk.tokens for chunk in response.chunks))


class _State:
    """What holds for all engines: whether responses wait, trajectories are away, spans, the tail."""

    def __init__(self, timeline: Timeline, rollout: Rollout, tail_start: float) -> None:
        self.start, self.end, self.tail_start = rollout.submitted, rollout.end, tail_start  # `end` takes long
        self._spans = [(each.start, each.end) for each in timeline.spans]
        gone = [pair for response in rollout.responses for pair in away(response)]
        runs = [(chunk.start, chunk.end) for chunk in rollout.chunks]
        there = [(response.submitted, _over(response, self.end)) for response in rollout.responses]
        self._waiting = _Count([*((*each, 1) for each in there), *((*each, -1) for each in (*runs, *gone))])
        self._away = _Count([(*each, 1) for each in gone])

    @property
    def edges(self) -> Floats:
        """Times at which any of it changes."""
        spans = np.array([time for span in self._spans for time in span])
        return np.concatenate([self._waiting.toggles, self._away.toggles, spans, [self.tail_start]])

    def waiting(self, times: Floats) -> Flags:
        """Return whether a response waited at each time."""
        return self._waiting.at(times) > 0

    def away(self, times: Floats) -> Flags:
        """Return whether a trajectory was away."""
        return self._away.at(times) > 0

    def halted(self, times: Floats) -> Flags:
        """Return whether weights were loaded, engines slept, or there was no buffer or no log."""
        found = np.zeros(len(times), np.bool_)
        for start, end in self._spans:
            found |= (times >= start) & (times < end)
        return found


def _over(response: Response, end: float) -> float:
    """Return when a response needed nothing more: it finished, or failed, or the rollout ended."""
    if response.finished is not None:
        return response.finished
    last = max((chunk.end for chunk in response.chunks), default=response.submitted)
    return last if response.finish else end


class _Count:
    """How many there are of something at a time, from when each begins and ends."""

    def __init__(self, changes: Sequence[tuple[float, float, int]]) -> None:
        times = np.array([time for start, end, _ in changes for time in (start, max(start, end))])
        steps = np.array([step for *_, each in changes for step in (each, -each)], np.int64)
        self._times, where = np.unique(times, return_inverse=True)
        self._level = np.cumsum(np.bincount(where, steps, len(self._times)).round().astype(np.int64))

    @property
    def toggles(self) -> Floats:
        """Times at which there begins to be one, or is none any more."""
        positive = self._level > 0
        return self._times[np.diff(positive, prepend=False)]

    def at(self, times: Floats) -> NDArray[np.int64]:
        """Return the count at each time."""
        place = np.searchsorted(self._times, times, "right")
        return np.concatenate([[0], self._level])[place]


class _Engine:
    """One engine: `seconds` for which it was there, and its best `rate`.

    `alone`: seconds per token of a lone request, 0: unknown; `kept`: by response, which share of the tokens
    that were generated for it are in it.
    """

    def __init__(
        self, state: _State, chunks: Sequence[Chunk], incarnations: Sequence[EngineIncarnation],
        rate: float, alone: float, kept: Mapping[Response, float],
    ) -> None:  # fmt: skip
        start, end = state.start, state.end
        self.rate, self._alone = rate, alone
        stays = [
            (max(each.joined, start), min(end if each.left is None else each.left, end))
            for each in incarnations
        ]
        if not stays and chunks:  # the log begins after it joined
            first, last = min(chunk.start for chunk in chunks), max(chunk.end for chunk in chunks)
            stays = [(max(first, start), min(last, end))]
        self.stays = [(joined, left) for joined, left in stays if left > joined]
        self.seconds = sum(left - joined for joined, left in self.stays)
        self._blocks = max((each.capacity.kv_blocks for each in incarnations), default=0)
        here = [chunk for chunk in chunks if chunk.end > start and chunk.start < end]
        here.sort(key=lambda chunk: chunk.start)
        self._starts, self._ends = np.array([(chunk.start, chunk.end) for chunk in here]).reshape(-1, 2).T
        weights = [_weights(chunk, kept.get(chunk.response)) for chunk in here]
        self._weights = np.array(weights, np.float64).reshape(-1, len(_Level._fields)).T

    def losses(self, state: _State) -> dict[Part, float]:
        """Return what was lost on this engine, in tokens at its best rate."""
        own = np.concatenate([self._starts, self._ends, state.edges])
        lost = dict.fromkeys(Part, 0.0)
        for joined, left in self.stays:
            edges = np.unique(np.concatenate([own[(own > joined) & (own < left)], [joined, left]]))
            seconds = np.diff(edges)
            for part, shares in self._shares(state, edges):
                lost[part] += float(np.sum(shares * seconds)) * self.rate
        return lost

    def _shares(self, state: _State, edges: Floats) -> Iterator[tuple[Part, Floats]]:
        """Yield for each part the share of the engine's best rate that it cost between edges."""
        times, level = edges[:-1], self._levels(edges)
        kept, others = level.useful / self.rate, level.others / self.rate
        gap = np.maximum(0.0, 1.0 - kept)
        each = np.minimum(gap, others)
        yield Part.OTHERS, each
        gap = gap - each
        good = level.running - level.in_vain
        like_others = np.where(good > 0, (kept + others) * level.in_vain / np.maximum(good, 1.0), 1.0)
        each = np.minimum(gap, level.again / self.rate + np.where(level.in_vain > 0, like_others, 0.0))
        yield Part.LOST, each
        gap = gap - each
        few = np.minimum(gap, 1.0 - self._at_best(level.running, edges))
        yield Part.OVERHEAD, gap - few
        halted, waiting = state.halted(times), state.waiting(times)
        full = waiting & ~halted & self._full(level.blocks, times)
        left_over = ~halted & ~waiting
        gone = left_over & state.away(times)
        tail = left_over & ~gone & (times >= state.tail_start)
        yield Part.KV_FULL, few * full
        yield Part.WAITS, few * (halted | (waiting & ~full))
        yield Part.AWAY, few * gone
        yield Part.TAIL, few * tail
        yield Part.FEW, few * (left_over & ~gone & ~tail)

    def _levels(self, edges: Floats) -> _Level:
        """Return the sums over the chunks that run between edges, which are all their times."""
        size = len(edges) + 1
        starts, ends = np.searchsorted(edges, self._starts), np.searchsorted(edges, self._ends)
        steps = [np.bincount(starts, row, size) - np.bincount(ends, row, size) for row in self._weights]
        return _Level(*(np.maximum(np.cumsum(each)[: size - 2], 0.0) for each in steps))

    def _at_best(self, running: Floats, edges: Floats) -> Floats:
        """Return the share of the best rate that an engine reaches with so many chunks."""
        most = _held(running, np.diff(edges), FULL_SECONDS)
        if most <= 0:
            return np.ones(len(running))
        linear = np.asarray(np.minimum(1.0, running / most))
        row = (most / self.rate - self._alone) / max(
            most - 1.0, 1.0
        )  # of a step's seconds, those of a request
        if not self._alone or row < 0 or most <= 1:
            return linear
        step = np.maximum(self._alone - row, 0.0) + row * running
        return np.asarray(np.minimum(1.0, running / np.maximum(step, 1e-12) / self.rate))

    def _full(self, booked: Floats, times: Floats) -> Flags:
        """Return whether the chunk that began here next did not fit yet, with what policies leave free."""
        if not self._blocks or not len(self._starts):
            return np.zeros(len(times), np.bool_)
        blocks = self._weights[_Level._fields.index("blocks")]
        following = np.searchsorted(self._starts, times, "right")
        need = blocks[np.minimum(following, len(blocks) - 1)]
        return np.asarray(booked + need + self._blocks // SPARE_PART > self._blocks)


class _Level(NamedTuple):
    """Sums over the chunks that run: how many, how many `in_vain`, tokens/s, and blocks.

    Tokens/s count tokens that the rollout's responses have, tokens of `others`, and tokens made `again`.
    """

    running: Floats
    in_vain: Floats
    useful: Floats
    others: Floats
    again: Floats
    blocks: Floats


def _weights(chunk: Chunk, kept: float | None) -> tuple[float, ...]:
    """Return what a chunk adds to each field of `_Level`; `kept` is None for another rollout's."""
    rate = chunk.tokens / max(chunk.seconds, 1e-9)
    tokens = (0.0, rate, 0.0) if kept is None else (rate * kept, 0.0, rate * (1.0 - kept))
    return 1.0, float(chunk.how is not End.KEPT), *tokens, float(chunk.blocks)


def _held(running: Floats, seconds: Floats, least: float) -> float:
    """Return the most chunks that ran at once for so many seconds in all; the most at all if none did."""
    order = np.argsort(-running, kind="stable")
    place = int(np.searchsorted(np.cumsum(seconds[order]), least))
    return float(running[order[place if place < len(order) else 0]])
