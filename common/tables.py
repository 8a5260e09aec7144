"""Tables of a configuration file: settings by name, before they become `Section`s, and written again.

Invariants:
- a key that no section has is refused by its whole name, with the nearest valid one, or with what to do
  instead of a setting that there was once;
- text takes the type of its field; where both are possible it stays text.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from seer.common.errors import ConfigError

REMOVED = {
    "buffer.max_attempts": "leave it out: a chunk has 8 attempts",
    "buffer.media": "set buffer.images",
    "buffer.media_bytes": "set buffer.image_bytes",
    "context.publish_interval_seconds": "leave it out: estimates are published after 0.05 s",
    "dgds.ttl_seconds": "leave it out: groups are kept for 600 s after their last use",
    "engine.fault_position": "leave it out: `seer verify --plant-fault` plants a fault by itself",
    "engine.flush_seconds": "leave it out: tokens go to the dgds within 0.25 s",
    "engine.flush_tokens": "leave it out: tokens go to the dgds within 0.25 s",
    "engine.media_bytes": "set engine.image_bytes",
    "engine.replay_mean_tokens": "write mean_tokens under [engine.replay]",
    "engine.replay_row_seconds": "write row_seconds under [engine.replay]",
    "engine.replay_step_seconds": "write step_seconds under [engine.replay]",
    "engine.replay_trace": "write trace under [engine.replay]",
    "engine.replay_vocab_size": "write vocab_size under [engine.replay]",
    "engine.status_seconds": "leave it out: engines report every second",
    "gateway.media_bytes": "set gateway.image_bytes",
    "gateway.update_seconds": "set buffer.update_seconds, which gateways read, too",
    "pool.call_seconds": "leave it out: a call into the pool that takes longer than 2 s is a miss",
}
"""Settings that there were once, by the names that files have, and what to do instead."""


def fields(struct: type) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a section by name."""
    return {field.name: field for field in msgspec.structs.fields(struct)}


def put(whole: type, table: dict[str, Any], dotted: str, text: str, source: str) -> None:
    """Put the setting `dotted` (section.key) of a configuration, with the value in `text`, into its table.

    Raises `ConfigError` naming the `source`, the key and the fix.
    """
    *sections, key = dotted.split(".")
    named: dict[str, object] = {key: None}
    for section in reversed(sections):
        named = {section: named}
    refuse_unknown(whole, named, source)
    kind: Any = whole
    inner: Any = table
    for section in sections:
        kind = fields(kind)[section].type
        inner = inner.setdefault(section, {}) if isinstance(inner, dict) else None
        if not _is_section(kind):
            raise ConfigError(f"{source}: {section} is a setting, which has no {key}")
    if _is_section(fields(kind)[key].type):
        raise ConfigError(f"{source}: {dotted} is a section; name one of its keys, as {dotted}.KEY")
    if isinstance(inner, dict):
        inner[key] = _parse(fields(kind)[key].type, dotted, text, source)


def refuse_unknown(struct: type, table: Mapping[str, object], source: str, prefix: str = "") -> None:
    """Raise `ConfigError` for a key that its section does not have. `prefix`: the section's name, a dot."""
    known = fields(struct)
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{source}: {_refusal(struct, f'{prefix}{key}', prefix)}")
        inner = known[key].type
        if isinstance(value, dict) and _is_section(inner):
            refuse_unknown(inner, value, source, f"{prefix}{key}.")


def _refusal(struct: type, name: str, prefix: str) -> str:
    key = name.removeprefix(prefix)
    if name in REMOVED:
        return f"{name} is no longer a setting; {REMOVED[name]}"
    if refused := getattr(struct, "REFUSED", {}).get(key):
        return f"{name} is not passed on to vLLM: {refused}"
    near = difflib.get_close_matches(key, fields(struct), n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"valid: {', '.join(fields(struct))}"
    return f"unknown key {name}; {hint}"


def settings(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield all settings in a table: dotted name, value."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def lines(name: str, values: Mapping[str, object]) -> list[str]:
    """Return a table's lines as TOML, its own keys before the tables in it."""
    inner = {key: value for key, value in values.items() if isinstance(value, dict)}
    own = {key: value for key, value in values.items() if key not in inner and value is not None}
    found = [f"[{name}]", *(f"{toml_key(key)} = {toml_value(value)}" for key, value in own.items()), ""]
    for key, value in inner.items():
        found += lines(f"{name}.{key}", value)
    return found


def toml_key(key: str) -> str:
    """Return a key as TOML has it: names of others than settings may be any text."""
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: object) -> str:
    """Return a value as TOML has it."""
    # JSON's strings, numbers and booleans are TOML's too.
    return msgspec.json.encode(value).decode()


def _parse(kind: object, dotted: str, text: str, source: str) -> object:
    for candidate in (text, _maybe_toml(text)):
        try:
            return msgspec.convert(candidate, kind, strict=False)
        except msgspec.ValidationError as error:
            problem = str(error)
    raise ConfigError(f"{source}: {dotted}: {problem}")


def _maybe_toml(text: str) -> object:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
