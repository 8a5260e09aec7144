"""Bodies: what is refused by name, what is left aside, and that no bytes do more than that."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.errors import InvalidField
from seer.common.types import SamplingParams
from seer.gateway.errors import HttpError
from seer.gateway.request_bodies import (
    MAX_OBJECTS,
    MAX_TOKENS,
    MAX_VALUES,
    REFUSED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    UpdateBody,
    alternatives,
    read_body,
)

KINDS = (ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody, UpdateBody)

STRANGE = {
    "prompt_logprobs": 1, "echo": True, "suffix": "x", "best_of": 2, "use_beam_search": True,
    "length_penalty": 0.5, "response_format": {"type": "json_object"}, "thinking_token_budget": 5,
    "output_mode": "text", "function_call": "auto", "top_logprobs": 2, "watermarking": True,
    "return_routed_experts": True, "routed_experts": True, "continue_final_message": True, "truncate_prompt_tokens": 0,
}  # fmt: skip


def completion(**fields: object) -> CompletionBody:
    return read_body(CompletionBody, json.dumps({"prompt": [1, 2]} | fields).encode())


def outcome(work: Callable[[], object]) -> int:
    """Return 200, or the status of the `HttpError`, which must be one that can be sent."""
    try:
        work()
    except HttpError as error:
        msgspec.json.encode(error.body)
        return error.status
    return 200


def refused(kind: type[msgspec.Struct], fields: object) -> HttpError:
    with pytest.raises(HttpError) as info:
        read_body(kind, json.dumps(fields).encode())
    assert info.value.status == 400
    return info.value


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused_by_name(name: str) -> None:
    value = STRANGE.get(name, ["x"])
    error = refused(DetokenizeBody, {"tokens": [1], name: value})
    assert error.param == name
    assert str(error).startswith(f"{name} = ")
    if name != "prompt_logprobs":
        nested = refused(GenerateBody, {"token_ids": [1], "sampling_params": {name: value}})
        assert nested.param == f"sampling_params.{name}"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_changes_nothing_is_accepted(name: str) -> None:
    for neutral in REFUSED[name][0]:
        completion(**{name: neutral})


def test_alternatives_that_there_are_not_are_refused() -> None:
    for bad in ((21, None), (-1, None), (None, 21), (None, -1)):
        with pytest.raises(HttpError, match=r"give 0 to 20"):
            alternatives(SamplingParams(), *bad, ("logprobs", "prompt_logprobs"), stream=False)
    processed = SamplingParams(logprobs="processed")
    assert alternatives(processed, 1, None, ("a", "b"), stream=True) == processed
    for asked in ((processed, 2, None), (SamplingParams(), 2, 0)):
        with pytest.raises(HttpError):
            alternatives(*asked, ("a", "b"), stream=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1], "temperature": "hot"}, "temperature"),
        ({"prompt": [1], "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": [1], "stop": [1]}, "stop[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [1], "stream": "yes"}, "stream"),
        ({"prompt": [1], "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"prompt": [1], "logit_bias": {"a": 1}}, None),
    ],
)
def test_a_wrong_type_is_refused_by_name(fields: dict[str, object], param: str | None) -> None:
    if param is None:
        with pytest.raises(HttpError, match=r"logit_bias = 'a': keys must be token ids"):
            completion(**fields).sampling("scaled")
    else:
        assert refused(CompletionBody, fields).param == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature = -1.0: must be in"),
        ({"top_p": 0}, "top_p = 0.0: must be in"),
        ({"max_tokens": 0}, "max_tokens = 0: must be in"),
        ({"min_tokens": 20}, "min_tokens = 20: must not exceed max_tokens"),
        ({"stop": [""]}, "stop = "),
        ({"logit_bias": {"3": 1000}}, r"logit_bias\[3\] = 1000.0: must be in"),
        ({"stop_token_ids": [-1]}, "stop_token_ids = "),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(HttpError, match=f"^{message}") as info:
        completion(**fields).sampling("scaled")
    assert info.value.param == message.split(" ")[0].replace("\\", "")
    body = {"token_ids": [1], "sampling_params": fields}
    with pytest.raises(HttpError, match=f"^sampling_params.{message}") as info:
        params = read_body(GenerateBody, json.dumps(body).encode()).sampling_params
        params.sampling("scaled", "sampling_params.")
    assert str(info.value.param).startswith("sampling_params.")


@pytest.mark.parametrize("n", [0, -1, 5000])
def test_n_is_bounded(n: int) -> None:
    with pytest.raises(HttpError, match=f"n = {n}: must be in"):
        completion(n=n).group_size()


def test_sampling_follows_vllm() -> None:
    body = completion(
        temperature=0.5, top_k=-1, stop="x", stop_token_ids=None, logit_bias={"7": 2}, n=3, min_p=0.1
    )
    assert body.group_size() == 3
    assert body.sampling("raw") == SamplingParams(
        max_tokens=16, temperature=0.5, stop=("x",), logit_bias={7: 2.0}, min_p=0.1, logprobs="raw"
    )
    assert completion(max_tokens=None).sampling("scaled").max_tokens == MAX_TOKENS
    chat = read_body(ChatBody, b'{"messages": []}')
    assert chat.sampling("scaled").max_tokens == MAX_TOKENS


def test_fields_that_nobody_knows_are_left_aside() -> None:
    completion(user="me", priority=3, cache_salt="s", output_kind=2, detokenize=False, made_up=[1])


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a b", ["a b"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_come_in_four_forms(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", [1]], ["a", ""], [1, "a"], [[1], 2], [[1]] * 5000])
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(HttpError, match=r"^prompt = "):
        completion(prompt=prompt).prompts()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000],
)
def test_what_is_not_an_object_is_refused(body: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(HttpError) as info:
            read_body(kind, body)
        assert info.value.status == 400


NAMES = st.sampled_from(sorted({*REFUSED, *(f.name for kind in KINDS for f in msgspec.structs.fields(kind))}))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(KINDS), st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES), max_size=5))
def test_any_fields_are_a_body_or_an_http_error(
    kind: type[msgspec.Struct], fields: dict[str, object]
) -> None:
    def use() -> None:
        body = read_body(kind, json.dumps(fields).encode(errors="replace"))
        if isinstance(body, CompletionBody | ChatBody):
            body.sampling("scaled")
        if isinstance(body, CompletionBody):
            body.prompts()

    assert outcome(use) in (200, 400)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_an_http_error(body: bytes) -> None:
    for kind in KINDS:
        assert outcome(lambda kind=kind: read_body(kind, body)) in (200, 400)


@pytest.mark.parametrize("key", ["1" * 4301, "-1", "1e3", "", "\u0663", "12345678901"])
def test_keys_of_biases_that_are_no_token_ids_are_refused(key: str) -> None:
    with pytest.raises(HttpError, match=r"logit_bias = .*: keys must be token ids") as info:
        completion(logit_bias={key: 1.0}).sampling("scaled")
    assert (info.value.status, info.value.param) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt":[' + b"1," * MAX_VALUES + b"1,1]}", "3145729 values"),
        (b'{"prompt":"a","x":[' + b"[]," * MAX_OBJECTS + b"1]}", "arrays, objects and keys"),
        (b'{"prompt":"a","x":{' + b'"a":1,' * MAX_OBJECTS + b'"a":1}}', "arrays, objects and keys"),
    ],
    ids=["values", "arrays", "keys"],
)
def test_bodies_that_would_hold_up_others_are_refused(body: bytes, says: str) -> None:
    with pytest.raises(HttpError, match=says) as info:
        read_body(CompletionBody, body)
    assert (info.value.status, info.value.param) == (400, "body")


@pytest.mark.parametrize(
    "value",
    [10**5000, [[[[[[1]]]]]] * 10**6, {"a": ["b" * 10**6] * 10}, "a" * 10**7, {1: {2: {3: {4: {5: {}}}}}}],
    ids=["digits", "lists", "strings", "text", "nested"],
)
def test_errors_show_the_beginning_of_any_value(value: object) -> None:
    assert len(str(InvalidField("f", value, "fix"))) < 100
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert str(InvalidField("f", deep, "fix")).startswith("f = [[[[")


@pytest.mark.parametrize("name", ["min_tokens", "max_tokens", "top_k", "temperature", "seed"])
def test_integers_of_any_size_are_refused_by_name(name: str) -> None:
    for digits in (19, 30, 308, 400, 4300):
        body = b'{"prompt":"a","%b":%b}' % (name.encode(), b"9" * digits)
        with pytest.raises(HttpError, match=name) as info:
            read_body(CompletionBody, body).sampling("scaled")
        assert info.value.status == 400


@pytest.mark.parametrize("token", [2**31, 2**63, 2**64, 10**30])
def test_token_ids_beyond_any_vocabulary_are_refused_by_name(token: int) -> None:
    for name, value in (("stop_token_ids", [token]), ("logit_bias", {str(token): 1.0})):
        with pytest.raises(HttpError, match=name) as info:
            completion(**{name: value}).sampling("scaled")
        assert info.value.status == 400
