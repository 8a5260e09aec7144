"""Bounds of the numbers in settings, declared beside each field.

Invariants (tests/unit/test_bounds.py asserts them):
- every number of a `Section` has bounds, and no `Section` can be made with one outside them, by a file or by
  Python;
- NaN, infinities, and true or false in a number's place are outside all bounds.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec

from seer.common.errors import ConfigError, InvalidField


class Within(NamedTuple):
    """From `low` to `high`, both included. `fix`: what somebody who wants less or more should set instead."""

    low: float
    high: float
    fix: str = ""

    def refusal(self, value: object, whole: bool = False) -> str:
        """Return which numbers are accepted, if `value` is none of them; else nothing."""
        kinds = (int,) if whole else (int, float)
        sound = isinstance(value, kinds) and not isinstance(value, bool)
        if sound and self.low <= value <= self.high:  # type: ignore[operator]  # NaN is not
            return ""
        number = "a whole number" if whole else "a number"
        bounds = f"give {number} from {_shown(self.low)} to {_shown(self.high)}"
        return f"{bounds}; {self.fix}" if self.fix else bounds


def _shown(bound: float) -> str:
    return f"{bound:,.0f}".replace(",", "_") if bound == math.floor(bound) else f"{bound:g}"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file, `[title]`. Raises `ConfigError` for a number outside its bounds."""

    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, within, whole in _numbers(type(self)):
            value = getattr(self, name)
            several = value if isinstance(value, tuple) else (value,)
            named = value.items() if isinstance(value, dict) else ((None, each) for each in several)
            for key, each in named:
                if each is not None and (fix := within.refusal(each, whole)):
                    full = name if key is None else f"{name}.{key}"
                    raise ConfigError(f"{self.title}.{full} = {each!r}: {fix}")


@functools.cache
def _numbers(section: type[Section]) -> tuple[tuple[str, Within, bool], ...]:
    found = []
    for each in msgspec.structs.fields(section):
        for kind, within in numbers(each.type):
            assert within is not None, f"{section.__name__}.{each.name} has no bounds"  # noqa: S101
            found.append((each.name, within, kind is int))
    return tuple(found)


def numbers(kind: Any, within: Within | None = None) -> Iterator[tuple[type, Within | None]]:  # noqa: ANN401 - a type
    """Return the types of numbers that `kind` consists of, each with its bounds."""
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        yield from numbers(inner, next((note for note in notes if isinstance(note, Within)), within))
    elif get_origin(kind) in (Union, types.UnionType, tuple, dict):
        for each in get_args(kind):
            yield from numbers(each, within)
    elif kind in (int, float):
        yield kind, within


MAX_SECONDS = 1e9
"""Longest time that a setting may have, 31 years: for ever."""

Seconds = Annotated[float, Within(0.001, MAX_SECONDS)]
"""How long something may take or lasts."""

Interval = Annotated[float, Within(0.0, MAX_SECONDS)]
"""How long to wait for more; 0: not at all."""

Count = Annotated[int, Within(1, 2**31)]

Tokens = Annotated[int, Within(1, 2**24)]
"""Of one response or context: as long as `SamplingParams.max_tokens` may be."""

Bytes = Annotated[int, Within(1, 2**60)]

Gibibytes = Annotated[float, Within(0.001, 2**30)]

_Given = TypeVar("_Given", float, float | None)

INT64 = (-(2**63), 2**63 - 1)
"""Bounds of a number whose bits are part of a noise key."""


def check_whole(field: str, value: object, low: int, high: int) -> None:
    """Raise `InvalidField` unless a caller's number is a plain int within bounds: messages hold no others.

    What equals an int (3.0, True, numpy's) would be another noise key, or none.
    """
    if type(value) is not int:
        raise InvalidField(field, value, f"is of type {type(value).__name__}: give an int")
    if not low <= value <= high:
        raise InvalidField(field, value, f"must be in [{low}, {high}]")


def check_seconds(field: str, value: _Given) -> _Given:
    """Return a caller's deadline; None: none. Raises `InvalidField` unless it is above 0.

    NaN in a timer of an event loop would spoil the order of all its timers.
    """
    if value is not None and not value > 0:
        raise InvalidField(field, value, "must be positive")
    return value
