"""Data-parallel ranks in virtual time: commands take their way, a step is a collective, ranks stall and die."""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer.common.policy.ranks import AHEAD, Lockstep, RankPlacement

LIMIT = 5.0
"""Seconds within which a step must have been run; none that goes well takes more than one."""


@dataclass
class Rank:
    """Runs granted steps in order; `left` are the tokens of its requests.

    `coming`: requests that were sent after so many steps, and reach the rank between that step and the next.
    """

    coming: list[tuple[int, int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    granted: list[int] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    entered: int = 0
    dummies: int = 0


class Ranks:
    """`stalls` at a step number: that rank does not enter it, for ever if it is dead."""

    def __init__(
        self, ranks: int, seed: int, jobs: list[tuple[float, int]], stall: tuple[int, int] | None
    ) -> None:
        self.random, self.now, self.order = random.Random(seed), 0.0, count()
        self.lockstep, self.placement = Lockstep(ranks, LIMIT), RankPlacement.of(ranks, 10_000, 100)
        self.ranks, self.stall = [Rank() for _ in range(ranks)], stall
        self.events: list = []
        self.arrived: Counter[int] = Counter()
        self.stalled_at = self.ended_at = -1.0
        self.late: list[int] = []
        for number, (at, tokens) in enumerate(jobs):
            self.at(at, self.submit, number, tokens)

    def at(self, time: float, action, *values) -> None:
        heapq.heappush(self.events, (time, next(self.order), action, values))

    def later(self, action, *values) -> None:
        self.at(self.now + self.random.random() * 0.1, action, *values)

    def run(self) -> None:
        while self.events and self.ended_at < 0:
            self.now, _, action, values = heapq.heappop(self.events)
            action(*values)
            if late := self.lockstep.late(self.now):
                self.late, self.ended_at = list(late), self.now

    def submit(self, number: int, tokens: int) -> None:
        rank = self.placement.place(str(number), tokens)
        self.ranks[rank].coming.append((self.lockstep.granted, tokens))
        self.lockstep.work(rank)
        self.grant()

    def grant(self) -> None:
        while (step := self.lockstep.grant(self.now)) is not None:
            assert self.lockstep.granted - self.lockstep.done <= AHEAD
            at = self.now + self.random.random() * 0.1
            for number, rank in enumerate(self.ranks):
                assert (rank.granted or rank.ran or [0])[-1] == step - 1
                rank.granted.append(step)
                self.at(at, self.enter, number)
        self.at(self.now + LIMIT, lambda: None)

    def enter(self, number: int) -> None:
        """Enter the next step, if the one before has ended and the next one is there."""
        rank = self.ranks[number]
        if not rank.granted or rank.entered == rank.granted[0]:
            return
        if self.stall == (number, rank.granted[0]):
            self.stalled_at = self.now
            return
        rank.entered = rank.granted[0]
        self.arrived[rank.entered] += 1
        if self.arrived[rank.entered] == len(self.ranks):
            for each in range(len(self.ranks)):
                self.at(self.now + 0.01 + self.random.random() * 0.01, self.leave, each)

    def leave(self, number: int) -> None:
        rank = self.ranks[number]
        step = rank.granted.pop(0)
        rank.ran.append(step)
        rank.left += [tokens for after, tokens in rank.coming if after < step]
        rank.coming = [(after, tokens) for after, tokens in rank.coming if after >= step]
        worked = bool(rank.left)
        rank.dummies += not worked
        rank.left = [tokens - 1 for tokens in rank.left if tokens > 1]
        self.enter(number)
        self.later(self.report, number, worked, bool(rank.left))

    def report(self, number: int, worked: bool, busy: bool) -> None:
        self.lockstep.ended(number, worked=worked, busy=busy, now=self.now)
        self.grant()


JOBS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 30)), max_size=12)


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(0, 10**6), JOBS)
def test_all_work_is_run_and_all_ranks_run_the_same_steps(ranks, seed, jobs):
    it = Ranks(ranks, seed, jobs, None)
    it.run()
    assert not it.late
    assert not it.lockstep.works
    assert not any(rank.left or rank.coming or rank.granted for rank in it.ranks)
    steps = list(range(1, it.lockstep.granted + 1))
    assert all(rank.ran == steps for rank in it.ranks)
    assert it.lockstep.dummies == sum(rank.dummies for rank in it.ranks)
    assert it.lockstep.ran == ranks * len(steps)
    most = max((tokens for _, tokens in jobs), default=0)
    assert most <= len(steps) <= sum(tokens + AHEAD for _, tokens in jobs)


@settings(max_examples=60)
@given(st.integers(2, 8), st.integers(0, 10**6), st.data())
def test_a_rank_that_stands_still_is_named_within_the_limit(ranks, seed, data):
    stall = data.draw(st.tuples(st.integers(0, ranks - 1), st.integers(1, 20)))
    it = Ranks(ranks, seed, [(0.0, 25)], stall)
    it.run()
    assert stall[0] in it.late
    assert it.stalled_at >= 0
    assert it.ended_at - it.stalled_at <= LIMIT + 0.3
    assert all(rank.ran == list(range(1, len(rank.ran) + 1)) for rank in it.ranks)
    assert max(len(rank.ran) for rank in it.ranks) < stall[1]


def test_idle_ranks_are_not_late():
    lockstep = Lockstep(2, LIMIT)
    assert not lockstep.late(1e9)
    lockstep.work(0)
    assert lockstep.grant(1e9) == 1
    assert not lockstep.late(1e9 + LIMIT - 0.1)
    assert lockstep.late(1e9 + LIMIT) == [0, 1]
    lockstep.ended(1, worked=False, busy=False, now=1e9 + 1)
    assert lockstep.late(1e9 + LIMIT) == [0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 32)), min_size=1, max_size=8))
def test_drafts_are_those_that_a_rank_with_most_chunks_wants(ranks):
    lockstep, most = Lockstep(len(ranks), LIMIT), max(chunks for chunks, _ in ranks)
    for rank, (_, wanted) in enumerate(ranks):
        lockstep.ended(rank, worked=True, busy=True, now=0.0, wanted=wanted)
    chunks = [each for each, _ in ranks]
    assert lockstep.drafts(chunks) in [wanted for each, wanted in ranks if each == most]


SEATS = 4
PLACED = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), max_size=60)


@settings(max_examples=100)
@given(st.integers(1, 6), PLACED)
def test_chunks_run_where_most_is_free_or_where_their_kv_is(ranks, placed):
    it, running, homes = RankPlacement.of(ranks, 100, SEATS), [], {}
    for request, blocks, ends in placed:
        if ends and running:
            it.end(*running.pop(0))
            continue
        before, seated = list(it.free), [chunks < SEATS for chunks in it.chunks]
        room = it.room
        rank = it.place(str(request), blocks)
        assert seated[rank] or not any(seated)
        open_ranks = [free for free, seat in zip(before, seated, strict=True) if seat == seated[rank]]
        assert room == (max(open_ranks) if seated[rank] else 0)
        if before[rank] < max(open_ranks):
            assert rank == homes[request]
            assert before[rank] >= blocks
        homes[request] = rank
        running.append((rank, blocks))
        for each in range(ranks):
            own = [size for at, size in running if at == each]
            assert (it.free[each], it.chunks[each]) == (100 - sum(own), len(own))


def test_homes_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("seer.common.policy.ranks.KEPT_HOMES", 2)
    it = RankPlacement.of(2, 100, 4)
    for name in ("a", "b", "c"):
        it.end(it.place(name, 1), 1)
    assert set(it.homes) == {"b", "c"}
