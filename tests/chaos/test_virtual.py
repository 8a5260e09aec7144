"""A fixed part of the virtual campaign, what it covers, and that a seed always tells the same story."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.conversations import missing
from chaos.plan import KINDS, Rest, Roll
from chaos.values import AT_LIMIT, BEYOND
from chaos.virtual import draw, quiet, run, run_plan, story
from seer.common import wire
from seer.services.buffer.events import FromEngine
from seer.services.buffer.log import rows
from seer.services.buffer.sleep_machine import SleepMachine
from seer.services.engine.weights.holders import Peers

BATCH = 25
RARE = (
    304,
    307,
    312,
    328,
    337,
    339,
    346,
    355,
    365,
    392,
    400,
    402,
    424,
    463,
    474,
    476,
    477,
    522,
    534,
    551,
    564,
    613,
    619,
    680,
    1266,
    1322,
    2024,
    2036,
    5049,
    5050,
    700726,
)
"""Runs in which faults meet messages that are seldom under way."""

SEEDS = (*range(200), *RARE)
WAYS = Counter()


@pytest.fixture(autouse=True)
def no_logs():
    with quiet():
        yield


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + BATCH] for at in range(0, len(SEEDS), BATCH)], ids=lambda seeds: str(seeds[0])
)
def test_no_fault_breaks_a_promise(seeds):
    outcomes = [run(seed) for seed in seeds]
    for outcome in outcomes:
        WAYS.update(outcome.ways)
    problems = {outcome.seed: outcome.problems for outcome in outcomes if outcome.problems}
    assert not problems, problems


def test_every_type_of_message_was_sent_and_faulted():
    # Of the runs above; a part of them, as under pytest-xdist or -k, proves less.
    if not WAYS:
        pytest.skip("no seed ran before this in this process")
    assert missing(WAYS) == {"sent": [], "faulted": []}


def test_engines_copy_from_engines_what_the_buffer_lost(monkeypatch):
    sizes, ask = [], Peers.whole_size

    async def asked(self, name, holders):
        sizes.append(await ask(self, name, holders))
        return sizes[-1]

    monkeypatch.setattr(Peers, "whole_size", asked)
    assert not [problem for seed in (2, 17) for problem in run(seed).problems]
    assert any(sizes)
    assert not all(sizes)  # others have ended, too


def test_a_log_that_says_something_else_than_the_machines_is_a_problem(monkeypatch):
    line = rows.line
    monkeypatch.setattr(rows, "line", lambda now, event, out: line(now, event, out[:-1]))
    assert all(problem.startswith("replay: ") for problem in run(3).problems)
    assert run(3).problems


def test_the_fixed_part_has_every_kind_of_fault():
    assert {fault.kind for seed in SEEDS for fault in draw(seed).faults} == set(KINDS)


def test_the_fixed_part_asks_for_parts_in_every_way():
    parts = [roll.parts for seed in SEEDS for roll in draw(seed).rolls if roll.parts is not None]
    ways = {(each.stream, each.prefix, each.feint is None) for each in parts}
    assert ways == {
        (stream, prefix, plain)
        for stream in (False, True)
        for prefix in ("", "/", "/once more ")
        for plain in (False, True)
    }
    assert {1, 2, 4} <= {each.size for each in parts}
    assert {0.0, 2.0} <= {each.late for each in parts}


def test_the_fixed_part_has_trajectories_of_every_kind():
    turns = [roll.turns for seed in SEEDS for roll in draw(seed).rolls if roll.turns is not None]
    assert {(each.resent, bool(each.rewritten)) for each in turns} == {
        (resent, rewritten) for resent in (False, True) for rewritten in (False, True)
    }
    assert {1, 2, 3, 5} == {each.turns for each in turns}
    assert {1, 4, 256} == {each.most_open for each in turns}
    late = {max(each.waits) > each.idle_seconds for each in turns if each.waits}
    assert late == {False, True}


def test_the_fixed_part_has_values_of_every_kind():
    plans = [draw(seed) for seed in SEEDS]
    steps = [step for plan in plans for step in plan.scripts[0]]
    rests = [step for step in steps if isinstance(step, Rest)]
    assert {each.renews for each in rests} == {False, True}
    assert {each.level for each in rests} == {1, 2}
    names = {name for plan in plans for roll in plan.rolls for name, _ in roll.prompts}
    assert {AT_LIMIT, BEYOND} <= names
    assert 1 in {length for plan in plans for roll in plan.rolls for _, length in roll.prompts}
    assert {plan.odd_weights for plan in plans if plan.updates} == {False, True}


def test_what_stands_still_is_named_with_what_it_waits_for(monkeypatch):
    apply = SleepMachine.apply

    def unheard(self, event, *args, **named):
        match event:
            case FromEngine(message=wire.Slept(asleep=False)):
                return []
        return apply(self, event, *args, **named)

    monkeypatch.setattr(SleepMachine, "apply", unheard)
    names = tuple((f"p{each}", 8) for each in range(4))
    script = (Roll("r", 0, 0, names, 4, 64), Rest(1.0), Roll("s", 0, 0, names, 4, 64))
    plan = replace(
        draw(0), scripts=(script,), engines=2, mean_tokens=24, kv_blocks=100, update_seconds=3600.0,
        max_requests=200_000, rejections=0, poison=False, clocks=False, rogue=False, faults=(), catches=(),
    )  # fmt: skip
    outcome = run_plan(plan)
    assert outcome.stuck == 1
    told = " ".join(outcome.problems)
    assert "stuck: t0 waits: in step 1, Rest" in told
    assert "AWAKE is wanted of engines e0 KV_ASLEEP, e1 KV_ASLEEP" in told


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
