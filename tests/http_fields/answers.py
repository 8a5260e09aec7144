"""What an answer says, whichever route and server it is from. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from http_fields.routes import Json, words_of

Shape = set[tuple[str, str]]
"""Paths of an answer, each with what stands there."""

NAMES = {
    "id",
    "item_id",
    "request_id",
    "created",
    "created_at",
    "weight_version",
    "weight_versions",
    "call_id",
}
"""Keys whose values differ from answer to answer."""


@dataclass(frozen=True)
class Answer:
    """`parts`: what came, one object unless it was a stream."""

    status: int
    parts: list[Any]

    @classmethod
    def of(cls, status: int, content: str) -> Answer:
        """Read a body: JSON, or server-sent events."""
        try:
            return cls(status, [json.loads(content)])
        except json.JSONDecodeError:
            lines = [line[6:] for line in content.splitlines() if line.startswith("data: {")]
            return cls(status, [json.loads(line) for line in lines])

    @property
    def body(self) -> Json:
        """The whole answer, or a stream's first part."""
        found: Json = self.parts[0] if self.parts else {}
        return found

    @property
    def choices(self) -> list[Json]:
        """All choices, of all parts."""
        return [choice for part in self.parts for choice in part.get("choices") or []]

    @property
    def texts(self) -> list[str]:
        """The text of each response, put together where it came in parts."""
        texts: dict[int, str] = {}
        for choice in self.choices:
            said = choice.get("message") or choice.get("delta") or choice
            text = said.get("text") if "text" in said else said.get("content")
            if text is None and choice.get("token_ids") is not None:
                text = "".join(f" {word}" for word in words_of(choice["token_ids"]))
            texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
        if not texts:
            whole = self.parts[-1].get("response", self.body) if self.parts else {}
            messages = [item for item in whole.get("output") or [] if item["type"] == "message"]
            texts = {i: item["content"][0]["text"] for i, item in enumerate(messages)}
        return [texts[index] for index in sorted(texts)]

    @property
    def words(self) -> list[list[str]]:
        """The words of each response."""
        return [text.split() for text in self.texts]

    @property
    def usage(self) -> Json:
        """Counts of tokens; empty if there are none."""
        last = self.parts[-1] if self.parts else {}
        found: Json = last.get("usage") or last.get("response", {}).get("usage") or {}
        return found

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has, if the answer says so."""
        if "count" in self.body:
            return int(self.body["count"])
        return self.usage.get("prompt_tokens", self.usage.get("input_tokens"))

    @property
    def new_tokens(self) -> int | None:
        """How many tokens were generated, if the answer says so."""
        return self.usage.get("completion_tokens", self.usage.get("output_tokens"))

    @property
    def ends(self) -> list[str]:
        """Why each response ended."""
        if "output" in self.body:
            return [{"completed": "stop", "incomplete": "length"}.get(self.body["status"], "")]
        return [choice["finish_reason"] for choice in self.choices if choice.get("finish_reason")]

    @property
    def calls(self) -> list[str]:
        """The names of the tools that the answer calls."""
        messages = [choice.get("message") or {} for choice in self.choices]
        called = [call["function"] for message in messages for call in message.get("tool_calls") or []]
        return [call["name"] for call in [*called, *self.body.get("output", [])] if "arguments" in call]


def settled(node: Any) -> Any:
    """Return an answer without what differs from answer to answer; numbers to five digits."""
    if isinstance(node, dict):
        return {key: settled(value) for key, value in node.items() if key not in NAMES}
    if isinstance(node, list):
        return [settled(value) for value in node]
    return round(node, 3) if isinstance(node, float) else node


def shape(node: Any, path: str = "") -> Shape:
    """Return each path of an answer with the JSON type that stands there; all elements of a list are one.

    So are keys that are tokens or their ids, as logprobs have them.
    """
    if isinstance(node, dict):
        found = {(path, "object")} if path else set()
        tokens = path.endswith(("top_logprobs[]", "prompt_logprobs[]")) and "logprob" not in node
        for key, value in node.items():
            found |= shape(value, f"{path}.{'*' if tokens else key}".lstrip("."))
        return found
    if isinstance(node, list):
        return {(path, "list")}.union(*(shape(value, f"{path}[]") for value in node))
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
    return {(path, kinds[type(node)])}


def shapes(answers: list[Answer]) -> Shape:
    """Return the shape of answers together."""
    return set().union(*(shape(part) for answer in answers for part in answer.parts))


def apart(ours: Shape, theirs: Shape) -> Shape:
    """Return what differs, as (path, how): of a path that one of them has not, nothing below it."""
    our_paths, their_paths = {path for path, _ in ours}, {path for path, _ in theirs}
    told = {(path, "more") for path in our_paths - their_paths}
    told |= {(path, "absent") for path in their_paths - our_paths}
    told |= {(path, "another type") for path, _ in ours ^ theirs if path in our_paths & their_paths}
    roots = [path for path, _ in told]

    def below(path: str) -> bool:
        return any(path.startswith((f"{root}.", f"{root}[")) for root in roots)

    return {(path, how) for path, how in told if not below(path)}
