"""A lower bound on the time of a rollout.

It is the largest of three: all work in full instances; the longest response alone; and both weighed against
each other, as a long response runs in some batch. For the third, let w be a weight of each response, W their
sum, N the instances, T the time. Each response runs for at most T, so all steps together have

    sum of (1 + weights in the batch) x the step's seconds <= (N + W) x T.

In a batch with weight v, R rows and M tokens of KV, a step counts (1 + v)(a + bR + cM). Whatever the batch,
that is at least the sum of what `_charges` charges its responses for their tokens: those with a weight the
less of a full batch and of a small one. There, with Y = bR + cM, a + vY >= 2 sqrt(a v Y), and the root of a
product of two sums is at least the sum of the products' roots. So T is at least all charges / (N + W).

Invariants (tests/unit/test_sim_study.py and tests/property/test_sim_bound.py assert them):
- no schedule of `Model`'s engines ends before `of_rollout(...).seconds(instances)`;
- more instances, and drafts, never raise it; a longer longest response never lowers it;
- no batch that fits into memory takes less than its responses are charged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from seer.common.policy.rollout_bound import lower_bound
from seer.sim.drafting import DRAFT_SHARE, GAINS, kind_of
from seer.sim.turns import Trajectory, generated
from seer.sim.workload import Model, Workload

Floats = NDArray[np.float64]

LONG = (0.5, 0.8, 0.9)
"""Responses above such shares of the longest have a weight, in proportion to what they have beyond that."""

LEVELS = 8
"""Different weights of such responses."""

WEIGHTS = tuple(2.0**power for power in range(-1, 7))
"""Sums of all weights."""

POINTS = 257
"""Lengths at which charges are computed. They are concave: in between, the straight line is below them."""


@dataclass(frozen=True, slots=True)
class Least:
    """What a rollout needs at least: `work` in instance-seconds, `alone` seconds for any response alone.

    `weighed`: sums of weights, and of all charges with them.
    """

    tokens: int
    longest: int
    work: float
    alone: float
    weighed: tuple[tuple[float, float], ...] = ()

    def seconds(self, instances: int) -> float:
        """Return the lower bound in seconds on this number of instances."""
        simple = lower_bound(
            self.tokens, self.longest, self.tokens * instances / self.work, self.alone / self.longest
        )
        return float(max([simple, *(charges / (instances + weights) for weights, charges in self.weighed)]))


def of_trajectories(load: Workload, trajectories: Sequence[Sequence[Trajectory]], drafts: bool) -> Least:
    """Return the least that trajectories (by group) need; what tools add to their contexts is not counted."""
    lengths = [[generated(each) for each in group] for group in trajectories]
    away = [sum(turn.tool_seconds for turn in each) for group in trajectories for each in group]
    return of_rollout(load, lengths, drafts, away)


def of_rollout(
    load: Workload, lengths: Sequence[Sequence[int]], drafts: bool, away: Sequence[float] = (0.0,)
) -> Least:
    """Return the least that responses of these lengths (by group) need on the workload's engines.

    `away`: seconds that each waits for its tools, or one number for all. Every row and every token of KV that
    is read takes its time; there are as few steps as memory (`kv_tokens`, `max_num_seqs`) allows, all with
    full batches. With drafts each token uses the draft length that is cheapest for it, accepted as often as
    with all responses of the group in the tree. Of a recorded rollout, prompts and drafted tokens do not
    count, and acceptance is the best that was measured.
    """
    if load.prompts:  # responses share them
        load = replace(load, model=replace(load.model, prefill=0.0))
    model = load.model
    flat = np.array([length for group in lengths for length in group])
    longest = int(flat.max())
    # How many responses have a token 0, 1, 2, ..., and their context in the middle of that step.
    alive = flat.size - np.bincount(flat).cumsum()[:-1]
    context: Floats = load.prompt + np.arange(longest, dtype=np.float64) + 0.5
    gains = np.ones(1)
    if drafts and load.acceptance:
        gains = np.array([max(each.tokens for each in load.acceptance)])
    elif drafts:
        gains = GAINS[kind_of(max(map(len, lengths)) - 1, probe=False)]
    # max(0, rows' compute - weights) is at least any part of the difference, the number of steps at least
    # what either limit asks for: each pair gives a bound, and one of them is the best of all mixtures.
    least_hidden = min(1.0, model.step / model.weights) if model.weights else 1.0
    work = max(
        float((alive * _cheapest(model, context, gains, share, part)).sum())
        for share in (context / model.kv_tokens, np.full(longest, 1 / model.max_num_seqs))
        for part in (0.0, least_hidden)
    )
    alone = max(
        float((_cheapest(model, context, gains, np.ones(longest), part).cumsum()[flat - 1] + away).max())
        for part in (0.0, 1.0)
    )
    prefill = load.prompt * model.prefill
    parts = (0.0, least_hidden)
    weighed = tuple(pair for part in parts for pair in _weighed(load, np.sort(flat), gains, part))
    return Least(int(flat.sum()), longest, work + flat.size * prefill, alone + prefill, weighed)


def _weighed(
    load: Workload, lengths: NDArray[np.int64], gains: Floats, part: float
) -> Iterator[tuple[float, float]]:
    """Yield sums of weights and of charges, for several choices of weights; `lengths` are sorted."""
    longest = int(lengths[-1])
    places: Floats = np.linspace(0.0, longest, POINTS)
    wide = places[1]

    def charges(weight: float, some: NDArray[np.int64]) -> float:
        """Return what responses of these lengths are charged, prefill included."""
        each = _charges(load, places, gains, part, weight)
        before = np.append(0.0, (wide * (each[1:] + each[:-1]) / 2).cumsum())
        place = np.minimum((some / wide).astype(np.intp), POINTS - 2)
        beyond = some - places[place]
        slope = (each[place + 1] - each[place]) / wide
        tokens = before[place] + beyond * (each[place] + slope * beyond / 2)
        return float(tokens.sum()) + (1 + weight) * load.prompt * load.model.prefill * some.size

    for share in LONG:
        level = np.clip(np.ceil(LEVELS * (lengths / longest - share) / (1 - share)), 0, LEVELS)
        sets = [lengths[level == each] for each in range(LEVELS + 1)]
        light = charges(0.0, sets[0])
        for total in WEIGHTS:
            unit = total / level.sum()
            yield (
                total,
                light + sum(charges(n * unit, some) for n, some in enumerate(sets) if n and some.size),
            )


def _charges(load: Workload, tokens: Floats, gains: Floats, part: float, weight: float) -> Floats:
    """Return what a token after so many others is charged at least, with this weight of its response.

    In a full batch others have the rest of the memory, of which each takes no more than the longest response.
    """
    model = load.model
    context = load.prompt + tokens
    most = load.prompt + float(tokens[-1])
    step = model.step - part * model.weights
    row = model.request + part * model.row
    shared = weight * (step + (model.kv + row / most) * model.kv_tokens) + step * context / model.kv_tokens
    least = np.full(len(context), np.inf)
    for drafted, gain in enumerate(gains):
        own = (1 + drafted) * row + model.read(1, drafted) * context
        small = weight * step + 2 * np.sqrt(step * weight * own)
        alone = weight * own >= step  # then no other shares the batch
        small = np.where(alone, step + weight * (step + own), small)
        seconds = own + (np.minimum(shared, small) if weight else shared)
        least = np.minimum(least, seconds * (1 + DRAFT_SHARE * (drafted > 0)) / gain)
    return least


def _cheapest(model: Model, context: Floats, gains: Floats, share: Floats, part: float) -> Floats:
    """Return the seconds of a token at each context length, with the draft length that is best there.

    `share` is the request's share of a step; `part` is the part of compute beyond reading weights to count.
    """
    least = np.full(len(context), np.inf)
    for drafted, gain in enumerate(gains):
        fixed = (model.step - part * model.weights) * share
        row = (1 + drafted) * (model.request + part * model.row)
        seconds = fixed + row + model.read(1, drafted) * context
        least = np.minimum(least, seconds * (1 + DRAFT_SHARE * (drafted > 0)) / gain)
    return least
