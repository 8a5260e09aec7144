"""Files with something wrong in them: bytes changed at random, and values that stand where others belong."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

Mutation = Callable[[random.Random, bytes], bytes]

_BYTES = (
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\r\n",
    b"\n",
    b'"',
    b"{",
    b"[",
    b"\\u0000",
    b"\xed\xa0\x80",
    b"\x80",
)
_NUMBERS = (
    b"-1", b"0", b"1e999", b"-0.0", b"NaN", b"nan", b"inf", b"true", b"null", str(2**63).encode(),
    str(2**64).encode(), str(-(2**63) - 1).encode(), b"1e-320", b"0x7fffffff", b"9" * 400, b"9" * 5000, b"[]",
    b"1979-05-27", b"'x'",
)  # fmt: skip
NESTED = 3000
"""Deeper than Python's limit of recursion, and than that of msgspec."""

_DEEP = (b"[" * NESTED + b"]" * NESTED, b'{"a":' * NESTED + b"1" + b"}" * NESTED)
_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**400, -(2**63) - 1, 1e308, 1e-320, float("nan"),
    float("inf"), "", "x", "x" * 5000, "\0", "\ud800", "é" * 300, "/", "../..", [], {}, [[]], [None], {"": None},
    {"a": {"b": []}}, [0] * 300, "1", "0" * 64,
)  # fmt: skip


def some_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, add, remove, repeat or move a few bytes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.choice((1, 1, 2, 4, 8, 40, 400)))
        match rng.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(found):
                found[at] = rng.randrange(256)
            case 2:
                del found[at:end]
            case 3:
                found[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 4:
                found[at:at] = found[at:end]
            case 5:
                found[at:end] = rng.choice(_BYTES)
            case _:
                part = bytes(found[at:end])
                del found[at:end]
                place = rng.randrange(len(found) + 1)
                found[place:place] = part
    return bytes(found)


def cut_short(rng: random.Random, data: bytes) -> bytes:
    """Leave out the end, as a full disk does."""
    return data[: rng.randrange(len(data) + 1)]


def a_number(rng: random.Random, data: bytes) -> bytes:
    """Replace one number or word by another value, whatever the format."""
    places = list(re.finditer(rb"[-+]?\d[\d.eE+-]*|true|false|null|\"[^\"\n]*\"", data))
    if not places:
        return some_bytes(rng, data)
    place = rng.choice(places)
    value = rng.choice(_DEEP) if rng.random() < 0.02 else rng.choice(_NUMBERS)
    return data[: place.start()] + value + data[place.end() :]


def lengths(rng: random.Random, data: bytes) -> bytes:
    """Write a length or offset of four or eight bytes, as headers claim them."""
    width = rng.choice((4, 8))
    at = rng.randrange(max(1, min(len(data), 64) - width))
    if rng.random() < 0.3:
        at = rng.randrange(max(1, len(data) - width))
    value = rng.choice(
        (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, len(data), len(data) + 1)
    )
    return data[:at] + (value % 2 ** (8 * width)).to_bytes(width, "little") + data[at + width :]


def lines(rng: random.Random, data: bytes) -> bytes:
    """Repeat, remove, swap or join lines."""
    rows = data.split(b"\n")
    one, other = rng.randrange(len(rows)), rng.randrange(len(rows))
    match rng.randrange(4):
        case 0:
            rows.insert(one, rows[other])
        case 1:
            del rows[one]
        case 2:
            rows[one], rows[other] = rows[other], rows[one]
        case _:
            rows[one] += rows[other]
    return b"\n".join(rows)


def json_values(rng: random.Random, data: bytes) -> bytes:
    """Of a text with a JSON value per line, change values and keys in one."""
    rows = data.split(b"\n")
    places = [place for place, row in enumerate(rows) if row[:1] in (b"{", b"[")]
    if not places:
        return a_number(rng, data)
    place = rng.choice(places)
    try:
        value = json.loads(rows[place])
    except (ValueError, RecursionError):
        return some_bytes(rng, data)
    rows[place] = changed(rng, value)
    return b"\n".join(rows)


def changed(rng: random.Random, value: object) -> bytes:
    """Return the text of a JSON value with one part of it replaced, removed, renamed or there twice."""
    spots = list(_spots(value))
    if not spots or rng.random() < 0.02:
        return rng.choice((*_DEEP, b"null", b"[]", b"{}", b"0"))
    holder, key = rng.choice(spots)
    deep = b""
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice((key + "_", "", key.upper(), "__metadata__", "x" * 300))] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.append(holder[key])
        case 3 if rng.random() < 0.1:
            holder[key], deep = "DEEP", rng.choice(_DEEP)
        case _:
            holder[key] = rng.choice(_VALUES)
    text = _as_json(value)
    return text.replace(b'"DEEP"', deep) if deep else text


def _as_json(value: object) -> bytes:
    compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    try:
        return compact.encode()
    except UnicodeEncodeError:  # half a surrogate pair, as an escape
        return json.dumps(value, separators=(",", ":")).encode()


def _spots(value: object) -> Sequence[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            found.append((value, key))
            found += _spots(each)
    return found


TEXT: tuple[Mutation, ...] = (some_bytes, some_bytes, cut_short, a_number, a_number, lines)
JSON: tuple[Mutation, ...] = (*TEXT, json_values, json_values, json_values, json_values)
BINARY: tuple[Mutation, ...] = (some_bytes, some_bytes, cut_short, lengths, lengths)
