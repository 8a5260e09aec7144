"""Workloads from files: TOML descriptions, and recorded rollouts.

A description has the fields of `Workload` except name and lengths; `model` is a table with `Model`'s fields.
With `like = "moonlight"` fields that are left out are that workload's; `trace = "FILE"`, relative to the
description, gives lengths.

A trace is JSON lines, of responses `{"id": "<prompt>", "length": n}` or `{"id", "token_ids": [...]}`
(what the replay engine reads), or of groups `{"id", "responses": [{"token_ids": [...]}, ...]}` (what
`seer rollout` writes). Other fields are ignored; `index`, if given, must be unique in its group.

Every error names the file, the line or field, and the fix.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from seer.common.errors import NOT_DECODED, ConfigError, InvalidField
from seer.sim.workload import WORKLOADS, Model, Workload


class _Response(msgspec.Struct):
    token_ids: list[int] | None = None
    length: int | None = None
    index: int | None = None


class _Line(_Response):
    id: str = ""
    responses: list[_Response] | None = None


def load_workload(named: str, cluster: str | None = None, base: Workload | None = None) -> Workload:
    """Return a workload by its name, or from a .toml or .jsonl file.

    A trace runs on the `cluster` of another workload, by name or file. With a `base`, a recorded rollout, it
    is a .toml file with what differs from that. Raises `InvalidField` and `ConfigError`.
    """
    path = Path(named)
    is_trace = path.suffix == ".jsonl"
    if base is not None and (path.suffix != ".toml" or cluster is not None):
        fix = "with --from-log give .toml files, with what is to differ from the rollout, and no --cluster"
        raise InvalidField("--workload", named, fix)
    if cluster is not None and not is_trace:
        raise InvalidField("--cluster", cluster, f"is for traces, FILE.jsonl; {named} has its own cluster")
    if named in WORKLOADS:
        return WORKLOADS[named]()
    if is_trace:
        if cluster is None:
            fix = f"a trace needs --cluster WORKLOAD: {', '.join(WORKLOADS)} or a .toml file"
            raise InvalidField("--workload", named, fix)
        return recorded(load_workload(cluster), path.name, read_trace(path))
    if path.suffix == ".toml":
        return _described(path, base)
    fix = f"choose from {', '.join(WORKLOADS)}, or give a file, .toml or .jsonl"
    raise InvalidField("--workload", named, fix)


def recorded(load: Workload, name: str, lengths: tuple[tuple[int, ...], ...]) -> Workload:
    """Return a workload's cluster with recorded lengths by group; `InvalidField` if they exceed its cap."""
    longest = max(map(max, lengths))
    if longest > load.cap:
        fix = (
            f"{name} has a response of {longest} tokens: describe the cluster, with that cap, in a .toml file"
        )
        raise InvalidField("workload.cap", load.cap, fix)
    return replace(load, name=name, groups=len(lengths), group_size=max(map(len, lengths)), lengths=lengths)


def read_trace(path: Path) -> tuple[tuple[int, ...], ...]:
    """Return the lengths in a trace, by prompt, prompts in the order of their first lines."""
    groups: dict[str, dict[int, int]] = {}
    for number, row in enumerate(_read(path).splitlines(), start=1):
        if not row.strip():
            continue
        where = f"{path}:{number}"
        try:
            line = msgspec.json.decode(row, type=_Line)
        except NOT_DECODED as error:
            raise ConfigError(f"{where}: {error}") from error
        if not line.id:
            raise InvalidField(f"{where}: id", line.id, "give the prompt's id, a non-empty string")
        group = groups.setdefault(line.id, {})
        for response in [line] if line.responses is None else line.responses:
            index = len(group) if response.index is None else response.index
            if index in group:
                raise InvalidField(f"{where}: index", index, f"prompt {line.id} has had it before")
            group[index] = _length(response, where)
    lengths = tuple(tuple(group.values()) for group in groups.values() if group)
    if not lengths:
        raise InvalidField("trace", str(path), 'holds no responses; give lines {"id": ..., "length": ...}')
    return lengths


def _length(response: _Response, where: str) -> int:
    tokens, length = response.token_ids, response.length
    if (tokens is None) == (length is None):
        found = "neither" if tokens is None else "both"
        raise InvalidField(f"{where}: length", found, "give length, token_ids or responses with one of them")
    length = len(tokens) if tokens is not None else length
    if length is None or length < 1:
        raise InvalidField(f"{where}: length", length, "must be 1 or more tokens")
    return length


def _described(path: Path, recorded: Workload | None = None) -> Workload:
    try:
        table = tomllib.loads(_read(path).decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    like, trace = table.pop("like", None), table.pop("trace", None)
    for key in _unknown(table):
        raise ConfigError(f"{path}: {key}")
    for name, value in (("like", like), ("trace", trace)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{path}: {name} = {value!r}: give a string")
    if recorded is not None and (like, trace) != (None, None):
        raise ConfigError(f"{path}: like, trace: a recorded rollout has all of it: leave them out")
    if like is not None and like not in WORKLOADS:
        raise ConfigError(f"{path}: like = {like!r}: choose from {', '.join(WORKLOADS)}")
    if recorded is not None or like is not None:
        base = msgspec.to_builtins(recorded or WORKLOADS[str(like)]())
        table = base | table | {"model": base["model"] | table.get("model", {})}
    table["name"] = path.name
    lengths = read_trace(path.parent / trace) if trace else ()
    if lengths:
        table |= {"groups": len(lengths), "group_size": max(map(len, lengths)), "lengths": lengths}
    try:
        return msgspec.convert(table, Workload)
    except (msgspec.ValidationError, InvalidField) as error:
        raise ConfigError(f"{path}: {error}") from error


def _unknown(table: dict[str, object]) -> Iterator[str]:
    """Yield an error for each wrong key of a description."""
    model = table.get("model", {})
    if not isinstance(model, dict):
        yield f"model = {model!r}: give a table, [model]"
        return
    given_otherwise = ("name", "lengths", "prompts", "acceptance")
    known = [*(each for each in Workload.__struct_fields__ if each not in given_otherwise), "like", "trace"]
    for prefix, keys, fields in (("", table, known), ("model.", model, list(Model.__struct_fields__))):
        for key in keys:
            if key not in fields:
                near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
                hint = f"did you mean {prefix}{near[0]}?" if near else f"valid: {', '.join(fields)}"
                yield f"unknown key {prefix}{key}; {hint}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a readable file") from error
