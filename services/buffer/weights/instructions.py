"""What the weights machine has others do; see `machine`."""

from __future__ import annotations

from dataclasses import dataclass

from seer.services.buffer.weights.events import Weights


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have an instance check weights beside its live ones."""

    instance: str
    version: int
    source: str
    call_id: int = 0


@dataclass(frozen=True, slots=True)
class Discard:
    """Have an instance forget what a `Prepare` brought it: that update is off."""

    instance: str
    version: int
    call_id: int


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
    call_id: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the trainer that nothing changed, and why, by instance (empty name: the update itself)."""

    trainer: str
    version: int
    reasons: dict[str, str]
    call_id: int = 0


Instruction = Prepare | Discard | Load | Admit | Expel | Hold | Release | Abort | Report | Fail
