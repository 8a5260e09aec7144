"""A fixed part of the virtual campaign, and that a seed always tells the same story."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.plan import KINDS, draw
from chaos.virtual import quiet, run, story

SEEDS = range(300)
BATCH = 25


@pytest.fixture(autouse=True)
def no_logs():
    with quiet():
        yield


@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_no_fault_loses_doubles_or_changes_a_response(first):
    problems = {seed: run(seed).problems for seed in range(first, first + BATCH)}
    assert not any(problems.values()), {seed: what for seed, what in problems.items() if what}


def test_the_fixed_part_has_every_kind_of_fault():
    assert {fault.kind for seed in SEEDS for fault in draw(seed).faults} == set(KINDS)


def test_a_seed_replays_exactly_in_any_process():
    seeds = [2, 16, 37]  # none streams weights: spool folders have names of their own each time
    here = {str(seed): story(seed) for seed in seeds}
    assert all(len(lines) > 50 for lines in here.values())
    assert here == {str(seed): story(seed) for seed in seeds}
    code = "import json, sys; from chaos.virtual import story; print(json.dumps({s: story(int(s)) for s in sys.argv[1:]}))"
    there = subprocess.run(
        [sys.executable, "-c", code, *map(str, seeds)],
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": "77"},
        stdout=subprocess.PIPE, check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(there.stdout) == here
