"""Tool calls in a response's text, as vLLM's parser `hermes` reads them. Pure.

Invariants:
- text that has no well-formed call is content, every character of it;
- arguments are one JSON text, as clients expect them;
- a text that is read in pieces has the same content and calls as the whole text.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from seer.gateway.text_stream import possible_start

_OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the content before the first call (None: nothing but calls), and the calls as OpenAI has them.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If a call is malformed, the whole
    text is content.
    """
    try:
        calls = [_call(found) for found in _CALL.findall(text)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text, []
    if not calls:
        return text, []
    return text[: text.index(_OPENING)] or None, calls


class HermesStream:
    """`hermes_calls` of a text that comes in pieces. Calls come at the end: one may still be malformed."""

    def __init__(self) -> None:
        self._text = ""
        self._shown = 0

    def push(self, piece: str) -> str:
        """Add the next text; return the content that it settles."""
        self._text += piece
        call = self._text.find(_OPENING, self._shown)
        end = possible_start(self._text, (_OPENING,)) if call < 0 else call
        content, self._shown = self._text[self._shown : end], end
        return content

    def finish(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        """Add the last text; return the rest of the content, and the calls."""
        content, calls = hermes_calls(self._text + piece)
        return (content or "")[self._shown :], calls


def _call(found: str) -> dict[str, Any]:
    call = json.loads(found)
    name = call["name"]
    if not isinstance(name, str):
        raise TypeError(name)
    arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False, allow_nan=False)
    (name + arguments).encode()  # half of a surrogate pair, which may be escaped, can be in no answer
    called = {"name": name, "arguments": arguments}
    return {"id": f"chatcmpl-tool-{secrets.token_hex(8)}", "type": "function", "function": called}
