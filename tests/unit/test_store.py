"""The tokens behind the machine's counts."""

import tracemalloc

import msgspec
import numpy as np
import pytest

from seer.common import ids, wire
from seer.common.types import Placed, SamplingParams, TurnSpec
from seer.services.buffer import submissions
from seer.services.buffer.events import Weights
from seer.services.buffer.log.chunk_file import Output
from seer.services.buffer.requests import instructions, state
from seer.services.buffer.response_store import Store

PROMPT = np.arange(3, dtype=np.int32)
SAMPLING = SamplingParams(max_tokens=8)


def submitted(prompt=PROMPT, **more):
    """Prompt "p" of rollout "r", as the store takes it."""
    fields = {
        "rollout_id": "r", "rollout_number": 5, "seed": 4, "n": 1, "sampling": SAMPLING, "prompt_ids": ["p"],
        "lengths": [3], "tokens": prompt,
    }  # fmt: skip
    return submissions.prompts(wire.Submit(**{**fields, **more}))["p"]


def opened(**more):
    store = Store()
    store.open("r/p", submitted(**more))
    return store


def chunk_of(store):
    dispatch = instructions.Dispatch("a", "r/p#0", 1, 4)
    return store.chunk(dispatch, "r/p", 0, wait_for_room=True)


def test_a_result_names_what_it_was_made_for_and_by_however_often_it_is_delivered():
    store = opened()
    store.keep("r/p", 0, Output(np.array([7], np.int32), np.zeros(1, np.float32), ("", "")), Weights(1, "d1"))
    rollout = state.RolloutState("r", "t", b"t", 0, 0, 0.0)
    group = state.GroupState("r/p", "p", rollout, 1, 3, 8, -1, 0)
    first = store.result(group)
    again = store.result(group)
    for done in (first, again):
        assert (done.weight_version, done.weights_digest) == (1, "d1")
        assert done.params_digest == ids.params_digest(4, 5, 1, SAMPLING)


def test_what_is_kept_is_no_view_of_a_message_and_what_is_unknown_differs_from_nothing():
    store, message = opened(), np.array([7, 8], np.int32)
    store.keep("r/p", 0, Output(message[:1], np.zeros(1, np.float32), ("", "")), Weights(1, "d1"))
    message[0] = 9
    assert chunk_of(store).tokens.tolist() == [0, 1, 2, 7]
    assert store.same("r/p", submitted())
    assert not store.same("r/p", submitted(PROMPT + 1))
    assert store.same("r/q", submitted())


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 6},
        {"rollout_number": 6},
        {"n": 2},
        {"sampling": SamplingParams(max_tokens=9)},
        {"groups": ["g"]},
        {"first_indices": [1]},
    ],
)
def test_what_would_have_other_responses_is_not_the_same(other):
    assert not opened().same("r/p", submitted(**other))
    assert opened(**other).same("r/p", submitted(**other))


def test_noise_is_that_of_the_groups_name_and_the_index_in_it():
    alone = chunk_of(opened())
    assert (alone.key, alone.draft_group) == (ids.request_key(4, 5, "p", 0), "")
    late = chunk_of(opened(groups=["g"], first_indices=[3]))
    assert (late.key, late.draft_group, late.draft_index) == (ids.request_key(4, 5, "g", 3), "r/g", 3)
    assert (late.request_id, late.group_id) == ("r/p#0", "r/p")
    everywhere = chunk_of(opened(groups=["/g"], first_indices=[3]))
    assert (everywhere.key, everywhere.draft_group) == (ids.request_key(4, 5, "/g", 3), "/g")


def test_a_named_group_is_remembered_by_its_first_prompt_as_long_as_one_of_it_is_there():
    def digest(tokens):
        return ids.prompt_digest(tokens.astype("<i4").tobytes())

    store, other, dispatch = Store(), PROMPT + 1, instructions.Dispatch("a", "r/p#0", 1, 4)

    def remembered_by(group_id, prompt=PROMPT, **more):
        store.open(group_id, submitted(prompt, **more))
        return store.chunk(dispatch, group_id, 0, wait_for_room=True).draft_prompt

    assert remembered_by("r/alone") == 0, "engines know: it is the chunk's"
    assert remembered_by("r/p", groups=["g"]) == digest(PROMPT) > 0
    assert remembered_by("r/q", other, groups=["g"], first_indices=[1]) == digest(PROMPT)
    assert remembered_by("r/q", other, groups=["h"]) == digest(other)
    store.forget("r/p")
    assert remembered_by("r/s", other, groups=["g"]) == digest(other), "none of the first are there"
    turn = {"turns": [TurnSpec(2, 0, 100)], "open": True}
    assert remembered_by("r/t", other, groups=["t"], **turn) == digest(other[:2])
    shown = {"images": [[Placed("a" * 64, 0, 1)]]}
    assert remembered_by("r/i", groups=["i"], **shown) == 0
    for name in "pqsti":
        store.forget(f"r/{name}")
    assert not store._draft_prompts


def test_peers_that_know_no_receipts_are_not_told_of_the_parameter():
    """`SamplingParams` refuses unknown fields, so an older buffer or engine would refuse the message."""
    assert b"receipt" not in msgspec.msgpack.encode(SAMPLING)
    store = opened(sampling=SamplingParams(max_tokens=8, receipt=True))
    assert store.asks_receipts("r/p")
    assert not opened().asks_receipts("r/p")
    assert not store.asks_receipts("r/q")
    assert chunk_of(store).sampling == SAMPLING
    assert submitted().params_digest == submitted(sampling=SamplingParams(max_tokens=8)).params_digest
    assert not store.same("r/p", submitted())


def test_what_is_kept_of_a_request_takes_eight_bytes_a_token_and_little_beside():
    store, tokens, logprobs = opened(), np.arange(64, dtype=np.int32), np.zeros(64, np.float32)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for index in range(100):
            for _ in range(20):
                store.keep("r/p", index, Output(tokens, logprobs, ("", "")), Weights(1, "d1"))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    kept = 8 * 64 * 20
    assert taken / 100 < 1.125 * kept + 300
