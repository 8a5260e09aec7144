"""The routes that vLLM's own server and the gateway both have, a plain body of each, and its fields.

`write_model` makes the model that both serve: the shipped one, whose copy has a tokenizer and a chat template
in which every field shows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"
TEXT = "10 8 5 > 13"
IDS = [1, 13, 11, 8, 57, 16]
"""`TEXT` as the copy's tokenizer has it: 41 tokens follow at temperature 0, of which the last ends the text."""

Json = dict[str, Any]
OUTER = {
    "request_id", "token_ids", "model", "stream", "stream_options", "cache_salt", "priority", "kv_transfer_params",
    "ec_transfer_params", "return_token_ids", "output_mode", "features", "content_parts", "token_offsets",
    "reasoning_ended", "reasoning_parser_kwargs", "sampling_params",
}  # fmt: skip
"""What `/inference/v1/generate` has beside `sampling_params`; all else is in it."""

USER: Json = {"role": "user", "content": TEXT}


@dataclass(frozen=True)
class Route:
    """A column of the table. `plain`: a body that both answer; `inner`: where it has sampling fields."""

    name: str
    path: str
    plain: Json
    inner: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def body(self, fields: Json) -> Json:
        """Return the plain body with these fields too; None: without the field. Names may have dots.

        What follows a colon in a name tells one value of a field from others.
        """
        body: Json = json.loads(json.dumps(self.plain))
        for given, value in json.loads(json.dumps(fields)).items():
            name = given.partition(":")[0]
            *outer, last = self.renamed.get(name, name).split(".")
            place = body[self.inner] if self.inner and [*outer, last][0] not in OUTER else body
            if value is None and outer and outer[0] not in place:
                continue
            for part in outer:
                place = place.setdefault(part, {})
            if value is None:
                place.pop(last, None)
            else:
                place[last] = value
        return body


GREEDY: Json = {"temperature": 0, "max_tokens": 12}
ROUTES = [
    Route("completions", "/v1/completions", {"prompt": TEXT, **GREEDY}),
    Route("chat", "/v1/chat/completions", {"messages": [USER], **GREEDY}),
    Route(
        "responses",
        "/v1/responses",
        {"input": TEXT, "temperature": 0, "max_output_tokens": 12},
        renamed={"max_tokens": "max_output_tokens"},
    ),
    Route(
        "generate", "/inference/v1/generate", {"token_ids": IDS, "sampling_params": GREEDY}, "sampling_params"
    ),
    Route("tokenize", "/tokenize", {"prompt": TEXT}),
    Route("tokenize, chat", "/tokenize", {"messages": [USER]}),
    Route("detokenize", "/detokenize", {"tokens": IDS}),
]


def vllm_fields() -> dict[str, list[str]]:
    """Return by route what vLLM's own models of its requests have, in their order."""
    from vllm.entrypoints.generate.base.protocol import StreamOptions
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.entrypoints.serve.tokenize.protocol import (
        DetokenizeRequest,
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    kinds: list[Any] = [
        CompletionRequest, ChatCompletionRequest, ResponsesRequest, GenerateRequest,
        TokenizeCompletionRequest, TokenizeChatRequest, DetokenizeRequest,
    ]  # fmt: skip
    found = {}
    for route, kind in zip(ROUTES, kinds, strict=True):
        names = list(kind.model_fields)
        if route.inner:
            assert set(names) == OUTER
            names.remove(route.inner)
            names += [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
        if "stream_options" in names:
            names += [f"stream_options.{name}" for name in StreamOptions.model_fields]
        if "structured_outputs" in names:
            parts = [each.name for each in fields(StructuredOutputsParams) if not each.name.startswith("_")]
            names += [f"structured_outputs.{part}" for part in parts]
        found[route.name] = [*names, *VALUES.get(route.name, ())]
    return found


VALUES = {
    "chat": ("response_format: json_object", "tool_choice: required", "tool_choice: named"),
    "responses": ("text: json_object", "tool_choice: required", "tool_choice: named"),
}
"""Values of fields that have cases of their own."""

CALL = '<tool_call>{{"name": "{}", "arguments": {{}}}}</tool_call>'
WORDS = {
    51: CALL.format("S4"),
    50: CALL.format("S3"),
    49: "{}",
    48: '[{"name":"S4","parameters":{}}]',
    47: '"x"',
}
"""Tokens of the copy that the shipped model has as numbers: what tool calls and JSON are made of."""

TEMPLATE = (
    "<bos>{% if tools %} ans{% for tool in tools %} {{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for document in documents or [] %} {{ document.text }}{% endfor %}"
    "{% if reasoning_effort %} 1{% endif %}{% if mark %} {{ mark }}{% endif %}"
    "{% for message in messages %} {{ message.content or '' }}{% endfor %}"
    "{% if not add_generation_prompt %} !{% endif %}"
)
"""Each of a chat's fields adds tokens to the prompt."""


def write_model(folder: Path) -> None:
    """Write the copy: texts begin with `<bos>`, and some numbers' tokens are other words."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    vocab = {token: word for word, token in told["model"]["vocab"].items()} | WORDS
    told["model"]["vocab"] = {word: token for token, word in vocab.items()}
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    told["post_processor"]["single"].insert(0, bos)
    told["post_processor"]["special_tokens"] = {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}}
    file.write_text(json.dumps(told))


def words_of(ids: list[int]) -> list[str]:
    """Return the words of tokens, but for special ones."""
    vocab = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    words = {token: word for word, token in vocab.items()} | WORDS
    return [words[token] for token in ids if token > 3]
