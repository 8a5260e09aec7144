"""Which deliberate faults in the code do the tests notice? Prints JSON: made, died, and which survived.

The faults, or mutants, are written by hand (`tests/mutants/*.toml`), each against a promise that the docs
make: a counter that is never reset, a deadline that starts again at each look, an answer to a question that
an earlier process asked. Tools like mutmut and cosmic-ray derive thousands of mutants from operators instead.
Most of those break so much that any test notices, and no such tool can say which promise broke.

Each mutant names the test files that notice it. First these run without a mutant. A mutant dies by a failing
test, or by hanging. Exit code 1: one survived.

    python bench/correctness/mutants.py
    python bench/correctness/mutants.py --only weights keys/any-role --workers 2
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lib.hardware import machine
from lib.paths import ROOT, TESTS

sys.path.insert(0, str(TESTS))

from mutants import Mutant, mutants, place_of

TEST_SECONDS = 120
"""A test that takes longer hangs: a mutant may well wait for ever."""

SECONDS = 900
"""What all tests of a mutant may take, however its processes hang."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the tests of a mutant ended; `died_by` is a test, or "a hang", and empty if it survived."""

    name: str
    died_by: str = ""
    error: str = ""


def tried(name: str, mutant: Mutant) -> Outcome:
    """Run a mutant's tests until one fails."""
    code, printed = run(mutant.tests, name)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::[^\[\s]+)", printed, re.MULTILINE)
    if code == 1 and failed:
        outcome = Outcome(name, died_by=failed[1])
    elif code < 0:
        outcome = Outcome(name, died_by="a hang")
    else:  # tests that cannot be collected say nothing about the mutant
        outcome = Outcome(name, error=printed[-2000:] if code else "")
    print(f"{name}: {outcome.died_by or ('ERROR' if code else 'SURVIVED')}", file=sys.stderr)
    return outcome


def run(tests: Sequence[str], mutant: str = "") -> tuple[int, str]:
    """Return pytest's exit code, -9 for a hang, and what it printed."""
    with_mutant = ["-p", "mutants.plugin"] if mutant else []
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-n", "0", "-p", "no:cacheprovider",
        f"--timeout={TEST_SECONDS}", "--hypothesis-seed=0", *with_mutant,
        *(f"tests/{test}" for test in tests),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env=os.environ | {"PYTHONPATH": str(TESTS), "SEER_MUTANT": mutant},
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
    return process.returncode, printed


def chosen(only: Sequence[str]) -> dict[str, Mutant]:
    """Return what is to be tried. Raises `Stale` for what has nothing to change any more."""
    found = mutants()
    known = set(found) | {name.partition("/")[0] for name in found}
    if unknown := set(only) - known:
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: no such file or mutant in tests/mutants")
    picked = {
        name: mutant
        for name, mutant in found.items()
        if not only or {name, name.partition("/")[0]} & set(only)
    }
    for mutant in picked.values():
        place_of(mutant)
    return picked


def main() -> int:
    """Run the mutants asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="files, or FILE/MUTANT")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    picked = chosen(args.only)
    began = time.monotonic()
    code, printed = run(sorted({test for mutant in picked.values() for test in mutant.tests}))
    if code:
        print(printed, "without any mutant the tests already fail", sep="\n", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(args.workers) as pool:
        outcomes = list(pool.map(tried, picked, picked.values()))
    report = {
        "machine": machine(),
        "seconds": round(time.monotonic() - began),
        "made": len(outcomes),
        "died": sum(bool(each.died_by) for each in outcomes),
        "survived": {
            each.name: picked[each.name].promise for each in outcomes if not (each.died_by or each.error)
        },
        "errors": {each.name: each.error for each in outcomes if each.error},
        "died_by": {each.name: each.died_by for each in outcomes if each.died_by},
    }
    print(json.dumps(report, indent=1))
    return int(bool(report["survived"] or report["errors"]))


if __name__ == "__main__":
    sys.exit(main())
