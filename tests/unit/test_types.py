import math
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common import errors
from seer.common.errors import InvalidField, RequestRefused, SeerError, error_class
from seer.common.types import (
    MAX_BIAS_ENTRIES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    Capacity,
    SamplingParams,
)


def test_defaults_and_every_bound_are_accepted():
    SamplingParams().check()
    SamplingParams(
        max_tokens=2**24, min_tokens=2**24, temperature=100.0, top_p=1.0, top_k=2**31 - 1, min_p=1.0,
        repetition_penalty=100.0, frequency_penalty=-2.0, presence_penalty=2.0,
        logit_bias={0: -100.0, 7: 100.0}, stop=("a" * (MAX_STOP_CHARACTERS // MAX_STOP_STRINGS),) * MAX_STOP_STRINGS,
        stop_token_ids=tuple(range(MAX_BIAS_ENTRIES)),
    ).check()  # fmt: skip
    SamplingParams(temperature=0.0, max_tokens=1).check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**24 + 1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("min_tokens", -1),
        ("min_tokens", 513),
        ("stop", ("",)),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        ("stop", ("x", "y" * MAX_STOP_CHARACTERS)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(MAX_BIAS_ENTRIES + 1))),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("top_logprobs", -1),
        ("top_logprobs", 21),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", 0.5),
    ],
)
def test_the_field_that_cannot_be_accepted_is_named(field, value):
    with pytest.raises(InvalidField) as caught:
        SamplingParams(**{field: value}).check("sampling")
    assert caught.value.field.startswith(f"sampling.{field}")
    assert str(caught.value).startswith(f"sampling.{field}")
    assert len(str(caught.value)) < 300


def test_unknown_sampling_fields_are_refused():
    with pytest.raises(msgspec.ValidationError, match="best_of"):
        msgspec.convert({"best_of": 2}, SamplingParams)


@pytest.mark.parametrize(
    ("context", "chunk", "draft", "blocks"),
    [
        (0, 1, 0, 1),
        (30, 1, 0, 1),
        (31, 1, 0, 2),
        (31, 0, 0, 1),
        (100, 28, 0, 5),
        (100, 20, 8, 5),
        (100, 27, 0, 4),
    ],
)
def test_blocks_cover_context_chunk_drafts_and_one_more(context, chunk, draft, blocks):
    capacity = Capacity(kv_blocks=9, block_size=32, max_num_seqs=4, max_model_len=512, draft_tokens=draft)
    assert capacity.blocks_for(context, chunk) == blocks
    assert blocks * 32 >= context + chunk + draft + 1


def test_every_code_leads_back_to_its_class():
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, SeerError)]
    assert len({cls.code for cls in classes}) == len(classes) > 10
    assert all(error_class(cls.code) is cls for cls in classes)
    assert error_class("of the future") is SeerError


@pytest.mark.parametrize(
    "error",
    [
        SeerError("e"),
        InvalidField("x.y", 3, "give 2"),
        RequestRefused("no", ("a", "b")),
        errors.WeightsRefused(4, {"engine-0": "why"}),
    ],
)
def test_errors_reach_other_processes_as_they_are(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_errors_say_what_they_concern():
    assert RequestRefused("no", ("a", "b")).prompt_ids == ("a", "b")
    assert str(InvalidField("x.y", "v" * 500, "shorten it")).endswith("...: shorten it")


@given(
    st.integers(1, 9), st.integers(1, 20), st.integers(1, 120), st.integers(0, 8), st.integers(1, 90),
    st.integers(1, 3),
)  # fmt: skip
def test_room_is_the_longest_chunk_that_is_held(blocks, size, length, drafts, context, parts):
    capacity = Capacity(
        kv_blocks=blocks * parts, block_size=size, max_num_seqs=1, max_model_len=length, draft_tokens=drafts,
        parts=parts,
    )  # fmt: skip
    room = capacity.room(context)
    assert capacity.holds(context, room)
    assert not capacity.holds(context, room + 1)
    assert capacity.blocks_for(context, room) <= blocks


def test_alternatives_are_bounded_and_are_not_of_processed_logits():
    asked = SamplingParams(max_tokens=2**18, top_logprobs=7, prompt_logprobs=20)
    asked.check()
    asked.check_alternatives(8, 2**18)
    with pytest.raises(InvalidField, match=r"top_logprobs = 7: makes up to 18874368 logprobs"):
        asked.check_alternatives(9, 1)
    with pytest.raises(InvalidField, match="prompt_logprobs = 20"):
        asked.check_alternatives(1, 2**20)
    SamplingParams(max_tokens=2**24).check_alternatives(4096, 2**24)
    with pytest.raises(InvalidField, match="top_logprobs = 0: needs logprobs scaled or raw"):
        SamplingParams(logprobs="processed", top_logprobs=0).check()


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "logit_bias"])
def test_far_too_many_entries_are_to_be_fewer(field):
    many = dict.fromkeys(range(70_000), 1.0)
    value = {"stop": ("a",) * 70_000, "stop_token_ids": tuple(many), "logit_bias": many}[field]
    with pytest.raises(InvalidField, match=rf"sampling\.{field} = .*: give fewer$"):
        SamplingParams(**{field: value}).check()
