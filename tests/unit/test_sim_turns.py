"""Simulated rollouts of many turns: what `sim/turns.py` draws, and what `sim/turn_cluster.py` makes of it."""

import statistics

import pytest
from invariants import check
from msgspec.structs import replace
from sim_parts import LOAD, MODEL

from seer.common.errors import InvalidField
from seer.common.policy.schedule import POLICIES
from seer.services.buffer.requests.events import GroupsSubmitted
from seer.services.buffer.requests.instructions import Dispatch
from seer.sim import turns
from seer.sim.bound import of_rollout, of_trajectories
from seer.sim.cluster import Cluster
from seer.sim.instance import Instance
from seer.sim.study import Task, Variant, perform
from seer.sim.turn_cluster import TurnCluster
from seer.sim.turns import Turn
from seer.sim.workload import Workload

TURNS = replace(LOAD, turns=5.0, tool_tokens=20.0, tool_seconds=2.0)
DRAWN = turns.draw(TURNS, 7)
FLAT = [each for group in DRAWN for each in group]
BY_ARRIVAL_OF_GROUPS = "static"


def run(load: Workload = TURNS, name: str = "seer", drafts: bool = False):
    cluster = TurnCluster(load, POLICIES[name], turns.draw(load, 7), 200, drafts)
    return cluster, cluster.run()


# --- what is drawn ---------------------------------------------------------------------------


def test_trajectories_are_a_function_of_the_seed_and_one_turn_is_the_response():
    assert turns.draw(TURNS, 7) == DRAWN != turns.draw(TURNS, 8)
    assert turns.draw(LOAD, 7) == [[(Turn(length),) for length in group] for group in LOAD.draw(7)]


def test_the_wait_changes_no_token_and_only_scales():
    longer = turns.draw(replace(TURNS, tool_seconds=6.0), 7)
    for ours, theirs in zip(FLAT, [each for group in longer for each in group], strict=True):
        assert [turn[:2] for turn in ours] == [turn[:2] for turn in theirs]
        assert [3 * turn.tool_seconds for turn in ours] == pytest.approx(
            [turn.tool_seconds for turn in theirs]
        )


def test_means_are_those_asked_for_and_long_trajectories_have_more_turns():
    load = replace(TURNS, groups=400, cap=100_000, model=replace(MODEL, kv_tokens=200_000))
    drawn = [each for group in turns.draw(load, 0) for each in group]
    tools = [turn for each in drawn for turn in each[:-1]]
    assert statistics.fmean(map(len, drawn)) == pytest.approx(5, rel=0.1)
    assert statistics.fmean(turn.tool_tokens for turn in tools) == pytest.approx(20, rel=0.1)
    assert statistics.fmean(turn.tool_seconds for turn in tools) == pytest.approx(2, rel=0.1)
    drawn.sort(key=turns.generated)
    assert statistics.fmean(map(len, drawn[-100:])) > 3 * statistics.fmean(map(len, drawn[:100]))


def test_recorded_lengths_have_as_many_turns():
    load = replace(TURNS, lengths=((1000,) * 100, (500,) * 100), tool_tokens=0.0)
    long, short = turns.draw(load, 0)
    assert {turns.generated(each) for each in long} == {1000}
    assert statistics.fmean(map(len, long + short)) == pytest.approx(5, rel=0.1)


def test_a_trajectory_ends_where_its_context_is_full():
    full = turns.draw(replace(TURNS, tool_tokens=400.0), 7)
    sums = [
        turns.generated(each) + sum(turn.tool_tokens for turn in each) for group in full for each in group
    ]
    assert max(sums) <= LOAD.cap
    assert sum(map(turns.generated, FLAT)) > sum(turns.generated(each) for group in full for each in group)
    assert all(turn.generated >= 1 for group in full for each in group for turn in each)
    assert all(each[-1][1:] == (0, 0.0) for group in full for each in group)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("turns", {"turns": 0.5}),
        ("turns", {"turns": 1.0}),
        ("tool_tokens", {"tool_tokens": -1.0}),
        ("tool_seconds", {"tool_seconds": float("nan")}),
        ("tool_sigma", {"tool_sigma": 11.0}),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(field, fields):
    with pytest.raises(InvalidField, match=f"workload.{field}"):
        replace(TURNS, **fields)


# --- how it runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", sorted(set(POLICIES) - {BY_ARRIVAL_OF_GROUPS}))
def test_one_turn_is_the_run_of_responses_bit_for_bit(name, drafts):
    responses = Cluster(LOAD, POLICIES[name], LOAD.draw(7), 200, drafts).run()
    assert run(LOAD, name, drafts)[1] == responses


@pytest.mark.parametrize("pool", [True, False], ids=["pool", "poolless"])
@pytest.mark.parametrize("name", POLICIES)
def test_every_trajectory_ends_once_not_before_the_bound(name, pool):
    load = replace(TURNS, pool=pool)
    cluster, outcome = run(load, name)
    assert len(outcome.finished) == len(FLAT)
    assert outcome.finished == sorted(outcome.finished)
    assert outcome.tokens == cluster.buffer.counters["tokens"] == sum(map(turns.generated, FLAT))
    assert outcome.total >= of_trajectories(load, DRAWN, drafts=False).seconds(load.instances)
    assert (outcome.counts["pulled_tokens"] > 0) <= pool
    assert cluster.buffer.idle
    assert not cluster.buffer.groups
    assert not len(cluster.context), "the context service knows no trajectory that has ended"
    check(cluster.buffer)
    assert run(load, name)[1] == outcome


def test_turns_are_those_given_and_come_after_their_tools():
    cluster = TurnCluster(TURNS, POLICIES["seer"], DRAWN, 200)
    submitted, begun = {}, {}

    def note(now, event, answered):
        if isinstance(event, GroupsSubmitted):
            submitted.update({f"r/{spec.prompt_id}#0": (now, spec) for spec in event.groups})
        for item in answered:
            if isinstance(item, Dispatch):
                begun.setdefault(item.request_id, now)

    cluster.record = note
    cluster.run()
    assert submitted.keys() == begun.keys() == cluster.lengths.keys()
    for group, members in enumerate(DRAWN):
        for index, each in enumerate(members):
            before, context, ready = 0, TURNS.prompt, 0.0
            for number, turn in enumerate(each):
                name = f"r/{group}#{index}.{number}#0"
                now, spec = submitted[name]
                assert now >= ready
                assert (spec.prompt_len, spec.turn.generated) == (context, before)
                assert (spec.shared_id, spec.first_index) == (f"r/{group}", index)
                ready = begun[name] + turn.tool_seconds
                before += turn.generated
                context += turn.generated + turn.tool_tokens


@pytest.mark.parametrize("pool", [True, False], ids=["pool", "poolless"])
def test_each_token_of_context_is_cached_brought_or_computed(monkeypatch, pool):
    cached, contexts = [], []
    take, bring = Instance.take, TurnCluster._bring
    monkeypatch.setattr(Instance, "take", lambda *given: cached.append(take(*given)) or cached[-1])
    monkeypatch.setattr(TurnCluster, "_bring", lambda *given: contexts.append(given[1]) or bring(*given))
    outcome = run(replace(TURNS, pool=pool))[1]
    counts = outcome.counts
    assert counts["migrations"] > 0 < sum(cached)
    assert sum(contexts) == sum(cached) + counts["pulled_tokens"] + counts["prefilled_tokens"]
    added = sum(turn.tool_tokens for each in FLAT for turn in each)
    assert counts["prefilled_tokens"] >= len(FLAT) * TURNS.prompt + added


def test_waits_and_what_is_brought_or_computed_are_charged():
    def total(**fields):
        return run(replace(TURNS, **fields))[1].total

    assert total(tool_seconds=0.0) < total(tool_seconds=20.0)
    dear = replace(MODEL, prefill=1e-2)  # so that fetching pays, slow as it may be
    assert total(model=replace(dear, pull=5e-3)) > 1.05 * total(model=dear)
    assert total(pool=False, model=replace(MODEL, prefill=5e-3)) > 1.1 * total(pool=False)


def test_the_bound_is_of_the_trajectory_that_waits_longest_too():
    lengths = [[100, 10]]
    alone = of_rollout(LOAD, lengths, drafts=False).alone
    assert of_rollout(LOAD, lengths, drafts=False, away=[0.0, 0.5]).alone == alone
    waits = of_rollout(LOAD, lengths, drafts=False, away=[0.0, 50.0]).alone
    assert waits == pytest.approx(of_rollout(LOAD, [[10, 10]], drafts=False).alone + 50.0)


def test_a_study_runs_trajectories_and_the_oracle_knows_all_their_turns():
    found = {name: perform(Task(TURNS, Variant(name), 7, 200)) for name in ("seer", "oracle")}
    assert found["seer"].total == run()[1].total
    assert {each.tokens for each in found.values()} == {sum(map(turns.generated, FLAT))}
    assert all(each.bound <= each.total for each in found.values())
