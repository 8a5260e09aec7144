"""`sim/study.py`, `sim/bound.py` and `sim/plan.py` on clusters of two instances."""

from __future__ import annotations

import math

import msgspec
import pytest
from msgspec.structs import replace

from seer.common.errors import InvalidField
from seer.sim import study
from seer.sim.bound import of_rollout
from seer.sim.drafting import DRAFT_SHARE, GAINS
from seer.sim.paper import figures
from seer.sim.plan import instances_for
from seer.sim.study import BASELINE, Run, Task, Variant, perform, run_all, summarize, tasks, variants
from seer.sim.workload import WORKLOADS, Model, Workload

MODEL = Model(
    step=0.01, request=1e-4, kv=1e-6, attend=0.0, row=0.0, weights=0.0, prefill=1e-5, pull=1e-6,
    kv_tokens=3000, kv_bytes=1000, max_num_seqs=8,
)  # fmt: skip
LOAD = Workload(name="tiny", instances=2, groups=8, group_size=4, cap=400, mean=100.0, prompt=16, model=MODEL)


def runs_of(load: Workload, compared: list[Variant], seeds: int, workers: int = 1) -> list[Run]:
    return run_all(list(tasks(load, compared, seeds, chunk_size=64)), workers, lambda run: None)


def test_the_bound_is_that_of_full_steps_or_of_the_longest_alone() -> None:
    # Two sequences fit, of equal length: every step has both, none shares with a third.
    model = replace(MODEL, max_num_seqs=2, kv=0.0)
    load = replace(LOAD, model=model)
    least = of_rollout(load, [[100, 100], [100, 100]], drafts=False)
    assert least.work == pytest.approx(200 * (0.01 + 2e-4) + 4 * 16 * 1e-5)
    assert least.alone == pytest.approx(100 * (0.01 + 1e-4) + 16 * 1e-5)
    assert least.seconds(1) == pytest.approx(least.work)
    assert least.seconds(100) == pytest.approx(least.alone)


def test_the_bound_counts_steps_by_the_memory_they_need() -> None:
    # 1000 tokens of KV, contexts of 500 on average: two fit, whatever max_num_seqs allows.
    load = replace(LOAD, cap=983, prompt=1, model=replace(MODEL, kv_tokens=1000, kv=0.0, prefill=0.0))
    least = of_rollout(load, [[983] * 4], drafts=False)
    context = 4 * 983 * (1 + 983 / 2)
    assert least.work == pytest.approx(context / 1000 * 0.01 + 4 * 983 * 1e-4)


def test_the_bound_hides_computing_behind_reading_weights_only_as_far_as_it_goes() -> None:
    model = replace(MODEL, max_num_seqs=2, kv=0.0, request=0.0, prefill=0.0, row=0.004, weights=0.006)
    least = of_rollout(replace(LOAD, model=model), [[10, 10]], drafts=False)
    assert least.work == pytest.approx(10 * (0.01 + 2 * 0.004 - 0.006))
    assert least.alone == pytest.approx(10 * 0.01)
    # Where more, smaller steps cost less than what they save, as many are taken as hide all computing.
    model = replace(model, step=0.001)
    least = of_rollout(replace(LOAD, model=model), [[10, 10]], drafts=False)
    assert least.work == pytest.approx(20 * 0.004 / 0.006 * 0.001)


def test_with_drafts_the_bound_takes_them_only_where_they_pay() -> None:
    lengths = [[100] * 4]
    dear = replace(LOAD, model=replace(MODEL, request=1.0))
    assert of_rollout(dear, lengths, drafts=True) == of_rollout(dear, lengths, drafts=False)
    free = replace(LOAD, model=replace(MODEL, request=0.0, kv=0.0, prefill=0.0))
    gain = GAINS[1, -1]  # three siblings: as published for one
    alone = of_rollout(free, lengths, drafts=True).alone
    assert alone == pytest.approx(100 * 0.01 * (1 + DRAFT_SHARE) / gain)


def test_a_run_tells_its_bound_its_tokens_and_how_it_went_on() -> None:
    for seed, variant in enumerate([Variant("seer"), Variant("seer", True), Variant(study.ORACLE)]):
        run = perform(Task(LOAD, variant, seed, 64))
        assert 0 < run.bound <= run.total
        assert run.tokens == sum(map(sum, LOAD.draw(seed)))
        assert run.curve[0] == 0.0
        assert run.curve[-1] == run.total
        assert run.curve == sorted(run.curve)


def test_drafts_never_raise_the_bound() -> None:
    least = of_rollout(LOAD, LOAD.draw(0), drafts=False)
    drafted = of_rollout(LOAD, LOAD.draw(0), drafts=True)
    assert drafted.work <= least.work
    assert drafted.alone <= least.alone


def test_the_baseline_is_always_there_and_drafts_come_beside() -> None:
    assert variants(["seer"], drafts=False) == [BASELINE, Variant("seer")]
    assert variants(["seer", "static", "seer"], drafts=True) == [
        Variant("seer"), BASELINE, Variant("seer", True), Variant("static", True),
    ]  # fmt: skip
    with pytest.raises(InvalidField, match="--policy = 'sear': choose from seer, "):
        variants(["sear"], drafts=False)


def test_worker_processes_change_nothing() -> None:
    compared = variants(["seer"], drafts=False)
    assert runs_of(LOAD, compared, 2, workers=2) == runs_of(LOAD, compared, 2)


def test_variants_meet_the_same_lengths_and_are_compared_seed_by_seed() -> None:
    runs = runs_of(LOAD, [BASELINE, Variant("seer"), Variant("oracle")], 3)
    by_seed = {seed: {run.tokens for run in runs if run.seed == seed} for seed in range(3)}
    assert all(len(tokens) == 1 for tokens in by_seed.values())
    assert len(set.union(*by_seed.values())) == 3
    static, ours, _ = summarize(runs, first=Variant("seer"))
    ratios = [
        math.log(a.total / b.total) for a, b in zip(runs[::3], runs[1::3], strict=True)
    ]  # static and seer of each seed
    assert static.speedup.mean == static.speedup.low == static.speedup.high == 1.0
    assert ours.speedup.mean == pytest.approx(math.exp(sum(ratios) / 3))
    assert ours.speedup_over_first.mean == 1.0
    assert static.speedup_over_first.mean == pytest.approx(1 / ours.speedup.mean)
    deviation = math.sqrt(sum((x - sum(ratios) / 3) ** 2 for x in ratios) / 2)
    assert ours.speedup.high is not None
    assert math.log(ours.speedup.high / ours.speedup.mean) == pytest.approx(4.30 * deviation / math.sqrt(3))


def test_a_summary_is_of_all_runs() -> None:
    load = replace(LOAD, cap=2000, mean=800.0)  # contexts that are worth a fetch
    runs = runs_of(load, [BASELINE, Variant("seer")], 2)
    static, ours = summarize(runs, first=BASELINE)
    requests = 2 * LOAD.groups * LOAD.group_size
    mine = [run for run in runs if run.variant.policy == "seer"]
    assert ours.total == pytest.approx(sum(run.total for run in mine) / 2)
    assert ours.efficiency == pytest.approx(sum(run.bound / run.total for run in mine) / 2)
    assert ours.preemptions == 0
    pulled = sum(run.counts["pulled_tokens"] for run in mine)
    assert pulled > 0
    assert ours.pulled_terabytes == pytest.approx(pulled / 2 * 1000 / 1e12)
    assert ours.predicted == sum(run.prediction["predicted"] for run in mine) / requests
    assert ours.error > 0
    assert static.tail_ratio == 1.0


def test_one_seed_has_no_interval_and_no_tail_no_ratio() -> None:
    load = replace(LOAD, groups=1, group_size=1)
    _, ours = summarize(runs_of(load, [BASELINE, Variant("seer")], 1), first=BASELINE)
    assert (ours.speedup.low, ours.speedup.high, ours.total_deviation) == (None, None, 0.0)
    assert ours.tail_ratio is None
    assert msgspec.json.decode(msgspec.json.encode(ours), type=study.Summary) == ours


def test_only_a_traced_run_says_what_instances_did() -> None:
    assert perform(Task(LOAD, BASELINE, 0, 64)).trace is None
    trace = perform(Task(LOAD, BASELINE, 0, 64, traced=True)).trace
    assert trace is not None
    assert len(trace.samples) > 100
    assert {span[0] for span in trace.spans} == {f"r/{g}#{i}" for g in range(8) for i in range(4)}


def test_the_papers_figures_are_of_its_workloads_alone() -> None:
    load = WORKLOADS["qwen2-vl-72b"]()
    whole = Variant("seer-paper", drafts=True)
    assert figures(load, BASELINE).total == 3957
    assert figures(load, Variant("divided")).tail_ratio == 0.79
    assert figures(load, Variant("seer")).speedup is None
    assert figures(replace(load, group_size=8), whole).speedup == 1.82
    assert figures(replace(load, group_size=8), BASELINE).total is None
    assert figures(LOAD, BASELINE).total is None


def planned(seconds: float, load: Workload = LOAD) -> tuple[int, dict[int, float]]:
    tried: dict[int, float] = {}
    found = instances_for(
        load, Variant("seer"), seconds, seeds=3, chunk_size=64, workers=1, on_result=tried.__setitem__
    )
    return found, tried


def test_a_plan_is_the_least_number_that_was_fast_enough() -> None:
    least = of_rollout(LOAD, LOAD.draw(0), drafts=False)
    found, tried = planned(1.2 * least.alone)
    assert found > 1
    assert tried[found] <= 1.2 * least.alone < tried[found - 1]


def test_a_plan_below_the_longest_response_alone_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"--plan = 0\.5: no number .* the longest response alone takes"):
        planned(0.5)


def test_a_plan_that_even_an_instance_each_cannot_keep_says_so() -> None:
    load = replace(LOAD, groups=1, group_size=2, lengths=((400, 400),))
    alone = of_rollout(load, load.draw(0), drafts=False).alone
    with pytest.raises(InvalidField, match="even with an instance for each of 2 responses"):
        planned(alone * 1.0001, load)
