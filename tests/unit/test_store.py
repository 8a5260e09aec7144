"""The tokens behind the machine's counts."""

import numpy as np

from seer.common import ids, wire
from seer.common.types import SamplingParams
from seer.services.buffer.events import Weights
from seer.services.buffer.requests import instructions, state
from seer.services.buffer.store import Store

PROMPT = np.arange(3, dtype=np.int32)
SAMPLING = SamplingParams(max_tokens=8)


def opened():
    store = Store()
    submit = wire.Submit(
        rollout_id="r", rollout_number=5, seed=4, n=1, sampling=SAMPLING, prompt_ids=["p"], lengths=[3],
        tokens=PROMPT,
    )  # fmt: skip
    store.open(submit, "p", PROMPT)
    return store


def test_a_result_names_what_it_was_made_for_and_by_however_often_it_is_delivered():
    store = opened()
    store.keep("r/p", 0, np.array([7], np.int32), np.zeros(1, np.float32), Weights(1, "d1"))
    rollout = state.RolloutState("r", "t", b"t", 0, 0, 0.0)
    group = state.GroupState("r/p", "p", rollout, 1, 3, 8, -1, 0)
    first = store.result(group)
    again = store.result(group)
    for done in (first, again):
        assert (done.weight_version, done.weights_digest) == (1, "d1")
        assert done.params_digest == ids.params_digest(4, 5, 1, SAMPLING)


def test_what_is_kept_is_no_view_of_a_message_and_what_is_unknown_differs_from_nothing():
    store, message = opened(), np.array([7, 8], np.int32)
    store.keep("r/p", 0, message[:1], np.zeros(1, np.float32), Weights(1, "d1"))
    message[0] = 9
    dispatch = instructions.Dispatch("a", "r/p#0", 1, 4)
    assert store.chunk(dispatch, "r/p", 0, wait_for_room=True).tokens.tolist() == [0, 1, 2, 7]
    assert store.same("r/p", PROMPT)
    assert not store.same("r/p", PROMPT + 1)
    assert store.same("r/q", PROMPT)
