"""The engine's side of drafting: what reaches the ranks, when, and in how many calls."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from seer.common.config import DraftsConfig
from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.profile_check import EVERY, WINDOW, WINDOWS
from seer.services.engine.vllm.drafts.control import MAX_QUEUED, Drafting


class Ranks:
    """Two ranks, of which the first drafts; `waited` and `sent` are the calls."""

    def __init__(self):
        self.waited, self.sent, self.learned, self.problem, self.took = [], [], {}, None, 2.0

    def rpc(self, method, **arguments):
        self.waited.append(method)
        if method != "seer_take_acceptance":
            return [None, None]
        return [
            (2.5, {name: self.learned.pop(name) for name in arguments["groups"] if name in self.learned}),
            (0.0, {}),
        ]

    def send(self, method, **arguments):
        assert method == "seer_change_drafting"
        self.sent.append([(name, next(iter(given.values()))) for name, given in arguments["changes"]])
        future = Future()
        future.set_exception(self.problem) if self.problem else future.set_result([self.took, 0.0])
        return future


@pytest.fixture
def ranks():
    return Ranks()


def drafting(ranks, source="grouped"):
    return Drafting(ranks.rpc, ranks.send, DraftsConfig(source=source), 100)


def chunk(group="g", index=0):
    return SimpleNamespace(group_id=group, index=index, tokens=[1, 2, 3, 4], prompt_len=3)


def delta(group="g", *tokens):
    return SimpleNamespace(group_id=group, tokens=np.array(tokens, np.int32))


def test_what_is_to_be_done_to_trees_goes_in_order_with_the_next_step_and_nothing_waits(ranks):
    control = drafting(ranks)
    assert [control.begin(chunk(index=i)) for i in range(3)] == ["g"] * 3
    wrong = delta("g", 100)
    control.feed([delta("g", 5), delta("other", 6), wrong])
    control.forget(["g", "unknown"])
    control.begin(chunk())
    assert (ranks.sent, ranks.waited) == ([], [])
    control.flush()
    control.flush()
    ((first, (fed, deltas), *rest),) = ranks.sent
    assert first == ("open", "g")
    assert (fed, [each.tokens.tolist() for each in deltas]) == ("feed", [[5]])
    assert rest == [("forget", ["g"]), ("open", "g")]
    assert ranks.waited == []


def test_a_chunk_that_begins_after_its_tree_was_dropped_has_one(ranks):
    control = drafting(ranks, "own")
    name = control.begin(chunk())
    control.end(name)
    assert control.begin(chunk()) == name == "g#0"
    control.flush()
    names = [name for name, _ in ranks.sent[0]]
    assert names == ["open", "forget", "open"]


def test_ends_of_a_step_are_one_call_and_a_rank_that_does_not_draft_says_nothing(ranks):
    control = drafting(ranks)
    ranks.learned = {"a": ([4], [2]), "b": ([1], [1]), "c": ([9], [9])}
    for name in "abc":
        control.count(name, 2, 1)
    assert control.take_acceptance(["b", "a", "b"]) == {"a": ([4], [2]), "b": ([1], [1])}
    assert (ranks.waited, control.seconds) == (["seer_take_acceptance"], 2.5)


def test_ahead_the_time_that_drafts_took_comes_with_a_later_step_and_nobody_waits(ranks):
    control = Drafting(ranks.rpc, ranks.send, DraftsConfig(), 100, lambda length: None)
    control.count("g", 2, 1)
    assert control.take_acceptance(["g"]) == {}
    for _ in range(3):
        control.flush()
    assert (ranks.sent, ranks.waited) == ([[]], [])
    assert control.counts()["draft_seconds"] == 2.0
    ranks.took = 1.5  # as of a call that was sent before the last one that was waited for
    control.begin(chunk())
    for _ in range(2):
        control.flush()
    assert control.seconds == 2.0


def test_nobody_is_asked_about_trees_whose_drafts_were_not_verified(ranks):
    control = drafting(ranks)
    control.count("a", 1, 0)
    assert control.take_acceptance(["a", "b"]) == {}
    control.count("a", 2, 3)
    control.take_acceptance(["a"])
    assert control.take_acceptance(["a"]) == {}
    assert ranks.waited == ["seer_take_acceptance"]
    assert (control.verifications, control.drafted, control.accepted) == (2, 3, 1)


class Script:
    """A switch that says what it is told, and keeps what it is told."""

    def __init__(self, *says):
        self.says, self.told = list(says), []

    def begin(self, requests, tokens):
        return self.says.pop(0)

    def end(self, tokens, seconds, *, usual, prefilled):
        self.told.append((tokens, seconds, usual, prefilled))


def test_a_switch_that_turns_travels_with_the_step_that_it_is_for(ranks):
    control = drafting(ranks)
    control._switch = Script(True, False, False, True)
    for _ in range(4):
        control.begin(chunk())
        control.begin_step(1, lambda: 0.0)
        control.end_step(3, 0.1, usual=True, prefilled=7)
    first, *switched = ranks.sent
    assert first == [("open", "g")]
    assert switched == [[("switch", False)], [("switch", True)]]
    assert control._switch.told == [(3, 0.1, True, 7)] * 4
    assert ranks.waited == []


def test_a_step_without_requests_turns_no_switch(ranks):
    control = drafting(ranks)
    control._switch = Script()
    control.begin_step(0, lambda: 0.0)
    assert ranks.sent == []


@pytest.mark.parametrize(("second", "drafts_first"), [(1.5, True), (2.0, False)])
def test_drafts_are_tried_first_where_a_good_one_pays_by_the_profile(ranks, second, drafts_first):
    control = drafting(ranks)
    control.start(StepCosts(batches=(1, 8), drafts=(0, 1), grid=((1.0, second),) * 2), False, Path())
    control.begin_step(4, lambda: 0.0)
    assert control._on is drafts_first


def test_what_is_measured_drafts_in_every_step(ranks):
    control = drafting(ranks)
    control.start(StepCosts(batches=(1,), drafts=(0, 1), grid=((1.0, 9.0),)), False, Path())
    control.begin_step(1, lambda: 0.0)
    control.start_always()
    control.begin_step(1, lambda: 0.0)
    assert [each for sent in ranks.sent for each in sent][-2:] == [
        ("switch", False), ("switch", True)
    ]  # fmt: skip


@pytest.mark.parametrize(("seconds", "is_kept"), [(1.0, True), (0.5, False), (2.0, False)])
def test_a_profile_that_is_off_is_given_up(ranks, tmp_path, seconds, is_kept):
    control, kept = drafting(ranks), tmp_path / "profile.json"
    kept.write_text("{}")
    control.start(StepCosts(batches=(1,), drafts=(0, 1), grid=((1.0, 1.1),)), False, kept)
    for _ in range(EVERY * WINDOW * WINDOWS):
        control.check_profile(1, lambda: 1.0, seconds)
    assert kept.exists() is is_kept
    control.check_profile(1, lambda: 1.0, seconds)  # and nothing more comes of it


def test_steps_that_verify_drafts_are_not_compared_with_the_profile(ranks, tmp_path):
    control, kept = drafting(ranks), tmp_path / "profile.json"
    kept.write_text("{}")
    control.start(StepCosts(batches=(1,), drafts=(0, 1), grid=((1.0, 1.1),)), False, kept)
    for _ in range(2 * EVERY * WINDOW * WINDOWS):
        control.count("g", 2, 1)
        control.check_profile(1, lambda: 1.0, 2.0)
    assert kept.exists()


def test_an_engine_that_is_only_fed_gathers_no_more_than_its_bound(ranks):
    control = drafting(ranks)
    control.begin(chunk())
    for _ in range(3 * MAX_QUEUED):
        control.feed([delta("g", 1)])
        assert len(control._queued) < MAX_QUEUED
    control.flush()
    assert sum(map(len, ranks.sent)) == 3 * MAX_QUEUED + 1


def test_what_failed_on_a_rank_is_raised_at_the_next_step(ranks):
    control = drafting(ranks)
    ranks.problem = RuntimeError("a rank is gone")
    control.begin(chunk())
    control.flush()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        control.flush()


def test_all_trees_are_gone_before_weights_change(ranks):
    control = drafting(ranks)
    control.begin(chunk())
    control.clear()
    assert [name for name, _ in ranks.sent[0]] == ["open", "forget"]
    assert ranks.waited == ["seer_use_common_tree"]
