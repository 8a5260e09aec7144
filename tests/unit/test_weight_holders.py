"""When an engine leaves another one that it copies weights from."""

import pytest

from seer.services.engine.weights.holders import HOLDER_BYTES, Patience


def judge(patience, *intervals):
    """Return the problem of each interval: (bytes here at its end, bytes the holder had at its beginning)."""
    return [patience.problem(got, had) for got, had in intervals]


def test_who_sends_enough_is_kept_even_if_it_says_nothing_else():
    assert judge(Patience(1, 0), (HOLDER_BYTES, None), (2 * HOLDER_BYTES, 5 * HOLDER_BYTES)) == ["", ""]


def test_who_answers_nothing_is_left():
    assert judge(Patience(3, 0), (0, None)) == ["answered nothing for 10 s"]
    assert judge(Patience(3, 0), (HOLDER_BYTES - 1, None)) == ["answered nothing for 10 s"]


@pytest.mark.parametrize("got", [0, 1000, HOLDER_BYTES - 1])
def test_who_has_more_and_sends_it_slowly_is_left(got):
    (problem,) = judge(Patience(3, 0), (got, 3 * HOLDER_BYTES))
    assert problem == f"has {3 * HOLDER_BYTES} bytes of it, and sent only {got} in 10 s"


def test_who_sends_all_that_it_had_is_kept_however_little_that_is():
    patience = Patience(1, 0)
    assert judge(patience, (10, 10), (20, 15), (30, 30)) == ["", "", ""]
    assert not patience.waited_in_vain


def test_who_gets_no_further_is_left_the_later_the_more_are_in_between():
    near, far = Patience(1, 0), Patience(3, 0)
    for patience in (near, far):
        assert judge(patience, (10, 10), (10, 10)) == ["", ""]
    assert (near.waited_in_vain, far.waited_in_vain) == (True, False)
    judge(far, (10, 10), (10, 10))
    assert far.waited_in_vain
    judge(far, (15, 15))  # it goes on
    assert not far.waited_in_vain
