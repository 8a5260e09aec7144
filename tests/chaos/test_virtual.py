"""A fixed part of the virtual campaign, what it covers, and that a seed always tells the same story."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from chaos.conversations import missing
from chaos.plan import KINDS, draw
from chaos.virtual import quiet, run, story

BATCH = 25
SEEDS = (*range(300), 328, 338, 431)
SELDOM = {
    "dgds down AppendGaps",
    "dgds down Refused",
    "engines down DiscardWeights",
    "engines down LoadWeights",
    "engines down Refused",
    "engines down SpoolData",
}
"""Sent here, but under way for so short a time that no fault of these seeds met one: `make chaos` draws more."""
WAYS = Counter()


@pytest.fixture(autouse=True)
def no_logs():
    with quiet():
        yield


@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_no_fault_breaks_a_promise(first):
    outcomes = [run(seed) for seed in range(first, first + BATCH)]
    for outcome in outcomes:
        WAYS.update(outcome.ways)
    problems = {outcome.seed: outcome.problems for outcome in outcomes if outcome.problems}
    assert not problems, problems


def test_every_type_of_message_was_sent_and_faulted():
    # Of the runs above; a part of them, as under pytest-xdist or -k, proves less.
    if not WAYS:
        pytest.skip("no seed ran before this in this process")
    left = missing(WAYS)
    assert left["sent"] == []
    assert set(left["faulted"]) <= SELDOM


def test_the_fixed_part_has_every_kind_of_fault():
    assert {fault.kind for seed in SEEDS for fault in draw(seed).faults} == set(KINDS)


def test_a_seed_replays_exactly_in_any_process():
    seeds = [2, 16, 37]
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
