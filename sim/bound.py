"""A lower bound on the time of a rollout.

Invariants (tests/unit/test_sim_study.py asserts them):
- no schedule of `Model`'s engines ends before `of_rollout(...).seconds(instances)`;
- more instances, and drafts, never raise it; a longer longest response never lowers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seer.common.errors import InvalidField
from seer.sim.drafting import DRAFT_SHARE, GAINS, kind_of
from seer.sim.turns import Trajectory, generated
from seer.sim.workload import Model, Workload

Floats = NDArray[np.float64]


def lower_bound(tokens: int, longest: int, capacity: float, seconds_per_token: float) -> float:
    """Return the larger of the seconds for all work at full capacity, and for the longest response alone.

    `tokens` of all responses, and of the `longest` one; `capacity`: tokens/s of all instances together,
    each at the best batch that its KV holds; `seconds_per_token`: of a request that runs alone on an
    instance. Both with the drafts that the engines use. Raises `InvalidField`.
    """
    for name, value in (("tokens", tokens), ("longest", longest), ("seconds_per_token", seconds_per_token)):
        if value < 0:
            raise InvalidField(name, value, "must not be negative")
    if not capacity > 0:
        raise InvalidField("capacity", capacity, "must be positive")
    if longest > tokens:
        raise InvalidField("longest", longest, f"cannot exceed tokens = {tokens}")
    return max(tokens / capacity, longest * seconds_per_token)


@dataclass(frozen=True, slots=True)
class Least:
    """What a rollout needs at least: `work` in instance-seconds, `alone` seconds for any response alone."""

    tokens: int
    longest: int
    work: float
    alone: float

    def seconds(self, instances: int) -> float:
        """Return the lower bound in seconds on this number of instances."""
        return lower_bound(
            self.tokens, self.longest, self.tokens * instances / self.work, self.alone / self.longest
        )


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
    with all responses of the group in the tree.
    """
    model = load.model
    flat = np.array([length for group in lengths for length in group])
    longest = int(flat.max())
    # How many responses have a token 0, 1, 2, ..., and their context in the middle of that step.
    alive = flat.size - np.bincount(flat).cumsum()[:-1]
    context: Floats = load.prompt + np.arange(longest, dtype=np.float64) + 0.5
    gains = GAINS[kind_of(max(map(len, lengths)) - 1, probe=False)] if drafts else np.ones(1)
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
    return Least(int(flat.sum()), longest, work + flat.size * prefill, alone + prefill)


def _cheapest(
    model: Model,
    context: Floats,
    gains: Floats,
    share: Floats,
    part: float,
) -> Floats:
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
