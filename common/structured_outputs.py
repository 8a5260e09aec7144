"""What the text of a response must be: of a regex, a grammar, JSON of a schema, or one of some choices. Pure.

Invariant: what `check` accepts has one constraint, of bounded size, that can be sent. Whether it can be
compiled, an engine finds out: that takes the model's vocabulary.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from seer.common.errors import NOT_DECODED, InvalidField

MAX_CHARACTERS = 2**16
"""Bound on the characters of a constraint: it is sent with every chunk."""

MAX_NESTING = 64
"""Bound on objects and arrays within each other in a JSON schema, as in vLLM."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One constraint on the text of a response; names and meaning follow vLLM's `StructuredOutputsParams`.

    `json` is a JSON schema, as text; `grammar` is EBNF or Lark. The response ends where its constraint does.
    """

    json: str | None = None
    regex: str | None = None
    choice: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_CHARACTERS)] | None = None
    grammar: str | None = None

    @property
    def given(self) -> dict[str, str | tuple[str, ...]]:
        """What is given, by name: one constraint, if `check` accepts it."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in fields.items() if value is not None}

    def check(self, field: str) -> None:
        """Raise `InvalidField` for what no engine could compile, or could not be asked to."""
        if len(self.given) != 1:
            raise InvalidField(field, list(self.given), f"give one of {', '.join(self.__struct_fields__)}")
        ((name, value),) = self.given.items()
        field = f"{field}.{name}"
        texts = value if isinstance(value, tuple) else (value,)
        if sum(map(len, texts)) > MAX_CHARACTERS:
            raise InvalidField(field, value, f"give at most {MAX_CHARACTERS} characters")
        if not texts or (name != "regex" and not all(text.strip() for text in texts)):
            raise InvalidField(field, value, "must not be empty")
        if not all(map(_can_be_sent, texts)):
            raise InvalidField(field, value, "give Unicode text without NUL")
        if name == "json":
            _check_schema(field, texts[0])


def _can_be_sent(text: str) -> bool:
    """Return whether a text can be sent, which half of a surrogate pair cannot, and compiled."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _check_schema(field: str, text: str) -> None:
    try:
        schema = msgspec.json.decode(text)
    except NOT_DECODED as error:
        raise InvalidField(field, text, f"must be a JSON schema, as text: {error}") from error
    if not isinstance(schema, dict | bool):
        raise InvalidField(field, text, "must be a JSON schema: an object")
    level: list[object] = [schema]
    for _ in range(MAX_NESTING + 1):
        level = [
            each
            for outer in level
            for each in (
                outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()
            )
            if isinstance(each, dict | list)
        ]
    if level:
        raise InvalidField(field, text, f"must not have more than {MAX_NESTING} levels")
