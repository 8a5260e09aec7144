"""The doctor's verdict: a function of its lines."""

import tomllib

from seer.common.config import load
from seer.common.types import MAX_CONTEXT
from seer.doctor.report_lines import Line
from seer.doctor.verdict import verdict

STARTED = Line("start", "pass", "an engine starts")
CAPACITY = Line("start", "note", "capacity", figures={"block_size": 64, "max_num_batched_tokens": 8192})


def step(batch, drafts, ms):
    return Line("step-table", "note", "step", figures={"batch": batch, "drafts": drafts, "ms": ms})


def fetching(pull):
    figures = {"pull_tokens": pull, "prefill_tokens_per_s": 25_000}
    return Line("pool", "note", "fetching against computing", figures=figures)


def cell(invariant, rate, seconds):
    figures = {
        "cell": "chunk-16",
        "batch_invariant": invariant,
        "differences_per_million": rate,
        "seconds": seconds,
    }
    return Line("same-tokens", "pass", "the same tokens", figures=figures)


def recommended(*lines):
    return {f"{each.section}.{each.key}": each.value for each in verdict([STARTED, *lines]).settings}


def test_what_fails_makes_it_not_ready_whatever_else_is_fast():
    found = verdict([STARTED, Line("ports", "fail", "taken", "end it"), Line("limits", "slow", "few cores")])
    assert (found.state, found.text) == ("not ready", "not ready: ports: taken")


def test_what_is_slow_makes_it_slower_and_nothing_wrong_ready():
    slow = Line("limits", "slow", "few cores", "more cores")
    found = verdict([STARTED, slow])
    assert (found.state, found.text) == ("slower", "ready, slower than it could be: limits: few cores")
    assert verdict([STARTED]).state == "ready"
    assert verdict([STARTED, *[slow] * 9]).text.endswith("and 4 more")


def test_without_an_engine_nobody_is_ready():
    assert verdict([]).state == "unknown"
    assert verdict([Line("start", "fail", "no model")]).state == "not ready"


def test_nothing_is_recommended_that_was_not_measured():
    assert recommended() == {}
    assert recommended(Line("step-table", "note", "ended", figures={"seconds": 1.0})) == {}


def test_the_smallest_batch_that_is_about_as_fast_as_any_is_recommended():
    rising = [step(1, 0, 10.0), step(64, 0, 12.0), step(256, 0, 20.0)]
    assert recommended(*rising)["engine.max_num_seqs"] == "256"
    flat = [*rising, step(1024, 0, 79.0)]  # 12,962 tokens a second instead of 12,800
    assert recommended(*flat)["engine.max_num_seqs"] == "256"


def test_drafts_are_recommended_where_any_batch_gains_from_them():
    dear = [step(1, 0, 1.0), step(1, 4, 5.0), step(64, 0, 2.0), step(64, 4, 9.0)]
    assert recommended(*dear)["drafts.source"] == '"off"'
    assert recommended(*dear, step(1, 2, 1.1))["drafts.source"] == '"grouped"'
    assert "drafts.source" not in recommended(step(1, 0, 1.0))


def test_a_pool_is_recommended_where_fetching_beats_computing():
    assert recommended(fetching(169))["pool.kind"] == '"mooncake"'
    assert recommended(fetching(MAX_CONTEXT))["pool.kind"] == '"none"'


def test_batch_invariant_kernels_are_judged_only_beside_the_others():
    assert "engine.batch_invariant" not in recommended(cell(0, 12.0, 1.0))
    assert recommended(cell(0, 12.0, 1.0), cell(1, 0.0, 1.3))["engine.batch_invariant"] == "true"
    assert recommended(cell(1, 0.0, 1.3), cell(0, 0.0, 1.0))["engine.batch_invariant"] == "false"


def test_the_number_of_engines_is_that_which_was_planned():
    planned = Line("limits", "note", "planned", figures={"instances": 3})
    assert "# seer up --instances 3" in verdict([STARTED, planned, CAPACITY]).shown()
    assert "--instances" not in verdict([STARTED, CAPACITY]).shown()


def test_the_settings_can_be_pasted_into_a_configuration(tmp_path):
    lines = [
        STARTED,
        CAPACITY,
        step(1, 0, 1.0),
        step(1, 4, 1.1),
        fetching(7),
        cell(0, 3.0, 1.0),
        cell(1, 0.0, 1.2),
    ]
    pasted = verdict(lines).shown().partition("was measured:\n")[2]
    assert tomllib.loads(pasted)["engine"]["max_num_batched_tokens"] == 8192
    (tmp_path / "seer.toml").write_text(pasted)
    config = load(tmp_path / "seer.toml", {})
    assert (config.shared.block_size, config.pool.kind, config.engine.batch_invariant) == (
        64,
        "mooncake",
        True,
    )
