"""How far the estimate of a rollout's end is from what happened, over recorded rollouts.

A recorded rollout is a buffer's log (`seer sim --log`, `buffer.log` of a real one). Its events go through the
machines again, and whenever a share of the responses has finished the estimate of that moment is compared
with the time that was in fact left. Prints JSON: for each log how much longer it was expected to take, in
percent of what was left, when 25, 50 and 75 % had finished; and medians of the absolute values by policy.
`real_times_percent` is the same as if the mean time of the tokens that were still to come had been known.

    python bench/scheduling/eta.py LOG ...
    python bench/scheduling/eta.py LOG ... --quiet   # simulated with their lengths: steps' times do not vary
    python bench/scheduling/eta.py --simulate     # the paper's three clusters, whole and a quarter of them
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.hardware import machine
from msgspec.structs import replace
from policy_sweep import CHUNK

from seer.common.policy.chunk_size import default_chunk
from seer.common.policy.eta import Pace, TokenSeconds
from seer.services.buffer.log.rows import read
from seer.services.buffer.rollout_progress import Survey, survey
from seer.services.buffer.statistics import Statistics
from seer.sim.study import Task, Variant, perform
from seer.sim.workload import WORKLOADS
from seer.sim_command.from_log import read_run

SHARES = (0.25, 0.5, 0.75)
POLICIES = ("seer", "seer-paper", "static")

QUIET = {"step": 0.016, "request": 5e-5, "row": 5e-5, "kv": 9e-7, "attend": 3e-7, "prefill": 8e-5}
"""Times of the shipped model's steps (`sim.workload.Model`), from seconds without other work on a core."""


class Moment(NamedTuple):
    """What was expected at one moment."""

    share: float
    time: float
    eta: float | None
    seconds: TokenSeconds | None


class Heard(Pace):
    """A pace that keeps what it was told: when, and what an engine did."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[float, float, int, float, float]] = []

    def add(self, now: float, seconds: float, tokens: int, requests: float, kv_tokens: float) -> None:
        """Count it, and keep it."""
        super().add(now, seconds, tokens, requests, kv_tokens)
        self.all.append((now, seconds, tokens, requests, kv_tokens))

    def slower(self, moment: Moment) -> float:
        """Return how many times longer tokens took after a moment than was expected of them then."""
        later, of = [each for each in self.all if each[0] > moment.time and each[2]], moment.seconds
        if of is None or not later:
            return 1.0
        expected = sum(
            (of.base + of.request * requests + of.kv_token * kv) * tokens / max(requests, 1)
            for _, _, tokens, requests, kv in later
        )
        return sum(seconds for _, seconds, *_ in later) / expected


def moments(path: Path) -> tuple[str, list[Moment], Heard, float]:
    """Return the policy, what was expected whenever a share had finished, the pace, and the rollout's end."""
    header, lines = read(path)
    machines = header.machine()
    statistics_, seen, end = Statistics(machines), [], 0.0
    statistics_.pace = heard = Heard()
    for line in lines:
        out = machines.apply(line.event, line.time)
        statistics_.record(line.time, line.event, out)
        for rollout in machines.requests.rollouts.values():
            if not rollout.requests or rollout.finished < SHARES[min(len(seen), 2)] * rollout.requests:
                continue
            if len(seen) < len(SHARES):
                *_, found = survey(machines.requests, statistics_, line.time)
                assert isinstance(found, Survey)
                eta = found.etas.get(rollout.rollout_id)
                seen.append(Moment(SHARES[len(seen)], line.time, eta, heard.token_seconds()))
            if rollout.finished == rollout.requests and not end:
                end = line.time
    return header.policy, seen, heard, end


def errors(path: Path) -> dict[str, Any]:
    """Return the figures of one log."""
    policy, seen, heard, end = moments(path)

    def percent(each: Moment, slower: float = 1.0) -> float | None:
        return None if each.eta is None else round(100 * (each.eta * slower / (end - each.time) - 1), 1)

    return {
        "log": path.stem,
        "policy": policy,
        "error_percent": {f"{each.share:.0%}": percent(each) for each in seen},
        "real_times_percent": {f"{each.share:.0%}": percent(each, heard.slower(each)) for each in seen},
        "left_seconds": {f"{each.share:.0%}": round(end - each.time, 1) for each in seen},
    }


def simulated(folder: Path) -> Iterator[Path]:
    """Simulate rollouts and yield their logs."""
    for name, make in WORKLOADS.items():
        load = make()
        small = replace(load, instances=load.instances // 4, groups=load.groups // 4)
        for size, scaled in (("whole", load), ("quarter", small)):
            for policy in POLICIES:
                path = folder / f"{name}-{size}-{policy}.jsonl"
                with path.open("wb") as file:
                    perform(Task(scaled, Variant(policy), 0, CHUNK), file)
                yield path


def quiet(log: Path, folder: Path) -> Path:
    """Simulate a real rollout with the lengths that it had, and return its log."""
    real = read_run(log, "")
    load = replace(real.load, model=replace(real.load.model, **QUIET))
    path = folder / log.name
    with path.open("wb") as file:
        perform(Task(load, real.variant, 0, real.chunk_size or default_chunk(load.cap)), file)
    return path


def medians(found: Sequence[dict[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """Return the medians of absolute values by policy, of logs that have them all."""
    kept = [each for each in found if None not in each[key].values()]
    return {
        policy: {
            f"{share:.0%}": round(
                statistics.median(
                    abs(each[key][f"{share:.0%}"]) for each in kept if each["policy"] == policy
                ),
                1,
            )
            for share in SHARES
        }
        for policy in sorted({each["policy"] for each in kept})
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="*", type=Path)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        logs = [quiet(path, Path(name)) if options.quiet else path for path in options.logs]
        found = [errors(path) for path in logs]
        if options.simulate:
            found += [errors(path) for path in simulated(Path(name))]
    keys = ("error_percent", "real_times_percent")
    medians_ = {f"median_absolute_{key}": medians(found, key) for key in keys}
    print(json.dumps({"machine": machine("numpy"), **medians_, "logs": found}, indent=1))


if __name__ == "__main__":
    main()
