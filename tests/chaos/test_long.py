"""What a long run measures and finds: growth is seen, noise and warm-ups are not, and a short run is clean."""

import asyncio
import os
import random
import subprocess
import sys

import pytest

from chaos.long import Long
from chaos.measure import Sample, growth, over, per_hour, sample

SEED = 2
"""Its first job is one of agents."""

BOUNDS = {"mib": 16.0, "files": 4.0, "threads": 2.0}


def life(role, pid, began, seconds, mib, files=lambda _: 20):
    rand = random.Random(pid)
    return [
        Sample(began + age, role, pid, pid, mib(age) + rand.uniform(-1, 1), files(age), 3)
        for age in range(0, seconds, 5)
    ]


def grows(samples, warm_up=120.0):
    return over(growth(samples, warm_up), BOUNDS)


def test_a_process_that_stays_as_it_is_does_not_grow():
    assert grows(life("buffer", 1, 0, 1_800, lambda age: min(age, 100))) == []  # 100 MiB of warm-up


def test_a_leak_in_one_life_is_found():
    (found,) = grows(life("buffer", 1, 0, 1_800, lambda age: 50 + age * 30 / 3600))
    assert found.startswith("buffer: mib grows by ")
    assert "(per_hour)" in found
    (found,) = grows(life("engine", 1, 0, 1_800, lambda _: 50, lambda age: 20 + age // 120))
    assert found.startswith("engine: files grows by ")


def test_what_is_first_needed_late_is_no_leak():
    assert (
        grows(
            life("buffer", 1, 0, 1_800, lambda age: 50 + 20 * (age > 900), lambda age: 20 + 5 * (age > 700))
        )
        == []
    )


def test_what_a_restart_frees_hides_no_leak_and_what_it_does_not_free_is_found():
    def leaks(age):
        return 50 + age * 30 / 3600

    assert grows([each for n in range(6) for each in life("dgds", n, 600 * n, 600, leaks)]) != []
    kept = [each for n in range(6) for each in life("dgds", n, 600 * n, 600, lambda _, n=n: 50 + 5 * n)]
    (found,) = grows(kept)
    assert "from_life_to_life" in found


def test_a_life_that_ends_in_its_warm_up_has_no_slope():
    assert growth(life("trainer", 1, 0, 100, lambda age: age), 120.0) == {}
    assert per_hour([[(0.0, 1.0)]]) is None


def test_processes_are_measured_with_all_below_them():
    child = [sys.executable, "-c", "import sys; open('/dev/null'); sys.stdin.read()"]
    (before,) = sample(0.0, {"us": os.getpid()})
    held = bytes(2**26)[:] + b"."  # bytes of zeros take no memory until they are copied
    with subprocess.Popen(child, stdin=subprocess.PIPE) as process:
        found = sample(1.0, {"us": os.getpid()})
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ended = sample(2.0, {"us": os.getpid()})  # one that ended, and that nobody waited for
    assert [each.pid for each in ended] == [os.getpid()]
    (mine,) = [each for each in found if each.pid == os.getpid()]
    (below,) = [each for each in found if each.pid == process.pid]
    assert mine.role == "us"
    assert below.role.startswith("us/")
    assert 64 <= mine.mib - before.mib < 80, len(held)
    assert mine.files >= 3
    assert mine.threads >= 1


@pytest.mark.timeout(300)
def test_a_short_run_loses_nothing():
    seen = asyncio.run(Long("replay", 12.0, seed=SEED).run())
    assert seen.outcome.problems == []
    assert seen.outcome.faults
    assert seen.outcome.responses
    assert seen.jobs["agents"]
    assert seen.samples
