"""Tool calls in a response's text, as vLLM's parser `hermes` reads them. Pure.

Invariants:
- text that has no well-formed call is content, every character of it;
- arguments are one JSON text, as clients expect them.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the content before the first call (None: nothing but calls), and the calls as OpenAI has them.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If one is malformed, all is content.
    """
    try:
        calls = [_call(found) for found in _CALL.findall(text)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text, []
    if not calls:
        return text, []
    return text[: text.index("<tool_call>")] or None, calls


def _call(found: str) -> dict[str, Any]:
    call = json.loads(found)
    name = call["name"]
    if not isinstance(name, str):
        raise TypeError(name)
    arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
    called = {"name": name, "arguments": arguments}
    return {"id": f"chatcmpl-tool-{secrets.token_hex(8)}", "type": "function", "function": called}
