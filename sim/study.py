"""Comparison of policies on one workload: runs over several seeds, and their summary.

Invariants (tests/unit/test_sim_study.py asserts them):
- with the same seed every variant has the same lengths, and all ratios are of such pairs;
- results do not depend on the number of worker processes;
- the baseline, `static` without drafts, is always among the variants.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import BinaryIO, Protocol

import msgspec

from seer import __version__
from seer.common.errors import InvalidField, SeerError
from seer.common.policy.schedule import POLICIES, oracle
from seer.services.buffer.log import rows
from seer.services.buffer.requests.events import Event
from seer.services.buffer.requests.instructions import Instruction
from seer.sim import turns
from seer.sim.bound import of_trajectories
from seer.sim.cluster import Cluster, Outcome
from seer.sim.turn_cluster import TurnCluster
from seer.sim.workload import Workload

ORACLE = "oracle"
"""The policy that knows all lengths; not in `POLICIES`, as no real system can have it."""

CURVE = 100
"""Points of a completion curve."""

_T_975 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23,
    2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09,
)  # fmt: skip
"""Student's t at 97.5 %, by degrees of freedom from 1; the last value is used for more."""


class Variant(msgspec.Struct, frozen=True):
    """A policy, without or with drafts."""

    policy: str
    drafts: bool = False

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.policy} + drafts" if self.drafts else self.policy


BASELINE = Variant("static")


class Task(msgspec.Struct, frozen=True):
    """One run. `traced`: keep samples and spans of all instances."""

    load: Workload
    variant: Variant
    seed: int
    chunk_size: int
    traced: bool = False


class Run(msgspec.Struct, omit_defaults=True):
    """The result of one run, in seconds; `bound` is its lower bound, `curve` when 0, 1, ... % had ended."""

    variant: Variant
    seed: int
    total: float
    tail: float
    bound: float
    tokens: int
    counts: dict[str, float]
    prediction: dict[str, float]
    curve: list[float]
    trace: Outcome | None = None


class Timed(Protocol):
    """Anything that took `total` seconds."""

    total: float


class Ratio(msgspec.Struct):
    """A speedup: geometric mean over seeds, and its paired 95 % confidence interval if there are two or
    more.
    """

    mean: float
    low: float | None = None
    high: float | None = None


class Summary(msgspec.Struct, kw_only=True):
    """A variant over all seeds. Seconds; `tail_ratio`: of mean tails, None if the baseline's is 0.

    `error` is the mean |ln(length / estimate)| over the `predicted` share of responses. Of contexts,
    `computed_tokens` were computed, again or not, and `pulled_tokens` came from the pool; instances ran
    nothing for an `idle` share of the time.
    """

    variant: Variant
    seeds: int
    total: float
    total_deviation: float
    tail: float
    tail_deviation: float
    tail_ratio: float | None
    speedup: Ratio
    speedup_over_first: Ratio
    efficiency: float
    preemptions: float
    migrations: float
    pulled_terabytes: float
    predicted: float
    error: float
    computed_tokens: float
    pulled_tokens: float
    idle: float


def perform(task: Task, log: BinaryIO | None = None) -> Run:
    """Simulate one rollout; what its buffer is told and answers is written to `log`, as a real one's is."""
    load, variant = task.load, task.variant
    drawn = turns.draw(load, task.seed)
    bound = of_trajectories(load, drawn, variant.drafts).seconds(load.instances)
    known: dict[str, int] = {}
    policy = oracle(known) if variant.policy == ORACLE else POLICIES[variant.policy]
    every = bound / 200 if task.traced else 0.0
    cluster: Cluster
    if load.turns > 1:
        cluster = TurnCluster(load, policy, drawn, task.chunk_size, variant.drafts, every)
    else:
        lengths = [[turns.generated(each) for each in group] for group in drawn]
        cluster = Cluster(load, policy, lengths, task.chunk_size, variant.drafts, every)
    known |= cluster.totals
    if log is not None:
        _log(cluster, log)
    outcome = cluster.run()
    ends = [0.0, *outcome.finished]
    pulled = outcome.counts["pulled_tokens"] * load.model.kv_bytes
    return Run(
        variant=variant,
        seed=task.seed,
        total=outcome.total,
        tail=outcome.tail,
        bound=bound,
        tokens=outcome.tokens,
        counts=outcome.counts | {"requests": len(outcome.finished), "pulled_bytes": pulled},
        prediction=cluster.context.error.summary(),
        curve=[ends[part * (len(ends) - 1) // CURVE] for part in range(CURVE + 1)],
        trace=outcome if task.traced else None,
    )


def _log(cluster: Cluster, file: BinaryIO) -> None:
    header = rows.Header(
        version=__version__,
        policy=cluster.buffer.policy.name,
        limits=cluster.buffer.limits,
        update_seconds=0.0,
        engine=cluster.load.name,
    )
    file.write(rows.header_line(header))

    def record(now: float, event: Event, answered: Sequence[Instruction]) -> None:
        file.write(rows.line(now, event, answered))

    cluster.record = record


def run_all(tasks: Sequence[Task], workers: int, on_run: Callable[[Run], None]) -> list[Run]:
    """Return the runs in the tasks' order; `on_run` is called with each when it ends."""
    if workers == 1 or len(tasks) == 1:
        return [_report(perform(task), on_run) for task in tasks]
    # Spawned, not forked: the parent shows progress from another thread.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(tasks)), mp_context=spawn)
    try:
        futures = {pool.submit(perform, task): index for index, task in enumerate(tasks)}
        done = {futures[future]: _report(future.result(), on_run) for future in as_completed(futures)}
    except BrokenProcessPool as error:
        raise SeerError("a worker process of the simulation died; is there memory for --workers?") from error
    except BaseException:  # stop the runs that still go on
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return [done[index] for index in range(len(tasks))]


def _report(run: Run, on_run: Callable[[Run], None]) -> Run:
    on_run(run)
    return run


def cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def variants(policies: Sequence[str], drafts: bool) -> list[Variant]:
    """Return the variants to compare: these policies, with `drafts` also with drafts, always the baseline."""
    for name in policies:
        if name not in POLICIES and name != ORACLE:
            raise InvalidField("--policy", name, f"choose from {', '.join([*POLICIES, ORACLE])}")
    plain = [Variant(name) for name in dict.fromkeys(policies)]
    if BASELINE not in plain:
        plain.insert(0, BASELINE)
    return plain + [Variant(each.policy, drafts=True) for each in plain if drafts]


def tasks(load: Workload, compared: Sequence[Variant], seeds: int, chunk_size: int) -> Iterator[Task]:
    """Yield the runs of a study, seed by seed."""
    for seed in range(seeds):
        yield from (Task(load, variant, seed, chunk_size) for variant in compared)


def summarize(runs: Sequence[Run], first: Variant) -> list[Summary]:
    """Return a summary of each variant, in the order in which they appear."""
    by_variant: dict[Variant, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        by_variant.setdefault(run.variant, []).append(run)
    order = dict.fromkeys(run.variant for run in runs)
    return [_summary(by_variant[each], by_variant[BASELINE], by_variant[first]) for each in order]


def _summary(runs: Sequence[Run], baseline: Sequence[Run], first: Sequence[Run]) -> Summary:
    requests = sum(run.counts["requests"] for run in runs)
    tails = sum(run.tail for run in baseline)
    predicted = sum(run.prediction["predicted"] for run in runs)
    errors = sum(run.prediction["error"] * run.prediction["predicted"] for run in runs)
    return Summary(
        variant=runs[0].variant,
        seeds=len(runs),
        total=statistics.fmean(run.total for run in runs),
        total_deviation=_deviation([run.total for run in runs]),
        tail=statistics.fmean(run.tail for run in runs),
        tail_deviation=_deviation([run.tail for run in runs]),
        tail_ratio=sum(run.tail for run in runs) / tails if tails else None,
        speedup=ratio(baseline, runs),
        speedup_over_first=ratio(first, runs),
        efficiency=statistics.fmean(run.bound / run.total for run in runs),
        preemptions=sum(run.counts["preemptions"] for run in runs) / requests,
        migrations=statistics.fmean(run.counts["migrations"] for run in runs),
        pulled_terabytes=statistics.fmean(run.counts["pulled_bytes"] for run in runs) / 1e12,
        predicted=predicted / requests,
        error=errors / max(predicted, 1),
        computed_tokens=statistics.fmean(
            run.counts["prefilled_tokens"] + run.counts["recomputed_tokens"] for run in runs
        ),
        pulled_tokens=statistics.fmean(run.counts["pulled_tokens"] for run in runs),
        idle=1 - statistics.fmean(run.counts["busy"] for run in runs),
    )


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def ratio(slow: Iterable[Timed], fast: Iterable[Timed]) -> Ratio:
    """Return the speedup of the `fast` runs over the `slow` ones, compared seed by seed."""
    logs = [math.log(a.total / b.total) for a, b in zip(slow, fast, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean))
    spread = _T_975[min(len(logs) - 1, len(_T_975)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - spread), math.exp(mean + spread))
