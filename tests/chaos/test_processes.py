"""A fixed part of the campaign on real processes; one more with real engines."""

import asyncio
from pathlib import Path

import pytest
from virtual_time import run

from chaos import cuts, disks, stops
from chaos.processes import Load, campaign

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"


def check(outcomes, faults):
    assert not any(outcome.problems for outcome in outcomes), outcomes
    assert sum(len(outcome.faults) for outcome in outcomes) >= faults
    assert sum(outcome.responses for outcome in outcomes) > 0


def test_no_kill_or_stop_loses_doubles_or_changes_a_response():
    check(asyncio.run(campaign(range(4), Load())).outcomes, faults=12)


@pytest.mark.breadth  # test_virtual.py has stops, of virtual processes
@pytest.mark.timeout(600)
def test_nobody_is_lost_for_having_stood_still():
    async def both():
        targets = ("buffer", "engine-0")
        return await asyncio.gather(*(stops.stops(name, [s]) for name in targets for s in (5.0, 25.0)))

    trials = [trial for system in asyncio.run(both()) for trial in system]
    assert [trial for trial in trials if trial.problems] == []
    again = {trial.what: trial.rejoins for trial in trials if trial.seconds == 25.0}
    assert again["stop engine-0"] == {"engine-0": 1, "engine-1": 0}  # it was given up, and came back
    assert set(again["stop buffer"].values()) == {0}  # nobody was


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("namespaces")
def test_a_cut_loses_nothing():
    (trial,) = asyncio.run(cuts.cuts(("buffer", "engine-0"), ["both"], seconds=15.0))
    assert trial.problems == []
    assert trial.responses > 0
    assert trial.rejoins == {"engine-0": 1, "engine-1": 0}  # TCP gave the connection up


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mounts")
def test_a_disk_that_fills_refuses_weights_and_nothing_else():
    assert asyncio.run(disks.streams("spool")) == []


@pytest.mark.usefixtures("mounts")
def test_a_disk_that_fills_costs_no_finished_group():
    assert asyncio.run(disks.outputs()) == []


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_with_real_engines():
    load = Load(prompts=8, max_tokens=300, faults=2, burst_seconds=4.0)
    check(asyncio.run(campaign(range(1), load, MODEL)).outcomes, faults=1)


@pytest.mark.usefixtures("mounts")
def test_a_log_whose_disk_filled_begins_again_and_the_next_buffer_has_all():
    run(disks.log())
