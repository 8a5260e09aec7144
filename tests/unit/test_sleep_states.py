"""What of an engine sleeps: the order of states, their names, and the order of waking."""

import pytest

from seer.common.errors import InvalidField
from seer.common.sleep import SleepState, state_of

AWAKE, KV_ASLEEP, ASLEEP = SleepState


def test_each_state_frees_what_the_one_before_frees_and_more():
    assert AWAKE < KV_ASLEEP < ASLEEP
    assert [state.tags for state in SleepState] == [[], ["kv_cache"], ["kv_cache", "weights"]]


def test_a_state_is_said_by_its_tags_and_an_earlier_release_says_none():
    assert [state_of(asleep=bool(state), tags=state.tags) for state in SleepState] == list(SleepState)
    assert (state_of(asleep=False), state_of(asleep=True)) == (AWAKE, ASLEEP)


@pytest.mark.parametrize(
    ("tags", "woken"),
    [
        ((), (AWAKE, AWAKE, AWAKE)),
        (("kv_cache", "weights"), (AWAKE, AWAKE, AWAKE)),
        (("weights",), (AWAKE, KV_ASLEEP, KV_ASLEEP)),
        (("kv_cache",), (AWAKE, AWAKE, None)),
    ],
)
def test_weights_wake_first(tags, woken):
    for state, after in zip(SleepState, woken, strict=True):
        if after is None:
            with pytest.raises(
                InvalidField, match=r"tags = \['kv_cache'\]: the weights sleep: wake them first"
            ):
                state.woken(tags)
        else:
            assert state.woken(tags) is after
