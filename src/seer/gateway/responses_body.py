"""Bodies of `/v1/responses`, read as the chats that they are. Pure.

Invariants:
- nothing is kept: what would need an earlier response is refused by name, `store` is left aside;
- the input of a chat's messages, calls and outputs is the chat that `/v1/chat/completions` would get;
- an item, a part or a tool of another kind is refused by its place and type.
"""

from __future__ import annotations

from typing import Any, get_args

from seer.common.structured_outputs import StructuredOutputs
from seer.gateway.errors import bad
from seer.gateway.output_constraint import format_constraint, json_constraint
from seer.gateway.request_bodies import ChatBody, Effort, SamplingFields

_KEPT = "responses are not kept: give the whole conversation as input"
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((None,), _KEPT),
    "conversation": ((None,), _KEPT),
    "previous_input_messages": ((None, []), _KEPT),
    "background": ((None, False), "wait for the answer, or stream"),
    "prompt": ((None,), "stored prompts are not supported: give input"),
    "max_tool_calls": ((None,), "the gateway calls no tools"),
    "truncation": ((None, "disabled"), "shorten the input yourself"),
    "include": ((None, []), "give nothing to include"),
    "enable_response_messages": ((None, False), "give the same as a chat, with return_token_ids"),
    "n": ((None, 1), "a response is one: ask /v1/chat/completions"),
}
"""As `request_bodies.REFUSED`, of this route alone."""

_TEXTS = {"input_text", "output_text", "text", "refusal"}


class ResponsesBody(SamplingFields, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    previous_input_messages: Any = None
    background: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    truncation: Any = None
    include: Any = None
    enable_response_messages: Any = None

    def chat(self) -> ChatBody:
        """Return the chat. Raises `HttpError`, which names the field of this body."""
        for name, (neutral, fix) in REFUSED.items():
            if getattr(self, name) not in neutral:
                raise bad(name, getattr(self, name), fix)
        fields: dict[str, Any] = {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
        if self.max_output_tokens is not None:
            fields["max_tokens"] = self.max_output_tokens
        shape = _format((self.text or {}).get("format"))
        if shape is not None:
            if self.structured_outputs is not None:
                raise bad("text.format", self.text, "give it or structured_outputs, not both")
            fields["structured_outputs"] = shape.given
        effort = (self.reasoning or {}).get("effort")
        if effort not in (None, *get_args(Effort)):
            raise bad("reasoning.effort", effort, f"give one of {', '.join(get_args(Effort))}")
        return ChatBody(
            messages=_messages(self.instructions, self.input),
            tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or [])] or None,
            tool_choice=_choice(self.tool_choice),
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=effort,
            parallel_tool_calls=self.parallel_tool_calls,
            stream=self.stream,
            **fields,
        )


def _messages(instructions: str | None, given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for i, item in enumerate(given):
        _add(messages, item, f"input[{i}]")
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item: a message, a call to the message that it belongs to, or a call's output."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise bad(f"{where}.role", role, "give user, assistant, system or developer")
            role = "system" if role == "developer" else role
            messages.append({"role": role, "content": _content(item.get("content"), f"{where}.content")})
        case "function_call":
            called = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
            call = {"id": _text(item, "call_id", where), "type": "function", "function": called}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            call_id = _text(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case "reasoning":
            pass  # templates drop the reasoning of earlier turns; the gateway writes none
        case kind:
            fix = "give message, function_call or function_call_output"
            raise bad(f"{where}.type", kind, fix)


def _content(given: object, where: str) -> str | list[dict[str, Any]]:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise bad(where, given, "give text, or a list of input_text, output_text and input_image")
    parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(given)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: object, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else part
    if isinstance(part, dict) and isinstance(kind, str):
        if kind in _TEXTS:
            return {"type": "text", "text": _text(part, "refusal" if kind == "refusal" else "text", where)}
        if kind == "input_image":
            return {"type": "image_url", "image_url": {"url": _text(part, "image_url", where)}}
    raise bad(f"{where}.type", kind, "give input_text, output_text or input_image")


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad(f"{where}.{name}", value, "give text")
    return value


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad(f"{where}.type", tool.get("type"), "give function: the gateway has no tools of its own")
    function = {"name": _text(tool, "name", where)}
    shown = ("description", "parameters", "strict")
    return {"type": "function", "function": function | {k: tool[k] for k in shown if tool.get(k) is not None}}


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": _text(given, "name", "tool_choice")}}
    return given


def _format(given: object) -> StructuredOutputs | None:
    """Return what `text.format` says that the text must be: None for any text."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise bad("text.format", given, "give an object")
    if given.get("type") == "json_schema":
        return json_constraint(given.get("schema"), "text.format.schema")
    return format_constraint(given, "text.format")
