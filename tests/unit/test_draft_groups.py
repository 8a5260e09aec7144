"""Which groups an engine drafts for, and whose tokens it asks for."""

from seer.services.engine.draft_groups import RETURN_SECONDS, DraftGroups


def test_what_runs_here_is_wanted_and_its_own_tokens_are_not():
    groups = DraftGroups()
    groups.chunk_started("a", 0)
    groups.chunk_started("a", 3)
    groups.chunk_started("b", 1)
    assert groups.to_fetch(0.0) == {"a": {0, 3}, "b": {1}}
    groups.chunk_ended("b", 1, finished=True, now=0.0)
    assert groups.to_fetch(0.0) == {"a": {0, 3}}


def test_a_finished_response_is_never_asked_for_and_one_that_left_is_after_a_while():
    groups = DraftGroups()
    for index in range(3):
        groups.chunk_started("a", index)
    groups.chunk_ended("a", 1, finished=True, now=10.0)
    groups.chunk_ended("a", 2, finished=False, now=10.0)
    assert groups.to_fetch(10.0 + RETURN_SECONDS / 2) == {"a": {0, 1, 2}}
    assert groups.to_fetch(10.0 + RETURN_SECONDS) == {"a": {0, 1}}
    groups.chunk_started("a", 2)
    assert groups.to_fetch(99.0) == {"a": {0, 1, 2}}


def test_a_response_in_the_place_of_one_that_finished_is_asked_for_once_it_runs_elsewhere():
    groups = DraftGroups()
    for finished in (True, False):
        groups.chunk_started("a", 0)
        groups.chunk_started("a", 1)
        groups.chunk_ended("a", 0, finished, now=0.0)
    assert groups.to_fetch(RETURN_SECONDS) == {"a": {1}}


def test_idle_groups_are_forgotten_by_age_once_they_hold_too_much():
    groups = DraftGroups(max_idle_tokens=100)
    for group_id in ("old", "new", "busy"):
        groups.chunk_started(group_id, 0)
        groups.add_tokens(group_id, 80)
    groups.chunk_ended("old", 0, finished=True, now=0.0)
    assert groups.evict() == []
    groups.chunk_ended("new", 0, finished=True, now=1.0)
    assert groups.evict() == ["old"]
    assert groups.evict() == []
    groups.add_tokens("new", 21)  # fetched
    assert groups.evict() == ["new"]
    groups.chunk_started("old", 0)
    assert groups.to_fetch(0.0) == {"busy": {0}, "old": {0}}


def test_what_comes_of_unknown_groups_changes_nothing():
    groups = DraftGroups(max_idle_tokens=0)
    groups.add_tokens("unknown", 50)
    groups.chunk_ended("unknown", 0, finished=True, now=0.0)
    assert (groups.to_fetch(0.0), groups.evict()) == ({}, [])
    groups.chunk_started("a", 0)
    groups.chunk_ended("a", 1, finished=True, now=0.0)
    assert groups.to_fetch(0.0) == {"a": {0}}


def test_clear_names_all_that_was_known():
    groups = DraftGroups()
    groups.chunk_started("a", 0)
    groups.chunk_started("b", 0)
    groups.chunk_ended("b", 0, finished=True, now=0.0)
    assert sorted(groups.clear()) == ["a", "b"]
    assert groups.to_fetch(0.0) == {}


def test_a_group_that_came_back_is_not_the_one_that_ran_longest_ago():
    groups = DraftGroups(max_idle_tokens=100)
    for group_id in ("a", "b", "a"):
        groups.chunk_started(group_id, 0)
        groups.add_tokens(group_id, 60)
        groups.chunk_ended(group_id, 0, finished=False, now=0.0)
    assert groups.evict() == ["b", "a"]
