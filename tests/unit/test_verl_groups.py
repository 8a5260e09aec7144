"""Groups of veRL's sessions: whole, late, different, and their ids. No veRL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.client import SamplingParams
from seer.integrations.verl.groups import (
    AGAIN,
    APART,
    WAIT_SECONDS,
    WHOLE,
    Copies,
    GroupKey,
    GroupMachine,
    Place,
    Request,
    Submission,
    loose_id,
    prompt_id,
)

KEY = GroupKey(step=3, validate=False, index="17", copy=0)
REQUEST = Request((5, 6, 7), SamplingParams())
OTHER = Request((5, 6, 8), SamplingParams())
LATE = WAIT_SECONDS + 1


def submissions(items: list) -> list[Submission]:
    return [item for item in items if isinstance(item, Submission)]


def places(items: list) -> dict[int, tuple[str, int]]:
    return {item.session: (item.prompt_id, item.index) for item in items if isinstance(item, Place)}


@given(st.permutations(range(5)), st.integers(0, 5), st.booleans())
def test_equal_requests_become_one_group_whenever_they_come(order, in_time, ends):
    """Those after `in_time` come when the deadline has passed, or never."""
    machine = GroupMachine(KEY, 5)
    found = []
    for session in order[:in_time]:
        found += machine.asked(session, REQUEST, 0.0)
    assert bool(submissions(found)) == (in_time == 5)
    found += machine.due(WAIT_SECONDS - 0.1)
    assert bool(submissions(found)) == (in_time == 5)
    found += machine.due(WAIT_SECONDS)
    for session in order[in_time:]:
        found += machine.ended(session) if ends else machine.asked(session, REQUEST, LATE)
    found += machine.due(2 * LATE)
    asked = order[:in_time] if ends else order
    name = prompt_id(KEY, REQUEST.tokens)
    assert submissions(found) == ([Submission(name, REQUEST, 5, WHOLE)] if asked else [])
    assert places(found) == {session: (name, session) for session in asked}


@pytest.mark.parametrize("other", [OTHER, Request(REQUEST.tokens, SamplingParams(temperature=0.5))])
def test_sessions_that_differ_are_groups_of_one(other):
    machine = GroupMachine(KEY, 3)
    machine.asked(0, REQUEST, 0.0)
    machine.asked(1, REQUEST, 0.0)
    found = machine.asked(2, other, 0.0)
    assert [(each.n, each.kind, each.request) for each in submissions(found)] == [
        (1, APART, REQUEST), (1, APART, REQUEST), (1, APART, other),
    ]  # fmt: skip
    assert {index for _, index in places(found).values()} == {0}
    assert len({name for name, _ in places(found).values()}) == 3


def test_a_late_session_that_differs_is_a_group_of_one():
    machine = GroupMachine(KEY, 2)
    machine.asked(0, REQUEST, 0.0)
    machine.due(WAIT_SECONDS)
    found = machine.asked(1, OTHER, LATE)
    assert [(each.n, each.kind) for each in submissions(found)] == [(1, APART)]
    assert places(found) == {1: (submissions(found)[0].prompt_id, 0)}


def test_further_requests_are_groups_of_one():
    machine = GroupMachine(KEY, 2)
    machine.asked(0, REQUEST, 0.0)
    first = machine.asked(1, REQUEST, 0.0)
    turns = [*machine.asked(0, OTHER, 1.0), *machine.asked(1, OTHER, 1.0), *machine.asked(0, OTHER, 2.0)]
    assert [(each.n, each.kind) for each in submissions(turns)] == [(1, AGAIN)] * 3
    names = [each.prompt_id for each in submissions([*first, *turns])]
    assert len(set(names)) == 4


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.booleans(), st.text(max_size=80), st.integers(0, 1),
            st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
        ),
        max_size=20, unique_by=repr,
    )
)  # fmt: skip
def test_ids_are_distinct_within_a_step_and_fit(given_keys):
    names = {}
    for step, validate, index, copy, tokens in given_keys:
        name = prompt_id(GroupKey(step, validate, index, copy), tuple(tokens))
        assert name == prompt_id(GroupKey(step, validate, index, copy), tuple(tokens))
        assert len(name.encode()) < 200
        names.setdefault((step, name), set()).add((validate, index, copy, tuple(tokens)))
    assert all(len(sources) == 1 for sources in names.values())


def test_an_id_says_what_it_is_of():
    assert prompt_id(KEY, (1, 2)).startswith("train-17-0-")
    assert prompt_id(GroupKey(3, True, "17", 2), (1, 2)).startswith("val-17-2-")
    long = "x" * 40
    assert prompt_id(GroupKey(3, True, long + "1", 0), (1,)) != prompt_id(
        GroupKey(3, True, long + "2", 0), (1,)
    )
    assert loose_id(REQUEST, 4).startswith("loose-4-")
    assert loose_id(REQUEST, 4) != loose_id(OTHER, 4)


def test_copies_are_numbered_within_a_step():
    copies = Copies()
    assert copies.number(1, ["a", "b", "a"]) == [0, 0, 1]
    assert copies.number(1, ["a", "c"]) == [2, 0]
    assert copies.number(2, ["a"]) == [0]
