"""Which tools a chat must call, and the calls in a response's text. Pure.

Calls are read as vLLM's parser `hermes` reads them, or as JSON where `tool_choice` demands calls: a schema
constrains the text then, as vLLM does it (`tool_parsers/utils.py`).

Invariants:
- text that has no well-formed call is content, every character of it;
- arguments are one JSON text, as clients expect them;
- a text that is read in pieces has the same content and calls as the whole text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from seer.gateway.errors import bad
from seer.gateway.text_stream import possible_start

Json = dict[str, Any]
Read = tuple[str | None, list[Json]]
"""The content before the first call (None: nothing but calls), and the calls as OpenAI has them."""

_OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallReader:
    """`read` reads a whole text; a call, if there is one, begins where `opening` is."""

    read: Callable[[str], Read]
    opening: str = ""


class CallStream:
    """Reads a text that comes in pieces. Calls come at the end: one of them may still be malformed."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._pieces: list[str] = []  # to add to a text copies it
        self._shown, self._held, self._called = 0, "", False

    def push(self, piece: str) -> str:
        """Add the next text; return the content that it settles."""
        self._pieces.append(piece)
        if self._called:
            return ""
        text, opening = self._held + piece, self._reader.opening
        call = text.find(opening)
        self._called = call >= 0
        end = call if self._called else possible_start(text, (opening,))
        self._shown, self._held = self._shown + end, text[end:]
        return text[:end]

    def finish(self, piece: str) -> tuple[str, list[Json]]:
        """Add the last text; return the rest of the content, and the calls."""
        content, calls = self._reader.read("".join((*self._pieces, piece)))
        return (content or "")[self._shown :], calls


def calls_of(
    choice: str | Json | None, tools: Sequence[Json], parser: str, *, several: bool
) -> tuple[CallReader | None, Json | None]:
    """Return how calls are read (None: there are none), and the schema that their text must follow, if any.

    `choice` is `tool_choice`, `parser` reads calls that no schema demands ("": nothing does); not `several`:
    one call at most. Raises `HttpError`.
    """
    if choice == "none" or (choice in (None, "auto") and not tools):
        return None, None
    if choice in (None, "auto"):
        if not parser:
            fix = "set gateway.tool_parser, or give none and read the calls yourself"
            raise bad("tool_choice", choice or "auto", fix)
        return (HERMES if several else CallReader(partial(hermes_calls, most=1), _OPENING)), None
    functions = dict(map(_function, tools, range(len(tools))))
    if choice == "required":
        if not functions:
            raise bad("tools", list(tools), "tool_choice = required needs a tool")
        return CallReader(json_calls), _schema_of_calls(functions, several=several)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad(
            "tool_choice",
            choice,
            'give auto, none, required or {"type": "function", "function": {"name": ...}}',
        )
    if name not in functions:
        raise bad(
            "tool_choice.function.name", name, f"give one of tools: {', '.join(functions) or 'there is none'}"
        )
    return CallReader(partial(named_call, name)), functions[name]


def _function(tool: Json, place: int) -> tuple[str, Json]:
    """Return a tool's name and the schema of its arguments."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise bad(f"tools[{place}].function.name", name, "give the name of a function")
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise bad(f"tools[{place}].function.parameters", schema, "give a JSON schema: an object")
    if not isinstance((schema or {}).get("$defs", {}), dict):
        raise bad(f"tools[{place}].function.parameters.$defs", schema, "give an object of JSON schemas")
    return name, schema or {"type": "object", "properties": {}}


def _schema_of_calls(functions: dict[str, Json], *, several: bool) -> Json:
    """Return the schema of a list of calls. Definitions go to its top, where references look for them."""
    definitions: Json = {}
    kinds = []
    for name, given in functions.items():
        schema = {key: value for key, value in given.items() if key != "$defs"}
        for key, definition in given.get("$defs", {}).items():
            if definitions.setdefault(key, definition) != definition:
                fix = "two tools define it in two ways: give it two names"
                raise bad(f"tools, parameters.$defs.{key}", definition, fix)
        named = {"type": "string", "enum": [name]}
        kinds.append({
            "type": "object", "properties": {"name": named, "parameters": schema},
            "required": ["name", "parameters"],
        })  # fmt: skip
    calls = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": kinds}}
    return calls | ({} if several else {"maxItems": 1}) | ({"$defs": definitions} if definitions else {})


_MALFORMED = (ValueError, KeyError, TypeError, RecursionError)


def hermes_calls(text: str, most: int | None = None) -> Read:
    """Read calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, `most` at most.

    If a call is malformed, the whole text is content.
    """
    try:
        calls = [_call(json.loads(found), "arguments") for found in _CALL.findall(text)]
    except _MALFORMED:
        return text, []
    if not calls:
        return text, []
    return text[: text.index(_OPENING)] or None, calls[:most]


HERMES = CallReader(hermes_calls, _OPENING)


def json_calls(text: str) -> Read:
    """Read a list of calls of the form `{"name": ..., "parameters": {...}}`; one that was cut is content."""
    try:
        found = json.loads(text)
        calls = [_call(each, "parameters") for each in found] if isinstance(found, list) else []
    except _MALFORMED:
        return text, []
    return (None, calls) if calls else (text, [])


def named_call(name: str, text: str) -> Read:
    """Read the arguments of one call; arguments that were cut are content."""
    try:
        return None, [_call({"name": name, "arguments": json.loads(text)}, "arguments")]
    except _MALFORMED:
        return text, []


def _call(call: Json, key: str) -> Json:
    name = call["name"]
    if not isinstance(name, str):
        raise TypeError(name)
    arguments = json.dumps(call.get(key, {}), ensure_ascii=False, allow_nan=False)
    (name + arguments).encode()  # half of a surrogate pair, which may be escaped, can be in no answer
    called = {"name": name, "arguments": arguments}
    return {"id": f"chatcmpl-tool-{secrets.token_hex(8)}", "type": "function", "function": called}
