"""One rollout of a timeline, and how much of it is drawn: figures, tail, levels over time, bars.

Invariants (tests/unit/test_report_view.py):
- every chunk of the rollout, and every chunk of another that ran meanwhile, is one bar;
- of more than `BARS` of them, at most `BARS` are drawn: the tail and every k-th slot.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seer.common.errors import InvalidField
from seer.common.policy.tail import before_tail
from seer.report.hard_prompts import hard_prompts
from seer.report.lost_share import lost_share, made_in_log
from seer.report.records import Chunk, End, EngineIncarnation, Response, Rollout, Span, Timeline
from seer.report.trajectories import away

BARS = 20_000
"""Chunks drawn at most: about 4 MB, which browsers still scroll smoothly."""

ENGINES = 64
"""Engines drawn at most: a row of each must be seen."""

TAIL_ROWS = 60
"""Responses of the tail drawn at most."""

Floats = NDArray[np.float64]


class RolloutView:
    """One rollout, and what else ran from its submission, `start`, to its `end`.

    `tail` are the last tenth of its responses to finish, one at least, in this order, unfinished ones last;
    `tail_start` is when all others had finished, or `end`. `lost`: where its time went, if the log has that.
    """

    def __init__(self, timeline: Timeline, rollout: Rollout) -> None:
        self.timeline, self.rollout = timeline, rollout
        self.start, self.end = rollout.submitted, rollout.end
        self.seconds = self.end - self.start
        responses = sorted(rollout.responses, key=_finish_order)
        early = before_tail(len(responses))
        self.tail = responses[min(early, len(responses) - 1) :]
        last = responses[early - 1].finished if responses else None
        self.tail_start = self.end if last is None else last
        self.others = [
            chunk
            for chunk in timeline.chunks
            if chunk.response.rollout is not rollout and self._overlaps(chunk.start, chunk.end)
        ]
        self._chunks: dict[str, list[Chunk]] = defaultdict(list)  # by engine
        for chunk in (*rollout.chunks, *self.others):
            self._chunks[chunk.engine].append(chunk)
        self.incarnations = [
            each for each in timeline.incarnations if self._overlaps(each.joined, each.left or timeline.end)
        ]
        self.hard = hard_prompts(rollout)
        names = self._chunks.keys() | {each.name for each in self.incarnations}
        self.engines = sorted(names, key=_by_number)
        self.lost = lost_share(timeline, rollout, self._chunks, self.tail_start)

    def _overlaps(self, start: float, end: float) -> bool:
        return start < self.end and end > self.start

    @property
    def spans(self) -> list[Span]:
        """Weight updates, sleeps and times without a buffer while it ran."""
        return [span for span in self.timeline.spans if self._overlaps(span.start, span.end)]

    @property
    def lost_incarnations(self) -> list[EngineIncarnation]:
        """The engines' incarnations that were lost while it ran."""
        return [each for each in self.incarnations if each.lost and (each.left or 0.0) < self.end]

    def figures(self) -> list[tuple[str, str]]:
        """Return what the rollout is in numbers: values and their names."""
        rollout, chunks = self.rollout, self.rollout.chunks
        done = sum(response.finished is not None for response in rollout.responses)
        tokens = sum(response.generated for response in rollout.responses)
        again = sum(chunk.tokens for chunk in chunks) - sum(map(made_in_log, rollout.responses))
        ends = Counter(chunk.how for chunk in chunks)
        lost = ends[End.ENGINE_LOST] + ends[End.BUFFER_LOST] + ends[End.FAILED]
        responses = len(rollout.responses)
        figures = [
            (f"{done:,}" if done == responses else f"{done:,} of {responses:,}", "responses"),
            (f"{tokens:,}", "tokens"),
            (f"{self.seconds:,.1f} s", "from submission to end"),
            (f"{tokens / self.seconds:,.0f}" if self.seconds else "-", "tokens/s"),
            (f"{self.lost.possible:.0%}" if self.lost else "", "of what is possible"),
            (f"{self.end - self.tail_start:,.1f} s", "tail"),
            (f"{len(chunks):,}", "chunks"),
            (f"{sum(chunk.moved for chunk in chunks):,}", "migrations"),
            (f"{sum(chunk.preemptions for chunk in chunks):,}", "preemptions"),
            (f"{lost:,}", "chunks lost"),
            (f"{ends[End.DROPPED]:,}" if ends[End.DROPPED] else "", "chunks dropped"),
            (f"{len(self.lost_incarnations):,}", "engines lost"),
            (f"{again:,}" if again else "", "tokens computed again"),
            *self._turns(),
        ]
        return [(value, name) for value, name in figures if value]

    def _turns(self) -> list[tuple[str, str]]:
        """Return how many turns there were, and how long a trajectory was away between its turns."""
        trajectories = [response for response in self.rollout.responses if response.turns]
        if not trajectories:
            return []
        seconds = sum(end - start for each in trajectories for start, end in away(each))
        turns = sum(len(each.turns) for each in trajectories)
        return [(f"{turns:,}", "turns"), (f"{seconds / len(trajectories):,.1f} s", "away, per trajectory")]

    def edges(self, bins: int) -> Floats:
        """Return the times between so many bins."""
        return np.linspace(self.start, max(self.end, self.start + 0.01), bins + 1)

    def token_rate(self, edges: Floats) -> Floats:
        """Return tokens/s by bin, a chunk's spread evenly over its time."""
        kept = [chunk for chunk in self.rollout.chunks if chunk.tokens]
        return levels(kept, [chunk.tokens / max(chunk.seconds, 1e-9) for chunk in kept], edges)

    def open_responses(self, edges: Floats) -> Floats:
        """Return how many responses have not finished at each edge."""
        times = sorted(each.finished for each in self.rollout.responses if each.finished is not None)
        return np.asarray(len(self.rollout.responses) - np.searchsorted(times, edges, "right"), np.float64)

    def booked(self, engine: str, edges: Floats) -> Floats:
        """Return the booked share of an engine's KV blocks, by bin; 0 where the share is not known."""
        blocks = max(
            (each.capacity.kv_blocks for each in self.incarnations if each.name == engine), default=0
        )
        there = self._chunks.get(engine, [])
        return levels(there, [chunk.blocks / max(blocks, 1) for chunk in there], edges)


def choose_rollout(timeline: Timeline, rollout_id: str = "") -> Rollout:
    """Return the last submission of a rollout id; without one, the last rollout of which a chunk ran.

    Raises `InvalidField` when there is none.
    """
    ran = [rollout for rollout in timeline.rollouts if rollout.chunks]
    known = [rollout for rollout in ran if rollout_id in ("", rollout.rollout_id)]
    if known:
        return known[-1]
    if not ran:
        found = f"{len(timeline.rollouts)} rollouts"
        raise InvalidField("LOG", found, "no chunk of any ran: give the log of one that got results")
    names = list(dict.fromkeys(rollout.rollout_id for rollout in ran))
    shown = ", ".join(names[-10:])
    raise InvalidField("--rollout", rollout_id, f"the log has {len(names)} rollouts, the last ones: {shown}")


def levels(chunks: Sequence[Chunk], weights: Sequence[float], edges: Floats) -> Floats:
    """Return by bin the mean over time of the sum of the weights of the chunks that run: [bins]."""
    if not chunks:
        return np.zeros(len(edges) - 1)
    starts = np.array([chunk.start for chunk in chunks]) - edges[0]
    ends = np.maximum(np.array([chunk.end for chunk in chunks]) - edges[0], starts + 1e-9)
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    steps = np.concatenate([np.asarray(weights), -np.asarray(weights)])[order]
    times = times[order]
    level = np.cumsum(steps)
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times))])
    at = edges - edges[0]
    return np.maximum(np.diff(np.interp(at, times, area)) / np.diff(at), 0.0)


def _finish_order(response: Response) -> tuple[float, int, int]:
    finished = np.inf if response.finished is None else response.finished
    return finished, response.prompt, response.index


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort engine-10 after engine-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


# --- what is drawn -------------------------------------------------------------------------


class Bar(NamedTuple):
    """A chunk in a row of its engine's."""

    row: int
    chunk: Chunk


@dataclass
class Bars:
    """Bars by engine, and how many rows each engine takes.

    Of every engine each `step`-th slot is drawn, and with a `step` over 1 the `tail` responses in rows of
    their own below. `engines` of all that there are.
    """

    step: int
    engines: list[str]
    tail: list[Response]
    bars: dict[str, list[Bar]] = field(default_factory=lambda: defaultdict(list))
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many chunks are drawn."""
        return sum(map(len, self.bars.values()))


def drawn_tail(view: RolloutView) -> list[Response]:
    """Return the responses of the tail that are drawn: the last `TAIL_ROWS`, of `BARS / 2` chunks at most."""
    shown: list[Response] = []
    budget = BARS // 2
    for response in reversed(view.tail[-TAIL_ROWS:]):
        budget -= len(response.chunks)
        if budget < 0 and shown:
            break
        shown.append(response)
    return shown[::-1]


def tail_chunks(tail: Sequence[Response]) -> list[Chunk]:
    """Return the chunks of responses, by response, the last `BARS / 2` of them at most."""
    return [chunk for response in tail for chunk in response.chunks][-BARS // 2 :]


def lay_out(view: RolloutView) -> Bars:
    """Choose the chunks that are drawn, and their rows."""
    chunks = [*view.others, *view.rollout.chunks]
    tail = drawn_tail(view)
    engines = _drawn_engines(view, tail)
    chunks = [chunk for chunk in chunks if chunk.engine in set(engines)]
    late = set(tail_chunks(tail)).intersection(chunks) if len(chunks) > BARS else set()
    slots = Counter(chunk.slot for chunk in chunks)
    step, budget = 1, BARS - len(late)
    while step <= len(slots) and sum(slots[slot] for slot in slots if slot % step == 0) > budget:
        step += 1
    chosen = [chunk for chunk in chunks if chunk.slot % step == 0]
    chosen = chosen[:: max(1, -(-len(chosen) // max(budget, 1)))]  # a few slots may have run very many
    layout = Bars(step, engines, tail)
    for chunk in chosen:
        layout.bars[chunk.engine].append(Bar(chunk.slot // step, chunk))
    _add_tail(layout, sorted(late.difference(chosen), key=lambda chunk: (chunk.start, chunk.attempt)))
    return layout


def _drawn_engines(view: RolloutView, tail: Sequence[Response]) -> list[str]:
    """Return the engines that are drawn: lost engines first, then the engines that ran most of the tail."""
    if len(view.engines) <= ENGINES:
        return view.engines
    lost = {each.name for each in view.lost_incarnations}
    late = Counter(chunk.engine for chunk in tail_chunks(tail))
    first = sorted(view.engines, key=lambda name: (name not in lost, -late[name]))[:ENGINES]
    return sorted(first, key=_by_number)


def _add_tail(layout: Bars, chunks: Sequence[Chunk]) -> None:
    """Give the tail's chunks that are in no drawn slot the lowest row below the slots that is free."""
    first = {name: max((bar.row + 1 for bar in layout.bars[name]), default=0) for name in layout.engines}
    busy: dict[str, list[float]] = defaultdict(list)  # by row, until when
    for chunk in chunks:
        rows = busy[chunk.engine]
        row = next((row for row, until in enumerate(rows) if until <= chunk.start), len(rows))
        rows[row : row + 1] = [chunk.end]
        layout.bars[chunk.engine].append(Bar(first[chunk.engine] + row, chunk))
    for name in layout.engines:
        layout.rows[name] = max((bar.row + 1 for bar in layout.bars[name]), default=1)
