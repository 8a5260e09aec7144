"""What a small rollout has of the engines beside another trainer's long queue, and what sharing costs.

`--queued` responses of one trainer wait and run on a quarter of a workload's modelled engines, of 64 seats;
later another trainer submits `--small` ones. Printed are the latter's part of what runs in its first
10, 60 and `SECONDS` seconds, when that part was 0.45, when its first response ended, and how many did in all:
with shares, in one queue, and alone on all engines. `--halves`: how long two trainers take to run half of the
workload's prompts each, by shares, against one trainer that runs all. Prints JSON; seconds are the model's.

    python bench/scheduling/shares.py --queued 200000
    python bench/scheduling/shares.py --halves --workloads qwen2-vl-72b moonlight
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from policy_sweep import quarter

from seer.common.policy.schedule import POLICIES
from seer.services.buffer.requests import events
from seer.sim.cluster import Cluster
from seer.sim.workload import WORKLOADS, Workload

STEP = 0.25
"""Seconds between looks at what each trainer has."""

SECONDS = 300
"""How long the second trainer is watched."""

AIM = 0.45

COMES = 400.0
"""When the second trainer submits its prompts: chunks do not end at once any more, as the first ones did."""

Part = tuple[str, float, list[list[int]]]
"""The share by which prompts run, when they are submitted, and their responses' lengths."""


class Shared(Cluster):
    """Runs rollouts of several trainers: to their ends if all begin at once, else while the last is watched.

    `had`: by time, what each rollout has of the engines; `ends`: when its responses ended.
    """

    def __init__(self, load: Workload, parts: Sequence[Part]) -> None:
        super().__init__(
            load,
            POLICIES["seer"],
            [group for _, _, lengths in parts for group in lengths],
            max(256, load.cap // 64),
        )
        self._parts = parts
        self.lengths = self.totals = {
            f"{part}/{number}#{index}": length
            for part, (_, _, lengths) in enumerate(parts)
            for number, group in enumerate(lengths)
            for index, length in enumerate(group)
        }
        self.had: list[tuple[float, list[int]]] = []
        self.ends: list[list[float]] = [[] for _ in parts]

    def _submit(self) -> None:
        for part, (_, when, _) in enumerate(self._parts):
            self._at(when, self._come, part)
        if self._parts[-1][1]:
            self._at(self._parts[-1][1] + SECONDS, self._stop)
        self._at(0.0, self._look)

    def _stop(self) -> None:
        self._responses = 0  # `run` ends

    def _come(self, part: int) -> None:
        share, _, lengths = self._parts[part]
        specs = [events.GroupSpec(str(number), self.load.prompt) for number in range(len(lengths))]
        size = len(lengths[0])
        self._tell(events.GroupsSubmitted("t", str(part), size, self.load.cap, specs, share=share))

    def _look(self) -> None:
        found = [0] * len(self._parts)
        for ids in self.buffer._running.values():
            for request_id in ids:
                found[int(request_id.partition("/")[0])] += self.buffer.requests[request_id].cost
        self.had.append((self.now, found))
        self._at(self.now + STEP, self._look)

    def _delivered(self, request_id: str) -> None:
        part = int(request_id.partition("/")[0])
        self.ends[part].append(self.now)


def shrunk(name: str) -> Workload:
    """Return a workload's quarter, with engines of few seats: so a few thousand responses wait."""
    load = WORKLOADS[name]()
    load = quarter(name, load.group_size, load.between)
    return replace(load, model=replace(load.model, max_num_seqs=64))


def small(load: Workload, queued: int, requests: int, seed: int) -> dict[str, Any]:
    """Return how a small rollout fares beside a long queue."""
    size = load.group_size
    lengths = replace(load, groups=(queued + requests) // size).draw(seed)
    few = requests // size
    found: dict[str, Any] = {"workload": load.name, "queued": queued, "small": requests, "seed": seed}
    for name, parts in {
        "by_shares": [("a", 0.0, lengths[few:]), ("b", COMES, lengths[:few])],
        "in_one_queue": [("a", 0.0, lengths[few:]), ("a", COMES, lengths[:few])],
        "alone": [("b", COMES, lengths[:few])],
    }.items():
        cluster = Shared(load, parts)
        cluster.run()
        ends = cluster.ends[-1]
        found[name] = {"first_response": round(ends[0] - COMES, 1) if ends else None, "ended": len(ends)}
        if len(parts) > 1:
            found[name] |= part_of_engines(cluster)
    return found


def part_of_engines(cluster: Shared) -> dict[str, Any]:
    """Return what the second rollout has of what runs, since it was submitted."""
    parts = [(now - COMES, had[1] / max(1, sum(had))) for now, had in cluster.had if now > COMES]
    figures: dict[str, Any] = {}
    for seconds in (10, 60, SECONDS):
        first = [part for now, part in parts if now <= seconds]
        figures[f"part_in_{seconds}_s"] = round(sum(first) / len(first), 3)
    return figures | {"aim_after": next((round(now, 1) for now, part in parts if part >= AIM), None)}


def halves(load: Workload, seed: int) -> dict[str, Any]:
    """Return what it costs that two trainers share the engines for half of the prompts each."""
    lengths = load.draw(seed)
    middle = len(lengths) // 2
    times, moved = {}, {}
    for name, share in {"by_shares": "b", "in_one_queue": "a"}.items():
        parts = [("a", 0.0, lengths[:middle]), (share, 0.0, lengths[middle:])]
        outcome = Shared(load, parts).run()
        times[name], moved[name] = outcome.total, outcome.counts["migrations"]
    return {
        "workload": load.name,
        "seed": seed,
        "times_as_long": round(times["by_shares"] / times["in_one_queue"], 4),
        "migrations": round(moved["by_shares"] / max(1, moved["in_one_queue"]), 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["qwen2-vl-72b"])
    parser.add_argument("--queued", type=int, default=4000)
    parser.add_argument("--small", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--halves", action="store_true")
    given = parser.parse_args()
    loads = [shrunk(name) for name in given.workloads]
    found = [
        halves(load, given.seed) if given.halves else small(load, given.queued, given.small, given.seed)
        for load in loads
    ]
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
