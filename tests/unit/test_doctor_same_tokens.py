"""What the doctor makes of a verification, and of an engine's steps."""

import io
import time

import pytest

from seer.common.config import load
from seer.common.types import SamplingParams
from seer.doctor import same_tokens
from seer.doctor.report_lines import Report, parse
from seer.doctor.step_clock import Clock
from seer.verify.compare import Comparison, Mismatch
from seer.verify.report import CellReport
from seer.verify.report import Report as Verified


def cell(*verdicts, **fields):
    found = [
        Mismatch(
            kind="token", prompt_id="0", index=0, position=i, reference=1, found=2, verdict=verdict, gap=0.1
        )
        for i, verdict in enumerate(verdicts)
    ]
    comparison = Comparison(responses=32, tokens=2_000, max_logprob_difference=0.0, mismatches=found)
    return CellReport(
        **{"name": "chunk-16", "about": "chunks of 16", "comparison": comparison, "seconds": 2.0} | fields
    )


def judged(*cells, invariant=False):
    found = Verified(
        versions={}, dtype="bfloat16", seed=0, rollout_number=0, n=4, prompts=8, sampling=SamplingParams(max_tokens=64),
        min_tokens=0, logprob_tolerance=0.5, skipped={}, reference=cell(), named=True, cells=list(cells),
    )  # fmt: skip
    to = io.StringIO()
    same_tokens.judge(Report("it", to), found, invariant)
    return [parse(text) for text in to.getvalue().splitlines()]


def test_equal_tokens_pass_and_their_rate_of_differences_is_a_figure():
    (line,) = judged(cell())
    assert (line.status, line.figures["bugs"], line.figures["differences_per_million"]) == ("pass", 0, 0)
    (line,) = judged(cell("numeric", "numeric"))
    assert (line.status, line.figures["by_arithmetic"]) == ("pass", 2)
    assert line.figures["differences_per_million"] == pytest.approx(1_000)


def test_a_bug_fails_and_with_batch_invariant_kernels_every_difference_does():
    (line,) = judged(cell("bug", "numeric"))
    assert (line.status, line.figures["bugs"], "chunk-16" in line.fix) == ("fail", 1, True)
    assert [line.status for line in judged(cell("numeric"), invariant=True)] == ["pass", "fail"]
    assert [line.status for line in judged(cell(), invariant=True)] == ["pass", "pass"]


def test_a_difference_that_nobody_judged_fails():
    (line,) = judged(cell("unjudged"))
    assert line.status == "fail"


def test_a_cell_that_broke_fails_and_the_others_are_judged():
    broken, good = judged(cell(comparison=None, error="no engine"), cell(name="drafts"))
    assert (broken.status, "no engine" in broken.text, good.status) == ("fail", True, "pass")


def test_a_cell_that_did_not_do_what_it_is_for_is_said_and_proves_nothing():
    note, line = judged(cell(unmet=["accepted_tokens > 0 (was 0)"]))
    assert (note.status, "accepted_tokens" in note.text, line.status) == ("note", True, "pass")


def test_prompts_are_of_the_models_vocabulary():
    rows = same_tokens.made_up_prompts(66)
    assert len({row["id"] for row in rows}) == same_tokens.PROMPTS
    assert all(0 <= token < 66 for row in rows for token in row["prompt_token_ids"])
    assert len({tuple(row["prompt_token_ids"]) for row in rows}) == same_tokens.PROMPTS


def test_on_cpus_there_are_no_other_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file, to = tmp_path / "config.toml", io.StringIO()
    file.write_text("")
    assert load(file).engine.batch_invariant is False
    same_tokens.other_kernels(Report("it", to, str(file)))
    (line,) = [parse(text) for text in to.getvalue().splitlines()]
    assert line.status == "skip"


def test_a_parts_time_is_without_what_it_calls_of_others(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(now)))

    class Engine:
        def step(self):
            self.sample()
            self.sample()
            return "done"

        def sample(self):
            pass

    engine, clock = Engine(), Clock()
    clock.watch(engine, "sample", "sampler")
    clock.watch(engine, "step", "backend")
    assert engine.step() == "done"
    assert clock.seconds == {"sampler": 2.0, "backend": 3.0}  # 5 ticks in all, 1 in each sample


def test_a_call_that_raises_is_timed_and_leaves_the_clock_whole(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(now)))

    class Engine:
        def step(self):
            raise RuntimeError("broken")

    engine, clock = Engine(), Clock()
    clock.watch(engine, "step", "backend")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            engine.step()
    assert clock.seconds == {"backend": 2.0}
