"""What `sim/cluster.py` promises, on a rollout small enough to look at whole."""

from itertools import pairwise

import pytest
from invariants import check
from msgspec.structs import replace
from sim_parts import LOAD, MODEL

from seer.common.errors import InvalidField
from seer.common.policy.schedule import POLICIES, Policy, oracle
from seer.services.buffer.requests import events
from seer.sim.bound import of_rollout
from seer.sim.cluster import STATUS_SECONDS, Cluster, Outcome
from seer.sim.instance import Instance
from seer.sim.ranks import RankedInstance
from seer.sim.workload import DISPATCH_SECONDS, Workload

LENGTHS = LOAD.draw(7)
NAMES = [*POLICIES, "oracle"]


def policy_of(name: str) -> Policy:
    if name != "oracle":
        return POLICIES[name]
    return oracle({f"r/{g}#{i}": n for g, group in enumerate(LENGTHS) for i, n in enumerate(group)})


def cluster_of(name: str, drafts: bool = False, load: Workload = LOAD, every: float = 0.0) -> Cluster:
    return Cluster(load, policy_of(name), LENGTHS, chunk_size=200, drafts=drafts, every=every)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", NAMES)
def test_every_response_ends_once_not_before_the_bound_and_each_time_the_same(name, drafts):
    cluster = cluster_of(name, drafts)
    outcome = cluster.run()
    results = [request for group in cluster.buffer.groups.values() for request in group.results]
    assert {request.view.request_id: request.view.generated for request in results} == cluster.lengths
    assert len(outcome.finished) == len(results) == LOAD.groups * LOAD.group_size
    assert outcome.finished == sorted(outcome.finished)
    assert outcome.finished[-1] == outcome.total
    assert outcome.tokens == cluster.buffer.counters["tokens"] == sum(map(sum, LENGTHS))
    check(cluster.buffer)
    for engine in cluster.instances.values():
        assert (engine.running, engine.waiting, engine.kv_tokens) == (0, 0, 0.0)
        assert engine.busy_seconds <= outcome.total
    assert cluster_of(name, drafts).run() == outcome
    assert outcome.total >= of_rollout(LOAD, LENGTHS, drafts).seconds(LOAD.instances)
    preempted = outcome.counts["preemptions"]
    assert preempted == 0 if policy_of(name).admission else preempted > 0
    assert (outcome.counts["recomputed_tokens"] > 0) == (preempted > 0)


def test_responses_to_a_recorded_prompt_share_its_full_blocks_and_dispatches_take_as_long_as_recorded():
    lengths = [[100, 100, 100], [50]]
    load = replace(LOAD, instances=1, pool=False, groups=2, lengths=tuple(map(tuple, lengths)))
    plain = Cluster(load, POLICIES["divided"], lengths, chunk_size=200).run()
    assert plain.counts["prefilled_tokens"] == 4 * load.prompt
    recorded = replace(load, prompt=40, prompts=(64, 40), dispatch=2.0)
    shared = Cluster(recorded, POLICIES["divided"], lengths, chunk_size=200).run()
    assert shared.counts["prefilled_tokens"] == 64 + 2 * (64 - 48) + 40
    assert 1.9 < shared.total - plain.total < 2.0
    slow = replace(recorded, model=replace(MODEL, prefill=0.5))
    found = Cluster(slow, POLICIES["divided"], lengths, chunk_size=200).run()
    assert found.total >= of_rollout(slow, lengths, False).seconds(1)


@pytest.mark.parametrize(("draft_tokens", "ranks", "least"), [(0, 1, 1568), (64, 1, 1632), (64, 2, 3264)])
def test_a_cluster_that_its_buffer_would_refuse_is_no_workload(draft_tokens, ranks, least):
    model = replace(MODEL, kv_tokens=least, draft_tokens=draft_tokens)
    load = replace(LOAD, model=model, ranks=ranks, groups=1, group_size=1)
    assert Cluster(load, POLICIES["seer"], [[load.cap]], chunk_size=200).run().tokens == load.cap
    with pytest.raises(InvalidField, match=f"kv_tokens = {least - 1}: .* on each rank: raise it to {least}"):
        replace(load, model=replace(model, kv_tokens=least - 1))


def test_ranks_reserve_the_blocks_that_the_buffer_has_booked(monkeypatch):
    load = replace(LOAD, ranks=2, model=replace(MODEL, kv_tokens=8000, draft_tokens=40))
    cluster, blocks = cluster_of("seer", load=load), []

    def add(instance, chunk, now):
        blocks.append((instance._blocks(chunk), cluster.buffer.requests[chunk.request_id].blocks))
        Instance.add(instance, chunk, now)

    monkeypatch.setattr(RankedInstance, "add", add)
    cluster.run()
    assert [reserved for reserved, _ in blocks] == [booked for _, booked in blocks]


def test_the_context_service_has_its_say_as_in_production():
    """Its estimates come over the machines' own events; Algorithm 2 without any goes by arrival."""

    class Deaf(Cluster):
        def _publish(self) -> None:
            self._publishing = False

    deaf = Deaf(LOAD, POLICIES["seer-paper"], LENGTHS, chunk_size=200).run()
    assert deaf.finished != cluster_of("seer-paper").run().finished


def test_moves_are_charged():
    def run(pull: float, name: str) -> Outcome:
        load = replace(LOAD, model=replace(MODEL, pull=pull, prefill=5e-3))
        return cluster_of(name, load=load).run()

    free, dear = run(0.0, "migrate"), run(3e-3, "migrate")
    assert free.counts["migrations"] > 0
    assert free.counts["pulled_tokens"] > 0
    assert dear.total > 1.1 * free.total
    assert run(3e-3, "static").counts["pulled_tokens"] == 0, "no chunks, no moves"


def test_what_takes_longer_to_fetch_is_computed():
    def run(pull: float) -> Outcome:
        return cluster_of("migrate", load=replace(LOAD, model=replace(MODEL, pull=pull))).run()

    fast, slow = run(MODEL.pull), run(10.0)
    assert slow.counts["pulled_tokens"] < 0.1 * fast.counts["pulled_tokens"]
    assert slow.counts["prefilled_tokens"] > fast.counts["prefilled_tokens"]


def test_instances_report_what_they_generated_if_a_log_is_wanted_and_nothing_else_changes():
    plain, recorded, told = cluster_of("seer").run(), cluster_of("seer"), []
    recorded.record = lambda now, event, _: told.append((now, event))
    assert recorded.run() == plain
    for name in recorded.instances:
        reports = [(now, each.generated_tokens) for now, each in told
                   if isinstance(each, events.EngineReported) and each.instance == name]  # fmt: skip
        ended = [(now, each.result.count) for now, each in told
                 if isinstance(each, events.ChunkEnded) and each.instance == name]  # fmt: skip
        assert reports[0][1] == 0
        for (before, fewer), (now, generated) in pairwise(reports):
            assert now >= before + STATUS_SECONDS
            assert generated >= fewer
            assert generated >= sum(count for at, count in ended if at <= now) - 1
        assert reports[-1][1] > 0.5 * sum(count for _, count in ended)


def test_curves_and_spans_tell_the_same_run():
    plain, traced = cluster_of("seer").run(), cluster_of("seer", every=1.0).run()
    assert traced.total == pytest.approx(plain.total)
    assert [sample.time for sample in traced.samples] == pytest.approx(range(len(traced.samples)))
    assert all(0 <= share <= 1 for sample in traced.samples for share in sample.kv_share)
    assert max(sum(sample.running) for sample in traced.samples) > LOAD.instances
    assert len(traced.spans) == traced.counts["chunks"]
    by_request: dict[str, list[tuple[float, float]]] = {}
    for request_id, _, start, stop in traced.spans:
        by_request.setdefault(request_id, []).append((start, stop))
    for spans in by_request.values():
        for (_, stop), (start, _) in pairwise(spans):
            assert start >= stop + DISPATCH_SECONDS * 0.999
        assert all(stop > start for start, stop in spans)
