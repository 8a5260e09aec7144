"""Which deliberate faults in the code do the tests notice? Prints JSON: made, caught by which test, survived.

The faults, or mutants, are written by hand (`tests/mutants/*.toml`), each against a promise that the docs
make: a counter that is never reset, a deadline that starts again at each look, an answer to a question that
an earlier process asked. Tools like mutmut and cosmic-ray derive thousands of mutants from operators instead.
Most of those break so much that any test notices, and few are like the ones here: a state that is not cleared
when a peer joins again is one statement left out of fifty. Nor can such tools say which promise broke, or
keep a list of survivors with reasons. What is worth taking from them is the runner: change the code in
memory, run the nearest tests first, stop at the first failure, begin with the test that caught the mutant
last time (`build/mutants.json`).

First the tests run without a mutant. A mutant is caught by a failing test, or by hanging. Exit code 1: one
survived that has no reason to, or one was caught that has a reason to survive.

    python bench/correctness/mutants.py                         # all
    python bench/correctness/mutants.py --only machine room/overtakes --workers 2
    python bench/correctness/mutants.py --levels unit property  # what the fast tests notice by themselves
    python bench/correctness/mutants.py --levels chaos          # what the campaign's fixed seeds notice
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import configuration
from lib.machine import machine
from lib.paths import ROOT, TESTS

sys.path.insert(0, str(TESTS))

from mutants import Mutant, load, mutated, names

COMMON = ("numpy", "pytest_asyncio", "structlog", "zmq", "seer.common.wire", "seer.common.config")
"""Imported once, and forked with the runs: what no mutant changes, and takes longer than most tests."""

CAMPAIGN = "tests/chaos/test_virtual.py"
"""The last resort: it runs after all tests that a list names."""

LEVELS = ("unit", "property", "cluster", "chaos")
"""Folders of tests, in the order in which they are asked."""

NOT_ASKED = (
    f"{CAMPAIGN}::test_a_seed_replays_exactly_in_any_process",
    f"{CAMPAIGN}::test_every_type_of_message_was_sent_and_faulted",
)
"""Tests that compare with a process of their own, which has no mutant, or with what else was run: they notice
what breaks no promise."""

KNOWN = ROOT / "build" / "mutants.json"
"""Which test caught a mutant the last time."""

TEST_SECONDS = 120
"""A test that takes longer hangs: a mutant may well wait for ever."""

SLOWER = 5
"""A mutant may take as many times what the tests take without one; then it hangs."""

HANGS = "a hang"
ERROR = "an error: pytest ended with "
"""Neither caught nor survived: the run itself failed."""


class Run:
    """Tests that run in a process of their own until one fails."""

    def __init__(self, tests: Sequence[str], mutant: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="seer-mutants-")
        self._printed = Path(self._folder.name, "printed")
        arguments = (tests, mutant, self._folder.name, self._printed)
        self.process: BaseProcess = multiprocessing.get_context("fork").Process(target=_test, args=arguments)
        self.began = time.monotonic()
        self.process.start()

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return time.monotonic() - self.began

    def end(self) -> tuple[str, str]:
        """Return which test failed, empty if none, and what was printed; one that still runs hangs."""
        hangs = self.process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        printed = self._printed.read_text()
        self._folder.cleanup()
        failed = re.search(r"^FAILED ([^\[\s]+)", printed, re.MULTILINE)
        if hangs:
            return HANGS, printed
        if self.process.exitcode == 1 and failed is not None:
            return failed[1], printed
        return f"{ERROR}{self.process.exitcode}" if self.process.exitcode else "", printed


def _test(tests: Sequence[str], mutant: str, folder: str, printed: Path) -> None:
    """Be a run: in the child process."""
    os.setsid()
    output = os.open(printed, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    configuration.set_hypothesis_home_dir(folder)
    os.environ["SEER_MUTANT"] = mutant
    how = ["--tb=no", "-p", "mutants.plugin"] if mutant else ["--tb=short"]
    sys.exit(
        pytest.main([
            *how, "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}", "--hypothesis-seed=0",
            f"--basetemp={Path(folder, 'files')}", *(f"--deselect={test}" for test in NOT_ASKED), *tests,
        ])
    )  # fmt: skip


@dataclass(slots=True)
class Trial:
    """One mutant on its way through the `stages` of its tests; `caught_by` is a test, or a hang."""

    name: str
    mutant: Mutant
    stages: list[list[str]]
    seconds: float = 0.0
    caught_by: str = ""
    run: Run | None = field(default=None, repr=False)

    @property
    def failed(self) -> bool:
        """Whether the run failed, so that nothing is known of the mutant."""
        return self.caught_by.startswith(ERROR)

    def step(self, limit: float) -> bool:
        """Begin the next stage if none runs, or look at the one that does; say whether it is over."""
        if self.run is None:
            self.run = Run(self.stages.pop(0), self.name)
        if self.run.process.is_alive() and self.run.seconds < limit:
            return False
        self.seconds += self.run.seconds
        self.caught_by, printed = self.run.end()
        self.run = None
        if self.failed:
            print(printed, file=sys.stderr)
        return bool(self.caught_by) or not self.stages


def _tests(name: str, levels: Sequence[str]) -> list[list[str]]:
    """Return the tests of a list, those of a level together."""
    named = [*load(name).tests, CAMPAIGN]
    by_level = [[test for test in named if _level(test) == level] for level in LEVELS if level in levels]
    return [tests for tests in by_level if tests]


def _level(test: str) -> str:
    return test.split("/")[1] if test.startswith("tests/") else test


def _trial(name: str, mutant: Mutant, levels: Sequence[str], known: Mapping[str, str]) -> Trial:
    stages = _tests(name, levels)
    full_name = f"{name}/{mutant.name}"
    file, _, test = known.get(full_name, "").partition("::")
    if any(file in tests for tests in stages) and test.split("::")[0] in (ROOT / file).read_text():
        stages.insert(0, [f"{file}::{test}"])
    return Trial(full_name, mutant, stages)


def _chosen(only: Sequence[str]) -> list[tuple[str, Mutant]]:
    """Return what is to be tried. Raises `Stale` for what has nothing to change any more."""
    found = [(name, mutant) for name in names() for mutant in load(name).mutants]
    known = {name for name, _ in found} | {f"{name}/{mutant.name}" for name, mutant in found}
    if unknown := set(only) - known:
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: no such list or mutant in tests/mutants")
    chosen = [(name, each) for name, each in found if not only or {name, f"{name}/{each.name}"} & set(only)]
    for name, mutant in chosen:
        mutated((ROOT / load(name).file).read_text(), mutant)
    return chosen


def _try(trials: Sequence[Trial], workers: int, limit: float) -> Iterator[Trial]:
    """Yield trials as they end, `workers` at a time; each stage has `limit` seconds."""
    waiting, running = list(trials), list[Trial]()
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(waiting.pop(0))
        for trial in [trial for trial in running if trial.step(limit)]:
            running.remove(trial)
            print(f"{trial.name}: {trial.caught_by or 'LEFT'} ({trial.seconds:.0f} s)", file=sys.stderr)
            yield trial
        if sentinels := [trial.run.process.sentinel for trial in running if trial.run is not None]:
            wait(sentinels, timeout=5)


def _report(trials: Sequence[Trial]) -> dict[str, object]:
    left = [trial for trial in trials if not trial.caught_by]
    caught = [trial for trial in trials if trial.caught_by and not trial.failed]
    return {
        "made": len(trials),
        "caught": len(caught),
        "caught_in": Counter(_level(trial.caught_by) for trial in caught),
        "left": len(left),
        "explained": {trial.name: trial.mutant.survives for trial in left if trial.mutant.survives},
        "unexplained": {trial.name: trial.mutant.breaks for trial in left if not trial.mutant.survives},
        "explained_but_caught": [trial.name for trial in caught if trial.mutant.survives],
        "errors": {trial.name: trial.caught_by for trial in trials if trial.failed},
        "caught_by": {trial.name: trial.caught_by for trial in caught},
    }


def main() -> int:
    """Run the mutants asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="LIST", help="lists, or LIST/MUTANT")
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS, help="ask these tests alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    chosen = _chosen(args.only)
    for module in COMMON:
        importlib.import_module(module)
    began = time.monotonic()
    lists = dict.fromkeys(name for name, _ in chosen)
    every = [test for name in lists for tests in _tests(name, args.levels) for test in tests]
    first = Run(list(dict.fromkeys(every)))
    first.process.join()
    baseline = first.seconds
    failed, printed = first.end()
    if failed:
        print(printed, f"without any mutant there is already {failed}", sep="\n", file=sys.stderr)
        return 1
    known: dict[str, str] = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    # Others run at the same time, and a test that hangs ends itself: the deadline is no measure of speed.
    trials = [_trial(name, mutant, args.levels, known) for name, mutant in chosen]
    trials = list(_try(trials, args.workers, SLOWER * baseline + 2 * TEST_SECONDS))
    caught = {trial.name: trial.caught_by for trial in trials if trial.caught_by and not trial.failed}
    KNOWN.parent.mkdir(exist_ok=True)
    KNOWN.write_text(json.dumps(known | caught))
    report = _report(trials)
    figures = {"baseline_seconds": round(baseline), "seconds": round(time.monotonic() - began)}
    print(json.dumps({"machine": machine()} | figures | report, indent=1))
    return int(any(report[name] for name in ("unexplained", "explained_but_caught", "errors")))


if __name__ == "__main__":
    sys.exit(main())
