"""Trajectories of many turns: how much each turn generates, and what tools do in between.

A response, as `Workload.draw` has it, is cut at random places, (turns - 1) / mean of them for each token, so
long trajectories have more turns. After each turn but the last a tool adds `tool_tokens` tokens and takes
`tool_seconds`, on average; both are log-normal with `tool_sigma`. A full context ends its trajectory.

Invariants (tests/unit/test_sim_turns.py asserts them):
- trajectories are a function of (workload, seed); other `tool_seconds` change no token, and only scale waits;
- one turn is the response that `Workload.draw` has, and waits for nothing;
- prompt, output and what tools add never exceed `prompt` + `cap`.
"""

from __future__ import annotations

import statistics
from itertools import chain
from typing import NamedTuple

import numpy as np

from seer.sim.workload import Workload

_STREAM = 1
"""Makes the numbers drawn here others than those of lengths with the same seed."""


class Turn(NamedTuple):
    """`generated` tokens; then a tool adds `tool_tokens`, after `tool_seconds`."""

    generated: int
    tool_tokens: int = 0
    tool_seconds: float = 0.0


Trajectory = tuple[Turn, ...]


def draw(load: Workload, seed: int) -> list[list[Trajectory]]:
    """Return the trajectories by group."""
    rng = np.random.default_rng((_STREAM, seed))
    lengths = load.draw(seed)
    if load.turns == 1:
        return [[(Turn(length),) for length in group] for group in lengths]
    mean = statistics.fmean(chain.from_iterable(lengths)) if load.lengths else load.mean
    cuts = (load.turns - 1) / mean
    return [[_cut(load, length, cuts, rng) for length in group] for group in lengths]


def generated(trajectory: Trajectory) -> int:
    """Return the tokens that all turns together generate."""
    return sum(turn.generated for turn in trajectory)


def _cut(load: Workload, length: int, cuts: float, rng: np.random.Generator) -> Trajectory:
    """Return a trajectory of at most `length` generated tokens; `cuts` for each token, on average."""
    places = np.unique(rng.integers(1, max(length, 2), rng.poisson(cuts * length)))
    parts = np.diff(places, prepend=0, append=length)
    scores = load.tool_sigma * rng.standard_normal((len(parts), 2)) - load.tool_sigma**2 / 2
    found: list[Turn] = []
    room = load.cap
    for part, (size, wait) in zip(parts.tolist(), np.exp(scores).tolist(), strict=True):
        if part < 1 or room < 1:
            break
        added = round(min(load.tool_tokens * size, load.cap))
        found.append(Turn(min(part, room), added, load.tool_seconds * wait))
        room -= part + added
    found[-1] = Turn(found[-1].generated)
    return tuple(found)
