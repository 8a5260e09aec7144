"""What of an engine sleeps: the order of states, their names, and the order of waking."""

import pytest

from seer.common.errors import InvalidField
from seer.common.sleep import SleepState

AWAKE, KV_ASLEEP, ASLEEP = SleepState


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
