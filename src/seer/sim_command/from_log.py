"""A rollout in a buffer's log as a workload: its lengths, acceptance of drafts, and times of engines' steps.

Engines report once a second how many steps they have run, and for how many tokens. Between two reports during
which an engine always had chunks, the time between them is that of its steps; least squares over all such
intervals give the times of `sim/workload.Model`. So waits, gaps, tails and orders are the simulator's own.

Invariants (tests/unit/test_sim_from_log.py asserts them):
- no time is negative, and all together add up to the time of the intervals;
- what the simulator could not run as it was is refused, with the field and the fix.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from seer.common.errors import InvalidField
from seer.common.policy.chunk_size import default_chunk
from seer.common.policy.schedule import POLICIES
from seer.common.policy.tail import tail_seconds
from seer.common.types import Capacity
from seer.report.log_reader import read_timeline
from seer.report.records import Chunk, End, Rollout, Timeline
from seer.report.view import choose_rollout
from seer.services.buffer.requests.events import EngineReported
from seer.sim.study import Task, Variant, perform
from seer.sim.workload import DISPATCH_SECONDS, Accepted, Model, Workload

INTERVALS = 8
"""Intervals between reports, a second each, that times of steps are taken from at least: there are four."""

MOST_RESPONSES = 2_000
"""A rollout with more of them is simulated only if someone asks: a policy takes seconds then."""

ROUNDS = 15
"""Times of steps are found so often, each time with errors relative to what the last ones expect."""

SLOWER = 0.1
"""Weight of an interval that took longer than expected, beside 1 of others.

Other work of a machine makes steps longer, and nothing makes them shorter; so what steps, rows and contexts
take, one beside the other, is seen best where a machine was quiet. Seven rollouts on a busy machine agreed
on it better than with equal weights.
"""

Floats = NDArray[np.float64]


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that took `total` seconds, of which the last tenth of its responses took `tail`.

    `beside`: what happened meanwhile that the simulator leaves out. `chunk_size`: the buffer's setting.
    """

    load: Workload
    variant: Variant
    chunk_size: int | None
    total: float
    tail: float
    beside: tuple[str, ...]


class _Interval(NamedTuple):
    """What an engine did in so many seconds: `read` counts tokens of contexts once for each row of a step.

    `began` chunks were placed; `there` are the seconds of all chunks that were, whether they ran or waited.
    """

    seconds: float
    there: float
    began: int
    read: float
    steps: int
    generated: int
    accepted: int
    drafted: int
    computed: int
    fetched: int

    @property
    def rows(self) -> int:
        """Requests of its steps, summed: each step brings a request one token and those accepted."""
        return self.generated - self.accepted


def read_run(log: Path, rollout_id: str) -> RealRun:
    """Read a rollout from a log, the last one without an id. Raises `InvalidField`."""
    timeline = read_timeline(log, "--from-log")
    return real_run(timeline, choose_rollout(timeline, rollout_id))


def real_run(timeline: Timeline, rollout: Rollout) -> RealRun:
    """Return what a rollout was. Raises `InvalidField` for one that cannot be simulated."""
    _check(rollout)
    engines = sorted({chunk.engine for chunk in rollout.chunks})
    if not any(each.name in engines for each in timeline.incarnations):
        fix = "joined before the log begins: give all files of the log"
        raise InvalidField("--from-log", ", ".join(engines), fix)
    intervals = [each for name in engines for each in _intervals(timeline, rollout, name)]
    if len(intervals) < INTERVALS:
        silent = not any(report.steps for reports in timeline.reports.values() for _, report in reports)
        why = "the log has no engine's steps, as of releases up to 0.4.0" if silent else "it was too short"
        fix = f"{why}: give a rollout of this release of {INTERVALS} s or more"
        raise InvalidField("--from-log", f"{len(intervals)} reports of steps", fix)
    load = _load(timeline, rollout, engines, intervals)
    return RealRun(
        load=load,
        variant=Variant(timeline.policy, drafts=bool(load.acceptance)),
        chunk_size=timeline.chunk_size,
        total=rollout.end - rollout.submitted,
        tail=tail_seconds([each.finished for each in rollout.responses if each.finished is not None]),
        beside=tuple(_beside(timeline, rollout)),
    )


def best_other(timeline: Timeline, rollout: Rollout) -> str:
    """Return a line about the policy that would have ended a rollout first, beside the one that ran; or "".

    There is none where the log does not have enough for it, or so many responses that it would take long.
    """
    if len(rollout.responses) > MOST_RESPONSES:
        return ""
    try:
        real = real_run(timeline, rollout)
    except InvalidField:
        return ""
    chunk = real.chunk_size or default_chunk(real.load.cap)
    variants = [Variant(name, real.variant.drafts) for name in POLICIES]
    totals = {each: perform(Task(real.load, each, 0, chunk)).total for each in variants}
    if (own := totals.pop(real.variant, None)) is None:
        return ""
    best = min(totals, key=lambda each: totals[each])
    return (
        f"simulated: {real.variant.label} {own:,.1f} s; "
        f"the best other policy, {best.label}, {totals[best]:,.1f} s (seer sim --from-log)"
    )


def _check(rollout: Rollout) -> None:
    responses, name = rollout.responses, rollout.rollout_id
    if rollout.open or any(each.turns for each in responses):
        fix = "has turns, or prompts that came one by one: give a rollout that was submitted whole"
        raise InvalidField("--rollout", name, fix)
    if not all(each.max_tokens for each in responses):
        raise InvalidField(
            "--rollout", name, "was submitted before the log begins: give all files of the log"
        )
    missing = sum(each.finished is None or not each.generated for each in responses)
    if missing:
        found = f"{missing} of its {len(responses)} responses have no end in the log"
        fix = f"{found}, as they still ran, failed or were cancelled: give a rollout that has ended"
        raise InvalidField("--rollout", name, fix)


def _beside(timeline: Timeline, rollout: Rollout) -> Iterator[str]:
    """Yield what the simulator does not know of."""
    start, end = rollout.submitted, rollout.end
    if lost := sum(chunk.how is not End.KEPT for chunk in rollout.chunks):
        yield f"{lost} chunks were lost"
    if others := sum(
        each.response.rollout is not rollout and each.start < end and each.end > start
        for each in timeline.chunks
    ):
        yield f"{others} chunks of other rollouts"
    yield from (span.text for span in timeline.spans if span.start < end and span.end > start)


# --- what engines did ----------------------------------------------------------------------


def _intervals(timeline: Timeline, rollout: Rollout, name: str) -> Iterator[_Interval]:
    """Yield an engine's intervals between reports, of those in which it always had chunks."""
    chunks = sorted((each for each in timeline.chunks if each.engine == name), key=lambda each: each.start)
    busy = _busy(chunks)
    begins = [begin for begin, _ in busy]
    starts, ends, contexts, tokens = np.array(
        [(each.start, max(each.end, each.start + 1e-9), each.context, each.tokens) for each in chunks]
    ).T
    for (since, before), (until, after) in pairwise(timeline.reports.get(name, [])):
        place = bisect_right(begins, since) - 1
        if since < rollout.submitted or until > rollout.end or place < 0 or busy[place][1] < until:
            continue
        middle = (since + until) / 2
        there = (starts <= middle) & (middle < ends)
        share = (middle - starts[there]) / (ends[there] - starts[there])
        context = float(np.mean(contexts[there] + share * tokens[there]))
        placed = float(np.maximum(0, np.minimum(ends, until) - np.maximum(starts, since)).sum())
        began = int(np.sum((starts >= since) & (starts < until)))
        counts = [new - old for old, new in zip(_counts(before), _counts(after), strict=True)]
        if counts[0] > 0:  # else it is another incarnation, or did nothing
            found = _Interval(until - since, placed, began, 0.0, *counts)
            yield found._replace(read=context * (found.rows + found.drafted))  # what waits is not read


def _counts(report: EngineReported) -> tuple[int, ...]:
    """Return counts in the order of `_Interval`."""
    return (
        report.steps, report.generated_tokens, report.accepted_tokens, report.drafted_tokens,
        report.computed_tokens, report.pool_tokens,
    )  # fmt: skip


def _busy(chunks: Sequence[Chunk]) -> list[tuple[float, float]]:
    """Return when an engine always had chunks, which are sorted by start."""
    found: list[tuple[float, float]] = []
    for chunk in chunks:
        if found and chunk.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], chunk.end)
        else:
            found.append((chunk.start, chunk.end))
    return found


def _load(
    timeline: Timeline, rollout: Rollout, engines: Sequence[str], intervals: Sequence[_Interval]
) -> Workload:
    groups: dict[int, list[int]] = defaultdict(list)
    for response in rollout.responses:
        groups[response.prompt].append(response.generated)
    prompts = {response.prompt: response.prompt_len for response in rollout.responses}
    capacities = [each.capacity for each in timeline.incarnations if each.name in engines]
    return Workload(
        name=rollout.rollout_id,
        instances=len(engines),
        groups=len(groups),
        group_size=max(map(len, groups.values())),
        cap=max(response.max_tokens for response in rollout.responses),
        model=_model(intervals, capacities),
        lengths=tuple(map(tuple, groups.values())),
        prompt=min(prompts.values()),
        prompts=tuple(prompts.values()),
        pool=any(each.fetched for each in intervals),
        ranks=capacities[0].parts,
        dispatch=_dispatch(timeline.policy, intervals),
        acceptance=_acceptance(intervals) if any(each.drafted for each in intervals) else (),
    )


def _model(intervals: Sequence[_Interval], capacities: Sequence[Capacity]) -> Model:
    counts = [(each.steps, each.rows + each.drafted, each.read, each.computed) for each in intervals]
    work, seconds = np.array(counts, np.float64), np.array([each.seconds for each in intervals])
    step, request, attend, prefill = map(float, _fit(work, seconds))
    if prefill > request:  # prompts are too few to tell: a token of them takes no longer than a row
        work[:, 1] += work[:, 3]
        step, request, attend = map(float, _fit(work[:, :3], seconds))
        prefill = request
    size = capacities[0].block_size
    return Model(
        step=max(step, 1e-6), request=request, attend=attend, prefill=prefill,
        kv=0.0, row=0.0, weights=0.0, pull=0.0,
        kv_tokens=round(statistics.fmean(each.kv_blocks for each in capacities)) * size,
        block_size=size,
        max_num_seqs=max(each.max_num_seqs for each in capacities),
        draft_tokens=max(each.draft_tokens for each in capacities),
    )  # fmt: skip


def _fit(work: Floats, seconds: Floats) -> Floats:
    """Return the time of a unit of each kind of work [intervals, kinds], the first of which are steps.

    Other work of a machine makes its steps longer by a factor, so it is their relative errors that are least;
    in the end all have that factor on average.
    """
    expected, weights = work[:, 0] * seconds.sum() / work[:, 0].sum(), np.ones(len(seconds))
    for _ in range(ROUNDS):
        times = _least_squares(work * (weights / expected)[:, None], seconds * weights / expected)
        expected = np.maximum(work @ times, 0.01 * seconds)
        weights = np.where(seconds > expected, math.sqrt(SLOWER), 1.0)
    expected = work @ times
    return np.asarray(times * seconds.sum() / expected.sum())


def _least_squares(work: Floats, seconds: Floats) -> Floats:
    """Return the times that are nearest, with 0 for those that would be negative."""
    scale = np.maximum(work.mean(axis=0), 1e-12)
    kinds = list(range(work.shape[1]))
    while True:
        found = np.linalg.lstsq(work[:, kinds] / scale[kinds], seconds, rcond=None)[0]
        if len(kinds) == 1 or found.min() >= 0:
            break
        kinds.pop(int(found.argmin()))
    times = np.zeros(work.shape[1])
    times[kinds] = found / scale[kinds]
    return times


def _dispatch(policy: str, intervals: Sequence[_Interval]) -> float:
    """Return how long a chunk was placed and did not run: messages, its KV's way, a wait for blocks.

    Where engines have queues of their own, most of that is waiting, which the simulator does by itself.
    """
    if policy in POLICIES and not POLICIES[policy].admission:
        return DISPATCH_SECONDS
    waited = sum(each.there - each.seconds * each.rows / each.steps for each in intervals)
    return max(0.0, waited / max(sum(each.began for each in intervals), 1))


def _acceptance(intervals: Sequence[_Interval]) -> tuple[Accepted, ...]:
    """Return what drafts brought, by batches and contexts that differ by a factor of two at most."""
    alike: dict[tuple[int, ...], list[_Interval]] = defaultdict(list)
    for each in intervals:
        if each.rows > 0:
            alike[tuple(round(math.log2(size)) for size in _sizes(each))].append(each)
    totals = [_Interval(*np.array(alike[key], np.float64).sum(axis=0).tolist()) for key in sorted(alike)]
    return tuple(
        Accepted(*_sizes(each), each.generated / each.rows, each.drafted / each.rows) for each in totals
    )


def _sizes(each: _Interval) -> tuple[float, float]:
    """Return how many requests ran, and how many tokens they had, on average."""
    return max(each.rows / each.steps, 1.0), max(each.read / (each.rows + each.drafted), 1.0)
