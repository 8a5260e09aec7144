"""What the weights machine hears, and what it has others do; see `weights`."""

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


# --- events ----------------------------------------------------------------------------------


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
    """A trainer wants a version; `digest` is checked if it is given. `ask`: its own number for the answer."""

    trainer: str
    version: int
    source: str
    digest: str = ""
    in_flight: InFlight = InFlight.FINISH
    ask: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """An instance checked weights beside its live ones; `problem` is empty when it can load them.

    `ask` is that of the `Prepare` it answers; 0: an instance of an earlier release, which does not say.
    """

    instance: str
    version: int
    digest: str
    problem: str = ""
    ask: int = 0


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


# --- instructions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have an instance check weights beside its live ones."""

    instance: str
    version: int
    source: str
    ask: int = 0


@dataclass(frozen=True, slots=True)
class Discard:
    """Have an instance forget what a `Prepare` brought it: that update is off."""

    instance: str
    version: int
    ask: int


@dataclass(frozen=True, slots=True)
class Load:
    """Have an instance load weights; it runs nothing meanwhile."""

    instance: str
    weights: Weights


@dataclass(frozen=True, slots=True)
class Admit:
    """Give an instance work."""

    instance: str


@dataclass(frozen=True, slots=True)
class Expel:
    """Give an instance no work."""

    instance: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep submissions back."""


@dataclass(frozen=True, slots=True)
class Release:
    """Let submissions in again."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End every unfinished request."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the trainer that the weights are live; `quarantined` instances have a reason each."""

    trainer: str
    weights: Weights
    quarantined: dict[str, str]
    ask: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the trainer that nothing changed, and why, by instance (empty name: the update itself)."""

    trainer: str
    version: int
    reasons: dict[str, str]
    ask: int = 0


Instruction = Prepare | Discard | Load | Admit | Expel | Hold | Release | Abort | Report | Fail
