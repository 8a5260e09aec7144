"""What `sim/workload.py` promises of lengths and of step times."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from seer.common.errors import InvalidField
from seer.sim.workload import TUNING_SEED, WORKLOADS, Model, Workload

each_workload = pytest.mark.parametrize("name", WORKLOADS)
MODEL = {
    "step": 0.02, "request": 1e-4, "kv": 1e-8, "attend": 1e-9, "row": 1e-5, "weights": 2e-3, "prefill": 1e-5,
    "pull": 1e-6, "kv_tokens": 4000,
}  # fmt: skip
LOAD = {
    "name": "small",
    "instances": 2,
    "groups": 3,
    "group_size": 4,
    "cap": 1000,
    "mean": 200.0,
    "prompt": 10,
}


@each_workload
def test_lengths_are_a_function_of_the_seed(name):
    load = WORKLOADS[name]()
    lengths = load.draw(3)
    assert [len(group) for group in lengths] == [load.group_size] * load.groups
    assert all(1 <= length <= load.cap for group in lengths for length in group)
    assert WORKLOADS[name]().draw(3) == lengths
    assert load.draw(4) != lengths
    assert load.draw(TUNING_SEED) != lengths


@each_workload
@pytest.mark.parametrize("between", [0.0, 0.65, 0.9])
def test_the_mean_over_seeds_is_the_one_asked_for(name, between):
    load = replace(WORKLOADS[name](), between=between)
    means = [statistics.fmean(map(statistics.fmean, load.draw(seed))) for seed in range(12)]
    error = statistics.stdev(means) / math.sqrt(len(means))
    assert abs(statistics.fmean(means) - load.mean) < 4 * error
    assert error < 0.05 * load.mean, "or it would hide anything"


@pytest.mark.parametrize("between", [0.0, 0.3, 0.65, 0.9])
def test_the_prompt_has_its_share_of_the_variance(between):
    load = Workload(
        name="free", instances=1, groups=4000, group_size=8, cap=10**7, mean=1000, outliers=0, between=between,
        model=Model(**MODEL | {"kv_tokens": 2 * 10**7}),
    )  # fmt: skip
    logs = np.log(np.array(load.draw(0)))
    assert logs.var() == pytest.approx(load.sigma**2, rel=0.1)
    within = logs.var(axis=1, ddof=1).mean()
    assert 1 - within / logs.var() == pytest.approx(between, abs=0.05)


def test_recorded_lengths_are_taken_as_they_are():
    recorded = ((5, 900), (7, 8, 9))
    load = Workload(**LOAD, lengths=recorded, model=Model(**MODEL))
    assert load.draw(0) == load.draw(1) == [list(group) for group in recorded]


@given(
    st.integers(1, 500), st.floats(0, 4000), st.floats(0, 10**6),
    st.integers(0, 100), st.floats(0, 100), st.floats(0, 1000),
)  # fmt: skip
def test_steps_never_get_shorter(requests, drafted, kv_tokens, more_requests, more_drafted, more_kv):
    for model in [Model(**MODEL), *(make().model for make in WORKLOADS.values())]:
        seconds = model.seconds(requests, drafted, kv_tokens)
        assert seconds >= model.step
        assert model.seconds(requests, drafted + more_drafted, kv_tokens) >= seconds * (1 - 1e-12)
        assert model.seconds(requests, drafted, kv_tokens + more_kv) >= seconds * (1 - 1e-12)
        # as many drafted rows for each request, and as much KV
        scale = (requests + more_requests) / requests
        larger = model.seconds(requests + more_requests, drafted * scale, kv_tokens * scale)
        assert larger >= seconds * (1 - 1e-12)


@each_workload
def test_the_buffer_is_told_what_the_model_holds(name):
    load = WORKLOADS[name]()
    assert load.capacity.kv_blocks * load.capacity.block_size <= load.model.kv_tokens
    assert load.capacity.holds(load.prompt, load.cap), "the longest response must fit an empty instance"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("workload.instances", {"instances": 0}),
        ("workload.between", {"between": 1.5}),
        ("workload.outliers", {"outliers": -0.1}),
        ("workload.mean", {"mean": 1000.0}),
        ("workload.sigma", {"sigma": 0.0}),
        ("workload.lengths", {"lengths": ((5, 1001),)}),
        ("model.kv_tokens", {"model": {"kv_tokens": 1010}}),
        (r"model\.kv_tokens = 4000: .* on each rank: raise it to 4096", {"ranks": 4}),
        ("model.step", {"model": {"step": 0.0}}),
        ("model.pull", {"model": {"pull": -1.0}}),
        ("model.kv", {"model": {"kv": math.nan}}),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(field, fields):
    with pytest.raises(InvalidField, match=field):
        Workload(**LOAD | fields | {"model": Model(**MODEL | fields.get("model", {}))})
