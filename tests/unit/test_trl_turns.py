"""Which responses a trainer's samples are: groups, indices and names. Pure."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from seer.common.types import Placed
from seer.integrations.trl.turns import Context, Sample, Submission, first_turns, later_turn

SHOWN = ((), (Placed("a" * 64, 0, 1),))
"""Prompts may differ in their images alone."""

PROMPTS = st.lists(st.integers(0, 3).map(lambda x: Context((x % 2,), SHOWN[x // 2])), max_size=60)


def places(wanted: list[Submission]) -> list[tuple[str, int, Context]]:
    return [
        (each.group, each.first + i, Context(each.tokens, each.images))
        for each in wanted
        for i in range(each.n)
    ]


@given(PROMPTS, st.integers(1, 7))
def test_the_sample_at_a_position_is_that_response_of_its_group(prompts, size):
    wanted = first_turns("train-2", prompts, size, 9)
    expected = [(f"train-2-{p // size}", p % size, prompt) for p, prompt in enumerate(prompts)]
    assert places(wanted) == expected
    assert len({each.prompt_id for each in wanted}) == len(wanted)
    for before, after in pairwise(wanted):  # equal prompts side by side are one
        assert (before.group, before.tokens, before.images) != (after.group, after.tokens, after.images)
    parts = Counter(each.group for each in wanted)
    assert all(each.whole == (parts[each.group] == 1) for each in wanted)
    assert all(each.prompt_id == each.group for each in wanted if each.whole)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_no_two_requests_of_a_step_have_the_same_noise(processes, size, turns):
    """Whatever the number of processes that the samples are spread over, the names are the same."""
    prompts = [Context((1,))] * size * processes
    sample = Sample([1], 0, 1)
    asked = [(name, index) for name, index, _ in places(first_turns("train-0", prompts, size, 9))]
    for turn in range(1, turns + 1):
        for position in range(len(prompts)):
            one = later_turn(3, "train-0", position, size, turn, sample, 9, SHOWN[1])
            asked.append((one.group, one.first))
            assert one.images == SHOWN[1]
            assert one.n == 1
            assert one.group.startswith("/")
            assert not one.whole
    assert len(set(asked)) == len(asked)


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=5), st.integers(1, 12))
def test_a_sample_keeps_its_place_and_never_grows_beyond_the_limit(pieces, limit):
    sample = Sample([1, 2, 3], 5, 3)
    plain = [1, 2, 3]
    for piece in pieces:
        sample, plain = sample + piece, plain + piece
    assert (sample, sample.number, sample.prompt_length) == (plain, 5, 3)
    left = later_turn(0, "train-0", 0, 1, 1, sample, limit).max_tokens
    assert left == max(0, limit - (len(plain) - 3))
