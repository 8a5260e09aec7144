"""What a body says that the text of its answers must be, as one constraint for the engines. Pure.

Invariant: a constraint is what engines get, or is refused by the name of its field: none is left aside.
"""

from __future__ import annotations

from typing import Any

import msgspec

from seer.common.errors import InvalidField
from seer.common.structured_outputs import StructuredOutputs
from seer.gateway.errors import HttpError, bad

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NOT_HAD = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def constraint_of(given: dict[str, Any], field: str) -> StructuredOutputs:
    """Return the constraint that vLLM's `structured_outputs` gives. Raises `HttpError`, below `field`."""
    kinds: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or (value is False and name != "json"):
            continue
        if name in _NOT_HAD:
            raise bad(f"{field}.{name}", value, "is not supported: give json, regex, choice or grammar")
        kinds[name] = value
    if len(kinds) != 1:
        raise bad(field, list(kinds), "give one of json, json_object, regex, choice, grammar")
    ((name, value),) = kinds.items()
    if name == "json" or (name, value) == ("json_object", True):
        return json_constraint(_ANY_OBJECT if name == "json_object" else value, f"{field}.{name}", field)
    try:
        constraint = msgspec.convert({name: value}, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise bad(f"{field}.{name}", value, str(error)) from error
    return _checked(constraint, field)


def format_constraint(given: dict[str, Any], field: str) -> StructuredOutputs | None:
    """Return the constraint that OpenAI's `response_format` gives; None: any text."""
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return json_constraint(_ANY_OBJECT, field)
        case "json_schema":
            shape = given.get("json_schema")
            schema = shape.get("schema") if isinstance(shape, dict) else None
            where = f"{field}.json_schema.schema"
            if schema is None:
                raise bad(where, schema, "give a JSON schema")
            return json_constraint(schema, where)
        case kind:
            raise bad(f"{field}.type", kind, "give text, json_object or json_schema")


def json_constraint(schema: object, field: str, parent: str | None = None) -> StructuredOutputs:
    """Return the constraint that text is JSON of a schema, as an object or as text."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    constraint = StructuredOutputs(json=text)
    return _checked(constraint, parent or field, field)


def _checked(constraint: StructuredOutputs, parent: str, field: str | None = None) -> StructuredOutputs:
    """Return a constraint that can be sent; one that cannot is refused by its `field`, if that is given."""
    try:
        constraint.check(parent)
    except InvalidField as error:
        name = field or error.field
        raise HttpError(400, str(error).replace(error.field, name, 1), name) from error
    return constraint
