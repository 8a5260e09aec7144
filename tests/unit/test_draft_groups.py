"""Which groups an engine drafts for, and whose tokens it asks for."""

from seer.services.engine.draft_groups import RETURN_SECONDS, DraftGroups


def test_what_runs_here_is_wanted_and_its_own_tokens_are_not():
    siblings = DraftGroups()
    siblings.began("a", 0)
    siblings.began("a", 3)
    siblings.began("b", 1)
    assert siblings.wanted(0.0) == {"a": {0, 3}, "b": {1}}
    siblings.ended("b", 1, finished=True, now=0.0)
    assert siblings.wanted(0.0) == {"a": {0, 3}}


def test_a_finished_response_is_never_asked_for_and_one_that_left_is_after_a_while():
    siblings = DraftGroups()
    for index in range(3):
        siblings.began("a", index)
    siblings.ended("a", 1, finished=True, now=10.0)
    siblings.ended("a", 2, finished=False, now=10.0)
    assert siblings.wanted(10.0 + RETURN_SECONDS / 2) == {"a": {0, 1, 2}}
    assert siblings.wanted(10.0 + RETURN_SECONDS) == {"a": {0, 1}}
    siblings.began("a", 2)
    assert siblings.wanted(99.0) == {"a": {0, 1, 2}}


def test_idle_groups_are_forgotten_by_age_once_they_hold_too_much():
    siblings = DraftGroups(max_idle_tokens=100)
    for group_id in ("old", "new", "busy"):
        siblings.began(group_id, 0)
        siblings.learnt(group_id, 80)
    siblings.ended("new", 0, finished=True, now=0.0)
    assert siblings.forget() == []
    siblings.ended("old", 0, finished=True, now=0.0)
    assert siblings.forget() == ["old"]
    assert siblings.forget() == []
    siblings.began("old", 0)
    assert siblings.wanted(0.0) == {"busy": {0}, "old": {0}}


def test_what_comes_of_unknown_groups_changes_nothing():
    siblings = DraftGroups(max_idle_tokens=0)
    siblings.learnt("unknown", 50)
    siblings.ended("unknown", 0, finished=True, now=0.0)
    assert (siblings.wanted(0.0), siblings.forget()) == ({}, [])
    siblings.began("a", 0)
    siblings.ended("a", 1, finished=True, now=0.0)
    assert siblings.wanted(0.0) == {"a": {0}}


def test_clear_names_all_that_was_known():
    siblings = DraftGroups()
    siblings.began("a", 0)
    siblings.began("b", 0)
    siblings.ended("b", 0, finished=True, now=0.0)
    assert sorted(siblings.clear()) == ["a", "b"]
    assert siblings.wanted(0.0) == {}


def test_a_group_that_came_back_is_not_the_one_that_ran_longest_ago():
    siblings = DraftGroups(max_idle_tokens=100)
    for group_id in ("a", "b", "a"):
        siblings.began(group_id, 0)
        siblings.learnt(group_id, 60)
        siblings.ended(group_id, 0, finished=False, now=0.0)
    assert siblings.forget() == ["b", "a"]
