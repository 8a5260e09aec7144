"""The evolution rules of `messages.py`: today's reader against yesterday's and tomorrow's writers."""

import msgspec
import numpy as np
import pytest

from seer.common.errors import WireError
from seer.common.sleep import SleepState, state_of
from seer.common.types import Capacity, Placed, SamplingParams
from seer.common.wire import (
    ContextSnapshot,
    Estimates,
    Message,
    Register,
    Sleep,
    Slept,
    Submit,
    SubmitMedia,
    Tokens,
)
from seer.common.wire.codec import Decoder, encode


class Old(Message, tag="Report"):
    name: str
    tokens: Tokens


class New(Message, tag="Report"):
    name: str
    tokens: Tokens
    count: int = 7
    labels: dict[str, int] = {}


class OldRow(msgspec.Struct, array_like=True):
    name: str
    count: int


class NewRow(msgspec.Struct, array_like=True):
    name: str
    count: int
    extra: float = 0.5


class OldRows(Message, tag="Rows"):
    rows: list[OldRow]


class NewRows(Message, tag="Rows"):
    rows: list[NewRow]


class PlainEstimates(Message, tag="Estimates"):
    estimates: dict[str, float]
    acceptance: dict[str, list[int]] = {}


class PlainSnapshot(Message, tag="ContextSnapshot"):
    incarnation: int
    sequence: int
    estimates: dict[str, float]
    acceptance: dict[str, list[int]] = {}


class PlainSleep(Message, tag="Sleep"):
    asleep: bool
    call_id: int = 0


class PlainSlept(Message, tag="Slept"):
    asleep: bool
    problem: str = ""
    call_id: int = 0


class PlainRegister(Message, tag="Register"):
    capacity: Capacity
    weight_version: int
    asleep: bool = False


class Added(Message, tag=True):
    value: int


class WithArray(Message, tag="Report"):
    name: str
    tokens: Tokens
    more: Tokens


CAPACITY = Capacity(kv_blocks=4, block_size=2, max_num_seqs=1, max_model_len=8)
AWAKE, KV_ASLEEP, ASLEEP = SleepState
TOKENS = np.array([1, 2, 3], np.int32)


def test_a_new_reader_fills_in_defaults():
    received = Decoder(New).decode(encode(Old(name="x", tokens=TOKENS)))
    assert (received.name, received.count, received.labels) == ("x", 7, {})
    assert received.tokens.tolist() == [1, 2, 3]


def test_an_old_reader_ignores_new_fields():
    received = Decoder(Old).decode(encode(New(name="x", tokens=TOKENS, count=9, labels={"a": 1})))
    assert received.name == "x"
    assert received.tokens.tolist() == [1, 2, 3]


def test_positional_structs_grow_at_the_end():
    new = Decoder(NewRows).decode(encode(OldRows(rows=[OldRow("a", 1)])))
    assert new.rows == [NewRow("a", 1, 0.5)]
    old = Decoder(OldRows).decode(encode(NewRows(rows=[NewRow("a", 1, 0.7)])))
    assert old.rows == [OldRow("a", 1)]


def test_an_unknown_message_is_a_wire_error_that_names_it():
    with pytest.raises(WireError, match="Added"):
        Decoder(Old | OldRows).decode(encode(Added(value=1)))


def test_an_array_added_to_a_known_message_is_refused():
    with pytest.raises(WireError, match="no array refers to frames"):
        Decoder(Old).decode(encode(WithArray(name="x", tokens=TOKENS, more=TOKENS)))


def test_estimates_have_no_spread_where_a_peer_tells_none():
    said, none = {"r/a": 70.0}, {}
    assert Decoder(Estimates).decode(encode(PlainEstimates(estimates=said))).spreads == none
    new = Estimates(estimates=said, spreads={"r/a": 0.5})
    assert Decoder(PlainEstimates).decode(encode(new)).estimates == said
    old = PlainSnapshot(incarnation=1, sequence=2, estimates=said)
    assert Decoder(ContextSnapshot).decode(encode(old)).spreads == none
    snapshot = ContextSnapshot(incarnation=1, sequence=2, estimates=said, spreads={"r/a": 0.5})
    assert Decoder(PlainSnapshot).decode(encode(snapshot)).estimates == said


def test_engines_and_trainers_that_know_no_levels_of_sleep_are_understood_and_understand():
    for asleep in (False, True):
        order = Decoder(Sleep).decode(encode(PlainSleep(asleep=asleep, call_id=3)))
        assert order == Sleep(asleep=asleep, call_id=3, level=1, tags=[])
        assert Decoder(PlainSleep).decode(encode(order)) == PlainSleep(asleep=asleep, call_id=3)
        slept = Decoder(Slept).decode(encode(PlainSlept(asleep=asleep)))
        assert state_of(asleep=slept.asleep, tags=slept.tags) == (ASLEEP if asleep else AWAKE)
        assert not slept.dropped
        joined = Decoder(Register).decode(encode(PlainRegister(CAPACITY, 7, asleep)))
        assert (joined.sleep_levels, joined.dropped_version) == (False, -1)
        assert state_of(asleep=joined.asleep, tags=joined.sleeping) == (ASLEEP if asleep else AWAKE)
    dropped = Register(
        capacity=CAPACITY, weight_version=-1, weights_digest="d", asleep=True, sleeping=["kv_cache"],
        sleep_levels=True, dropped_version=7,
    )  # fmt: skip
    # An earlier buffer takes it for one whose last load failed, wakes all of it, and gives it no work.
    assert Decoder(PlainRegister).decode(encode(dropped)) == PlainRegister(CAPACITY, -1, True)


def test_an_older_buffer_drops_prompts_with_images_and_does_not_run_them_without():
    fields = {
        "rollout_id": "r", "rollout_number": 0, "seed": 0, "n": 1, "sampling": SamplingParams(),
        "prompt_ids": ["p"], "lengths": [3], "tokens": np.arange(3, dtype=np.int32),
    }  # fmt: skip
    frames = encode(SubmitMedia(**fields, media=[[Placed("a" * 64, 1, 2)]]))
    with pytest.raises(WireError, match="SubmitMedia"):
        Decoder(Submit | Sleep).decode(frames)
    assert isinstance(Decoder(Submit | SubmitMedia).decode(frames), SubmitMedia)
    assert not isinstance(Decoder(Submit | SubmitMedia).decode(encode(Submit(**fields))), SubmitMedia)
