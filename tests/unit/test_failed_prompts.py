"""What the buffer logs of prompts that fail: every one is counted, and the log is not flooded."""

from __future__ import annotations

from seer.common import wire
from seer.services.buffer.failed_prompts import FOLD_SECONDS, MOST_IDS, MOST_REASONS, MOST_TEXT, FailedPrompts


def refused(*prompts, why="too long", code="failed", rollout="r"):
    return wire.Refused(code=code, message=why, rollout_id=rollout, prompt_ids=list(prompts))


def test_the_first_ones_are_due_at_once_and_further_ones_folded():
    failed = FailedPrompts()
    assert failed.due(5.0) == []
    failed.add(refused("a", "b"))
    failed.add(refused("c", why="no room", rollout="s"))
    first, second = failed.due(5.0)
    assert (first.rollout_id, first.code, first.why, first.prompts) == ("r", "failed", "too long", 2)
    assert first.first == ["r/a", "r/b"]
    assert second.first == ["s/c"]
    for number in range(30):
        failed.add(refused(f"p{number}"))
    assert failed.due(5.0 + FOLD_SECONDS - 0.1) == []
    [later] = failed.due(5.0 + FOLD_SECONDS)
    assert later.prompts == 30
    assert later.first == [f"r/p{number}" for number in range(MOST_IDS)]
    failed.add(refused("last"))
    assert [each.first for each in failed.due(5.0 + FOLD_SECONDS, last=True)] == [["r/last"]]
    assert failed.due(1e9) == []


def test_any_number_of_prompts_and_reasons_is_a_few_lines_that_count_them_all():
    failed = FailedPrompts()
    for start in range(0, 100_000, 1000):
        names = [f"p{number}" for number in range(start, start + 1000)]
        failed.add(refused(*names, why=f"for reason {start // 4000} " + "x" * 10_000))
    lines = failed.due(0.0)
    assert len(lines) == MOST_REASONS + 1
    assert sum(each.prompts for each in lines) == 100_000
    assert all(len(each.first) == MOST_IDS and len(each.why) <= MOST_TEXT for each in lines)
    assert sum(len(repr(each)) for each in lines) < 10_000
