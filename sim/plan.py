"""How many instances a rollout needs to end within a given time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from msgspec.structs import replace

from seer.common.errors import InvalidField
from seer.sim import turns
from seer.sim.bound import of_trajectories
from seer.sim.study import Task, Variant, run_all
from seer.sim.workload import Workload

GROWTH = 1.25
"""The search starts at the lower bound, which is seldom far off, and grows by this factor until the time
is met."""


def instances_for(
    load: Workload,
    variant: Variant,
    seconds: float,
    seeds: int,
    chunk_size: int,
    workers: int,
    on_result: Callable[[int, float], None],
) -> int:
    """Return the least number of instances with which the median rollout ends within `seconds`.

    Found by bisection, so a smaller number that suffices by chance may be missed. `on_result` is called with
    (instances, seconds) of each number tried. Raises `InvalidField` if no number suffices.
    """
    seeds = 1 if load.lengths else seeds
    least = [of_trajectories(load, turns.draw(load, seed), variant.drafts) for seed in range(seeds)]
    alone = statistics.median(each.alone for each in least)
    if alone > seconds:
        fix = f"no number of instances suffices: the longest response alone takes {alone:.0f} s"
        raise InvalidField("--plan", seconds, fix)

    def median(instances: int) -> float:
        tasks = [Task(replace(load, instances=instances), variant, seed, chunk_size) for seed in range(seeds)]
        found = statistics.median(run.total for run in run_all(tasks, workers, lambda _: None))
        on_result(instances, found)
        return found

    most = max(sum(map(len, load.draw(seed))) for seed in range(seeds))  # one for each response
    short = max(math.ceil(statistics.median(each.work for each in least) / seconds), 1) - 1
    enough = min(short + 1, most)
    while (found := median(enough)) > seconds:
        if enough == most:
            fix = f"even with an instance for each of {most} responses it takes {found:.0f} s"
            raise InvalidField("--plan", seconds, fix)
        short, enough = enough, min(most, math.ceil(enough * GROWTH))
    while enough - short > 1:
        middle = (short + enough) // 2
        if median(middle) <= seconds:
            enough = middle
        else:
            short = middle
    return enough
