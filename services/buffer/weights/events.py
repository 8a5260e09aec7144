"""What the weights machine hears; see `machine`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Weights:
    """`source`: a folder that every node sees, or a stream; empty: where the engine's configuration points.

    A negative `version` is an instance whose last load failed.
    """

    version: int
    digest: str
    source: str = ""


class InFlight(Enum):
    """What becomes of unfinished requests when an update is asked for."""

    FINISH = "finish"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Registered:
    """An instance is there, in a new life, with these weights loaded."""

    instance: str
    weights: Weights


@dataclass(frozen=True, slots=True)
class Lost:
    """An instance is gone."""

    instance: str


@dataclass(frozen=True, slots=True)
class UpdateAsked:
    """A trainer wants a version; `digest` is checked if it is given. The answer repeats `call_id`."""

    trainer: str
    version: int
    source: str
    digest: str = ""
    in_flight: InFlight = InFlight.FINISH
    call_id: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """An instance checked weights beside its live ones; `problem` is empty when it can load them.

    `call_id` is that of the `Prepare` it answers; 0: an instance of an earlier release, which does not say.
    """

    instance: str
    version: int
    digest: str
    problem: str = ""
    call_id: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """An instance loaded weights; with a `problem` it has none that can be trusted."""

    instance: str
    version: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Drained:
    """No update begins any more; one that no instance loads yet ends."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, the last running request ended, or an instance went to sleep or woke."""


Event = Registered | Lost | UpdateAsked | Prepared | Loaded | Drained | Tick
