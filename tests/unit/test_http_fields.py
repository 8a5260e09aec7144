"""docs/http_fields.md: what it says of the gateway is true of its real routes; how answers are compared."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_fields.answers import Answer, apart, shape
from http_fields.cases import OWN, SHARED, case_of
from http_fields.routes import vllm_fields, write_model
from http_fields.servers import Answers, Told, all_told
from http_fields.table import PAGE, compare, refusal_of, rows, status_of, written
from process.fuzz_http import Replayed, application

from seer.common.config import Config, GatewayConfig, SharedConfig


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What the gateway's routes answer, without engines."""
    model = tmp_path_factory.mktemp("fields") / "model"
    write_model(model)
    settings = GatewayConfig(tool_parser="hermes", trust_chat_templates=True)
    config = Config(shared=SharedConfig(model=str(model)), gateway=settings)
    fields: dict[str, list[str]] = {}
    for route, name in written(PAGE.read_text()):
        fields.setdefault(route, []).append(name)

    async def run() -> Answers:
        async with application(config, Replayed) as app:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as http:
                return await all_told(http, fields)

    return asyncio.run(run())


def test_the_gateway_refuses_what_the_page_says_in_its_words(ours: Answers) -> None:
    lines = rows(PAGE.read_text())
    for key, verdict in written(PAGE.read_text()).items():
        says = "refuse" in verdict and "by vLLM" not in verdict
        assert (status_of(ours[key]) == 400) == says, (key, verdict)
        if says:
            assert refusal_of(ours[key].alone, key[1], case_of(*key).value) in lines[key[1]], key


def test_bad_values_are_refused_where_no_note_says_otherwise(ours: Answers) -> None:
    lines = rows(PAGE.read_text())
    for key, verdict in written(PAGE.read_text()).items():
        if verdict in ("same", "different"):
            for value, answer in zip(case_of(*key).bad, ours[key].bad, strict=True):
                noted = f"`{json.dumps(value)}`: 200" in lines[key[1]]
                engines = (key[1], value) in BY_ENGINES
                assert (answer.status == 200) == (noted or engines), (key, value, answer)


BY_ENGINES: list[tuple[str, Any]] = [
    ("logit_bias", {"999": 1}), ("structured_outputs", {"regex": "("}), ("structured_outputs.json", {"type": "x"}),
    ("structured_outputs.regex", "("), ("structured_outputs.grammar", "x"),
]  # fmt: skip
"""What is refused, but by engines."""


@pytest.mark.vllm
def test_every_field_of_vllms_models_has_a_row() -> None:
    pytest.importorskip("vllm")
    fields = vllm_fields()
    assert set(written(PAGE.read_text())) == {
        (route, name) for route, names in fields.items() for name in names
    }
    assert {(route, name) for route, cases in OWN.items() for name in cases} <= set(written(PAGE.read_text()))
    assert set(SHARED) <= {name for names in fields.values() for name in names}


PLAIN: dict[str, Any] = {"choices": [{"index": 0, "text": "1 2 3 4 5 6 7", "stop_reason": None}], "id": "a"}


def told(given: dict[str, Any], status: int = 200) -> Told:
    """Return what a server told whose answer with the field is this one."""
    answer = Answer(status, [given])
    return Told([answer], [Answer(200, [PLAIN])], answer, [Answer(400, [{}])] * len(SHARED["max_tokens"].bad))


def text(words: str, **more: object) -> dict[str, Any]:
    return {**PLAIN, "choices": [{**PLAIN["choices"][0], "text": words, **more}]}


REFUSAL = {"error": {"message": "max_tokens = 5: give none", "param": "max_tokens"}}


@pytest.mark.parametrize(
    ("theirs", "given", "verdict"),
    [
        (told(text("1 2 3 4 5")), told(text("1 2 3 4 5")), "same"),
        (told(text("1 2 3 4 5")), told(text("1 2 3 4 6")), "different"),
        (told(text("1 2 3 4 5")), told(text("1 2 3 4 5", stop_reason=7)), "different"),
        (told(text("1 2 3 4 5")), told(text("1 2 3 4 5", more=None)), "different"),
        (told(text("1 2 3 4 5")), told(PLAIN), "not read"),
        (told(PLAIN), told(PLAIN), "aside"),
        (told(text("1 2 3 4 5")), told(REFUSAL, 400), "refused"),
        (told(PLAIN), told(REFUSAL, 400), "refused, aside in vLLM"),
        (told(REFUSAL, 400), told(REFUSAL, 400), "both refuse"),
    ],
)
def test_equal_answers_are_the_same_only_if_the_field_changed_them(
    theirs: Told, given: Told, verdict: str
) -> None:
    assert compare("completions", "max_tokens", theirs, given, set()).verdict == verdict


def test_a_refusal_that_names_another_field_is_none() -> None:
    other = {"error": {"message": "n = 5: give none", "param": "n"}}
    with pytest.raises(AssertionError, match="not by its name"):
        compare("completions", "max_tokens", told(PLAIN), told(other, 400), set())


def test_shapes_are_compared_by_path_and_type() -> None:
    ours = shape({"a": [{"b": 1}, {"b": None}], "c": {"d": "x"}, "e": {}})
    theirs = shape({"a": [{"b": 1}], "c": {"d": 1}, "f": {"g": 1}})
    assert apart(ours, theirs) == {
        ("a[].b", "another type"), ("c.d", "another type"), ("e", "more"), ("f", "absent")
    }  # fmt: skip
    tokens = [shape({"logprobs": {"top_logprobs": [{token: -1.0}]}}) for token in ("x", "y")]
    assert tokens[0] == tokens[1]


def test_the_copy_of_the_model_has_the_shipped_weights(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
