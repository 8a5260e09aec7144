"""What is sent of each field, and what must be true of an answer that the field changed.

Invariants:
- a condition is false of the answer without the field: else a server that left the field aside would pass;
- conditions are true of any right answer, whatever was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from http_fields.answers import Answer, settled
from http_fields.routes import IDS, TEXT, USER, Json

Condition = Callable[[list[Answer], list[Answer]], bool]
"""Of the answers with a field, and of those without it."""


def every(condition: Callable[[Answer], object]) -> Condition:
    """Be true of all answers."""
    return lambda answers, _: all(condition(answer) for answer in answers)


def words(condition: Callable[[list[str]], object]) -> Condition:
    """Be true of the words of each response."""
    return every(lambda answer: answer.words and all(condition(each) for each in answer.words))


def choice(condition: Callable[[Json], object]) -> Condition:
    """Be true of every choice."""
    return every(lambda answer: answer.choices and all(condition(each) for each in answer.choices))


def one_text(answers: list[Answer], _: list[Answer]) -> bool:
    """Be true of answers that are all the same."""
    return len({text for answer in answers for text in answer.texts}) == 1


def changed(answers: list[Answer], without: list[Answer]) -> bool:
    """Be true of whatever is another answer."""
    found, plain = ([settled(each.parts) for each in some] for some in (answers, without))
    return answers[0].status == 200 and found != plain


def other_text(answers: list[Answer], without: list[Answer]) -> bool:
    """Be true of other texts."""
    return answers[0].status == 200 and [each.texts for each in answers] != [each.texts for each in without]


def longer(by: int) -> Condition:
    """Be true of prompts with so many more tokens."""

    def condition(answers: list[Answer], without: list[Answer]) -> bool:
        return all(
            (a.prompt_tokens or 0) - (b.prompt_tokens or 0) == by
            for a, b in zip(answers, without, strict=True)
        )

    return condition


def refused_as(status: int) -> Condition:
    """Be true of errors with this status."""
    return every(lambda answer: answer.status == status)


def output_of(answer: Answer) -> Json:
    """Return the text of a response's first message, with what stands beside it."""
    found: Json = answer.body["output"][0]["content"][0]
    return found


def text_of(*texts: str) -> Condition:
    """Be true of responses that are one of these texts."""
    return words(lambda found: " ".join(found) in texts)


@dataclass(frozen=True)
class Case:
    """`value` is sent `times` times with the fields `beside`, and the same without the field.

    `holds`: of the answers with the field. `instead`: what is sent in place of the field where one is needed.
    `bad`: values that are wrong. `why`: the reason for a difference, by verdict.
    """

    value: Any
    holds: Condition = changed
    beside: Json = field(default_factory=dict)
    bad: tuple[Any, ...] = ()
    times: int = 1
    instead: Any = None
    why: str = ""


calls_s4 = every(lambda answer: set(answer.calls) == {"S4"})

MOST: Json = {"max_tokens": 60}
LONGER: Json = {"max_tokens": 60, "ignore_eos": True}
SAMPLED: Json = {**LONGER, "temperature": 2}
"""Texts so long and so unlikely that no two are equal by chance."""
FLAT: Json = {**LONGER, "repetition_penalty": 5}
"""Tokens of about the same probability."""
JSON: Json = {"structured_outputs": {"json": {"type": "object"}}}
FORCED: Json = {"logit_bias": {"60": 100}}
UNKNOWN: Json = {"logit_bias": {"3": 100}, "max_tokens": 4}
TOOL: Json = {
    "type": "function",
    "function": {"name": "S4", "parameters": {"type": "object", "properties": {}}},
}
FLAT_TOOL: Json = {"type": "function", "name": "S4", "parameters": {"type": "object", "properties": {}}}
CALLS: Json = {"logit_bias": {"51": 100, "50": 60, "2": 20}, "repetition_penalty": 100}
"""Two calls, then the end."""
NUMBER: Json = {"type": "integer", "enum": [7]}
SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
OWN_TEMPLATE = "<bos> {{ messages[0].content }} x x x"
LONG = " ".join(["1"] * 1100)
OPEN = [USER, {"role": "assistant", "content": "S3 10"}]

SHARED: dict[str, Case] = {
    "model": Case("other", refused_as(404), bad=(5,)),
    "n": Case(3, every(lambda answer: len(answer.texts) == 3), {"temperature": 1}, bad=(0, -1, "x")),
    "max_tokens": Case(5, every(lambda a: len(a.words[0]) == 5), bad=(-1, "x")),
    "temperature": Case(0, one_text, FLAT, times=3, bad=(-1, "x")),
    "top_p": Case(0.01, one_text, SAMPLED, times=3, bad=(0, 1.5, -0.1, "x")),
    "top_k": Case(1, one_text, SAMPLED, times=3, bad=(-2, "x")),
    "min_p": Case(1.0, one_text, SAMPLED, times=3, bad=(1.5, -0.1, "x")),
    "seed": Case(7, one_text, SAMPLED, times=3, bad=("x", 2**64)),
    "repetition_penalty": Case(3.0, other_text, LONGER, bad=(0, -1, "x")),
    "frequency_penalty": Case(2.0, other_text, LONGER, bad=(3, -3, "x")),
    "presence_penalty": Case(2.0, other_text, LONGER, bad=(3, -3, "x")),
    "logit_bias": Case(
        {"60": 100}, words(lambda w: set(w) == {"x"}), bad=({"x": 1}, {"60": "x"}, {"999": 1}, 5)
    ),
    "stop": Case(["="], words(lambda w: "".join(w) == "S31085:10+8"), bad=(5, [5])),
    "stop_token_ids": Case([55], words(lambda w: "".join(w) == "S31085:10+8"), bad=(["x"], 5)),
    "ignore_eos": Case(True, every(lambda a: a.ends == ["length"]), MOST, bad=("x",)),
    "min_tokens": Case(50, every(lambda a: (a.new_tokens or 0) >= 50), MOST, bad=(61, -1, "x")),
    "include_stop_str_in_output": Case(True, words(lambda w: w[-1] == "="), {"stop": ["="]}, bad=("x",)),
    "skip_special_tokens": Case(False, words(lambda w: set(w) == {"<unk>"}), UNKNOWN, bad=("x",)),
    "spaces_between_special_tokens": Case(
        False,
        every(lambda a: "<unk>" * 4 in a.texts[0]),
        {**UNKNOWN, "skip_special_tokens": False},
        bad=("x",),
    ),
    "allowed_token_ids": Case([60, 61], words(lambda w: set(w) <= {"x", "ans"}), bad=(["x"], [999], [])),
    "bad_words": Case(["="], words(lambda w: "=" not in w), bad=([5], "x")),
    "use_beam_search": Case(  # without it, n is 1 at temperature 0
        True, every(lambda a: a.status == 200 and len(set(a.texts)) == 2), {"n": 2}, bad=("x",)
    ),
    "length_penalty": Case(9.0, other_text, {"use_beam_search": True, "n": 2, **MOST}, bad=("x",)),
    "watermarking": Case(True, changed, bad=("x",)),
    "truncate_prompt_tokens": Case(3, longer(-3), bad=(-2, "x")),
    "truncation_side": Case("right", changed, {"truncate_prompt_tokens": 3}, bad=("x",)),
    "prompt_logprobs": Case(
        2,
        every(lambda a: any(part.get("prompt_logprobs") for part in (a.body, *a.choices))),
        bad=(-2, "x", 99),
    ),
    "repetition_detection": Case(
        {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 5},
        words(lambda w: len(w) < 12),
        FORCED,
        bad=({"max_pattern_size": -1}, 5),
    ),
    "thinking_token_budget": Case(5, changed, bad=(-2, "x")),
    "vllm_xargs": Case({"a": 1}, bad=(5, {"a": {}})),
    "priority": Case(5, bad=("x",)),
    "session_id": Case("a", bad=(5,)),
    "cache_salt": Case("a", bad=("", 5)),
    "kv_transfer_params": Case({"a": 1}, bad=(5,)),
    "ec_transfer_params": Case({"a": 1}, bad=(5,)),
    "user": Case("me", bad=(5,)),
    "routed_experts_prompt_start": Case(2, bad=(-1, "x")),
    "return_token_offsets": Case(True, bad=("x",)),
    "mm_payload": Case("none", bad=("x",)),
    "return_mm_kwargs": Case(False, bad=("x",)),
    "media_io_kwargs": Case({"image": {"a": 1}}, bad=(5,)),
    "mm_processor_kwargs": Case({"a": 1}, bad=(5,)),
    "stream_interval": Case(
        1000,
        every(lambda a: len(a.parts) <= 4),
        {"stream": True, "ignore_eos": True, "max_tokens": 300},
        bad=(0, "x"),
    ),
    "stream": Case(True, every(lambda a: len(a.parts) > 1 or not a.parts[0].get("usage")), bad=("x",)),
    "stream_options": Case({"include_usage": True}, every(lambda a: a.usage), {"stream": True}, bad=(5,)),
    "stream_options.include_usage": Case(True, every(lambda a: a.usage), {"stream": True}, bad=("x",)),
    "stream_options.continuous_usage_stats": Case(
        True,
        every(lambda a: all(part.get("usage") for part in a.parts)),
        {"stream": True, "stream_options": {"include_usage": True}},
        bad=("x",),
    ),
    "return_token_ids": Case(
        True,
        every(lambda a: IDS in [part.get("prompt_token_ids") for part in (a.body, *a.choices)]),
        bad=("x",),
    ),
    "return_tokens_as_token_ids": Case(True, changed, bad=("x",)),
    "structured_outputs": Case(
        {"choice": ["7", "none"]}, text_of("7", "none"), bad=(5, {"regex": "("}, {"choice": []})
    ),
    "response_format": Case(SCHEMA, text_of("7"), bad=("x", {"type": "x"}, {"type": "json_schema"})),
    "response_format: json_object": Case({"type": "json_object"}, text_of("{}")),
    "structured_outputs.json": Case(NUMBER, text_of("7"), bad=(5, "x", {"type": "x"})),
    "structured_outputs.regex": Case("7|none", text_of("7", "none"), bad=(5, "(")),
    "structured_outputs.choice": Case(["7", "none"], text_of("7", "none"), bad=(5, [])),
    "structured_outputs.grammar": Case('root ::= "7" | "none"', text_of("7", "none"), bad=(5, "x")),
    "structured_outputs.json_object": Case(True, text_of("{}"), bad=("x",)),
    "structured_outputs.structural_tag": Case(
        json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "none"}}),
        text_of("none"),
        bad=(5, "x"),
    ),
    "structured_outputs.disable_any_whitespace": Case(True, changed, JSON, bad=("x",)),
    "structured_outputs.disable_additional_properties": Case(True, changed, JSON, bad=("x",)),
    "structured_outputs.whitespace_pattern": Case(" ", changed, JSON, bad=(5,)),
    "tools": Case([TOOL], longer(2), bad=([5], "x", [])),
    "tool_choice": Case("none", other_text, {**CALLS, "tools": [TOOL]}, bad=("x", 5)),
    "tool_choice: required": Case("required", calls_s4, {"tools": [TOOL]}),
    "tool_choice: named": Case({"type": "function", "function": {"name": "S4"}}, calls_s4, {"tools": [TOOL]}),
    "parallel_tool_calls": Case(
        False, every(lambda a: len(a.calls) < 2), {**CALLS, "tools": [TOOL]}, bad=("x",)
    ),
    "chat_template": Case(OWN_TEMPLATE, longer(3), bad=(5, "{{")),
    "chat_template_kwargs": Case({"mark": "x"}, longer(1), bad=(5,)),
    "add_special_tokens": Case(True, longer(1), bad=("x",)),
    "add_generation_prompt": Case(False, longer(1), bad=("x",)),
    "documents": Case([{"title": "1", "text": "x"}], longer(1), bad=(5, [5])),
    "return_token_strs": Case(True, every(lambda a: a.body["token_strs"]), bad=("x",)),
    "include_reasoning": Case(False, bad=("x",)),
    "request_id": Case(
        "own-name", every(lambda a: "own-name" in str(a.body.get("id", a.body.get("request_id")))), bad=(5,)
    ),
    "messages": Case([USER, USER], longer(5), instead=[USER], bad=([], 5)),
    "logprob_token_ids": Case([60], changed, bad=(["x"], [999])),
    "logprobs": Case(3, changed, bad=(-2, "x", 99)),
}

OWN: dict[str, dict[str, Case]] = {
    "completions": {
        "prompt": Case(
            [IDS, [13]], every(lambda a: len(a.choices) == 2), instead=TEXT, bad=(5, [], [["x"]], [999])
        ),
        "echo": Case(True, every(lambda a: a.texts[0].split()[:5] == TEXT.split()), bad=("x",)),
        "logprobs": Case(
            3,
            choice(lambda c: c["logprobs"] and all(len(top) >= 3 for top in c["logprobs"]["top_logprobs"])),
            bad=(-2, "x", 99),
        ),
        "add_special_tokens": Case(False, longer(-1), bad=("x",)),
        "suffix": Case("x", bad=(5,)),
        "prompt_embeds": Case("AAAA", bad=(5,)),
        "return_tokens_as_token_ids": Case(
            True,
            choice(lambda c: c["logprobs"]["tokens"][0].startswith("token_id:")),
            {"logprobs": 1},
            bad=("x",),
        ),
        "logprob_token_ids": Case(
            [60],
            choice(lambda c: "x" in c["logprobs"]["top_logprobs"][0]),
            {"logprobs": 1},
            bad=(["x"], [999]),
        ),
    },
    "chat": {
        "max_completion_tokens": Case(5, every(lambda a: len(a.words[0]) == 5), bad=(-1, "x")),
        "max_tokens": Case(5, every(lambda a: len(a.words[0]) == 5), bad=(-1, "x")),
        "echo": Case(
            True,
            every(lambda a: a.texts[0].startswith("S3 10")),
            {"messages": OPEN, "add_generation_prompt": False},
            bad=("x",),
        ),
        "continue_final_message": Case(
            True, longer(-1), {"messages": OPEN, "add_generation_prompt": False}, bad=("x",)
        ),
        "reasoning_effort": Case("low", longer(1), bad=("x", 5)),
        "logprobs": Case(True, choice(lambda c: c["logprobs"]), bad=("x",)),
        "top_logprobs": Case(
            3,
            choice(lambda c: all(len(each["top_logprobs"]) == 3 for each in c["logprobs"]["content"])),
            {"logprobs": True},
            bad=(-2, "x", 99),
        ),
        "return_tokens_as_token_ids": Case(
            True,
            choice(lambda c: c["logprobs"]["content"][0]["token"].startswith("token_id:")),
            {"logprobs": True},
            bad=("x",),
        ),
        "logprob_token_ids": Case(
            [60],
            choice(lambda c: "x" in [each["token"] for each in c["logprobs"]["content"][0]["top_logprobs"]]),
            {"logprobs": True},
            bad=(["x"], [999]),
        ),
        "return_prompt_text": Case(True, every(lambda a: a.body.get("prompt_text")), bad=("x",)),
    },
    "responses": {
        "input": Case([USER, USER], longer(5), instead=TEXT, bad=(5, [5])),
        "instructions": Case("x", longer(1), bad=(5,)),
        "max_output_tokens": Case(5, every(lambda a: len(a.words[0]) == 5), bad=(-1, "x")),
        "tools": Case([FLAT_TOOL], longer(2), bad=([5], "x")),
        "tool_choice": Case("none", other_text, {**CALLS, "tools": [FLAT_TOOL]}, bad=("x", 5)),
        "tool_choice: required": Case("required", calls_s4, {"tools": [FLAT_TOOL]}),
        "tool_choice: named": Case({"type": "function", "name": "S4"}, calls_s4, {"tools": [FLAT_TOOL]}),
        "text: json_object": Case({"format": {"type": "json_object"}}, text_of("{}")),
        "parallel_tool_calls": Case(
            False, every(lambda a: a.body["parallel_tool_calls"] is False), bad=("x",)
        ),
        "include": Case(
            ["message.output_text.logprobs"], every(lambda a: output_of(a)["logprobs"]), bad=(["x"], 5)
        ),
        "top_logprobs": Case(
            3,
            every(
                lambda a: all(
                    len(each["top_logprobs"]) == 3
                    for each in output_of(a)["logprobs"] or [{"top_logprobs": ()}]
                )
            ),
            {"include": ["message.output_text.logprobs"]},
            bad=(-2, "x", 99),
        ),
        "background": Case(True, bad=("x",)),
        "max_tool_calls": Case(1, every(lambda a: a.body["max_tool_calls"] == 1), bad=("x",)),
        "metadata": Case({"a": "b"}, every(lambda a: a.body["metadata"] == {"a": "b"}), bad=(5, {"a": 5})),
        "previous_response_id": Case("resp_1", bad=(5,)),
        "prompt": Case({"id": "x"}, bad=(5,)),
        "reasoning": Case({"effort": "low"}, longer(1), bad=(5, {"effort": "x"})),
        "service_tier": Case("flex", every(lambda a: a.body.get("service_tier") == "flex"), bad=("x",)),
        "store": Case(False, bad=("x",)),
        "text": Case(
            {"format": {"type": "json_schema", "name": "n", "schema": NUMBER}},
            text_of("7"),
            bad=(5, {"format": {"type": "x"}}),
        ),
        "truncation": Case("auto", every(lambda a: a.status == 200), {"input": LONG}, bad=("x",)),
        "user": Case("me", every(lambda a: a.body.get("user") == "me"), bad=(5,)),
        "prompt_cache_key": Case("a", bad=(5,)),
        "enable_response_messages": Case(True, every(lambda a: a.body.get("input_messages")), bad=("x",)),
        "previous_input_messages": Case([USER], bad=(5,)),
        "stream": Case(True, every(lambda a: a.parts[0].get("type") == "response.created"), bad=("x",)),
    },
    "generate": {
        "token_ids": Case([*IDS, 64], longer(1), instead=IDS, bad=([], ["x"], [-1], [999])),
        "logprobs": Case(
            3,
            choice(
                lambda c: c["logprobs"] and all(len(t["top_logprobs"]) >= 2 for t in c["logprobs"]["content"])
            ),
            bad=(-2, "x", 99),
        ),
        "logprob_token_ids": Case(
            [60],
            choice(lambda c: 60 in [t["token_id"] for t in c["logprobs"]["content"][0]["top_logprobs"]]),
            {"logprobs": 1},
            bad=(["x"], [999]),
        ),
        "stop": Case(["="], words(lambda w: "".join(w) == "S31085:10+8="), bad=(5, [5])),
        "stop_token_ids": Case([55], words(lambda w: "".join(w) == "S31085:10+8="), bad=(["x"], 5)),
        "token_offsets": Case([[0, 1]] * 6, bad=(5,)),
        "features": Case({"mm_hashes": {}, "mm_placeholders": {}}, bad=(5,)),
        "content_parts": Case([{"type": "text", "text": "x"}], bad=(5,)),
        "reasoning_ended": Case(True, bad=("x",)),
        "reasoning_parser_kwargs": Case({"chat_template_kwargs": {}}, bad=(5,)),
        "output_mode": Case("text", every(lambda a: a.body.get("output_mode") == "text"), bad=("x",)),
        "prompt_logprob_token_ids": Case([[60]] * 5, bad=(5,)),
        "prompt_logprob_start": Case(2, changed, {"prompt_logprobs": 1}, bad=("x",)),
        "flat_logprobs": Case(True, changed, {"logprobs": 1}, bad=("x",)),
        "detokenize": Case(False, bad=("x",)),
        "output_kind": Case(1, bad=("x",)),
        "skip_reading_prefix_cache": Case(True, bad=("x",)),
        "trace_decode_token_ids": Case([60, 60], changed, bad=(["x"], 5)),
        "skip_clone": Case(True, bad=("x",)),
        "output_text_buffer_length": Case(3, bad=("x",)),
        "extra_args": Case({"a": 1}, bad=(5,)),
        "skip_special_tokens": Case(False, changed, UNKNOWN, bad=("x",)),
        "include_stop_str_in_output": Case(True, changed, {"stop": ["="]}, bad=("x",)),
    },
    "tokenize": {
        "prompt": Case("10 8", longer(-3), instead=TEXT, bad=(5,)),
        "add_special_tokens": Case(False, longer(-1), bad=("x",)),
    },
    "tokenize, chat": {
        "continue_final_message": Case(
            True, longer(-1), {"messages": OPEN, "add_generation_prompt": False}, bad=("x",)
        )
    },
    "detokenize": {
        "tokens": Case(
            [13, 11],
            every(lambda a: a.body["prompt"].split() == ["10", "8"]),
            instead=IDS,
            bad=([-1], ["x"], [999]),
        )
    },
}


def case_of(route: str, name: str) -> Case:
    """Return what is sent of a field to a route. Raises KeyError for a field without a case."""
    return OWN.get(route, {}).get(name) or SHARED[name]
