"""What the doctor makes of an engine that fetched and computed the same contexts."""

import io
from types import SimpleNamespace

import pytest

from seer.common.policy.fetch_choice import NEVER, FetchChoice
from seer.common.types import Capacity, InstanceStats
from seer.doctor import pool
from seer.doctor.report_lines import Report, parse

TOKEN_BYTES = 144 * 1024  # of an 8B model


def engine(choice, **stats):
    """An engine whose connector has measured this."""
    kv = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=TOKEN_BYTES * 32 * 50)] * 2, num_blocks=100)
    capacity = Capacity(kv_blocks=99, block_size=32, max_num_seqs=64, max_model_len=1500)
    scheduler = SimpleNamespace(kv_cache_config=kv, connector=SimpleNamespace(choice=choice))
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler), vllm_config=config)
    return SimpleNamespace(stats=lambda: InstanceStats(**stats), core=core, capacity=capacity)


def judged(backend):
    to = io.StringIO()
    pool._judge(Report("pool", to), backend)
    return [parse(text) for text in to.getvalue().splitlines()]


def measured(gb_per_s):
    """25,000 tokens/s of prefill, and fetches at this speed, on two ranks together."""
    choice = FetchChoice()
    for tokens in (500, 1000, 1500, 2000):
        choice.step({"a": tokens + 1}, {}, tokens / 25_000)
        choice.load(tokens, 0.002 + tokens * 2 * TOKEN_BYTES / (gb_per_s * 1e9), 1e6 + tokens)
    return choice


def test_fetching_is_compared_with_computing():
    passed, note = judged(engine(measured(20.0), pool_tokens=5_000))
    assert passed.status == "pass"
    figures = note.figures
    assert figures["kv_bytes_per_token"] == 2 * TOKEN_BYTES
    assert figures["fetch_gb_per_s"] == pytest.approx(20.0, rel=0.01)
    assert figures["prefill_tokens_per_s"] == 25_000
    assert 0 < figures["pull_tokens"] < 200
    assert judged(engine(measured(1.0), pool_tokens=5_000))[1].figures["pull_tokens"] == NEVER


@pytest.mark.parametrize("wrong", [{"pool_tokens": 0}, {"pool_failures": 1}, {"pool_corrupt": 1}])
def test_kv_that_is_not_found_or_wrong_fails(wrong):
    line = judged(engine(measured(20.0), **({"pool_tokens": 5_000} | wrong)))[0]
    assert (line.status, "docs/kv-pool.md" in line.fix) == ("fail", True)


def test_too_few_fetches_say_nothing_of_speed():
    lines = judged(engine(FetchChoice(), pool_tokens=5_000))
    assert [line.status for line in lines] == ["pass", "skip"]


def test_contexts_fit_the_engine():
    assert list(pool._lengths(engine(FetchChoice()))) == [512] * pool.ROUNDS + [1024] * pool.ROUNDS
