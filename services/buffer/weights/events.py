"""What the weights machine hears; see `machine`."""

from __future__ import annotations

from enum import Enum

from seer.services.buffer import events


class InFlight(Enum):
    """What becomes of unfinished requests when an update is asked for."""

    FINISH = "finish"
    ABORT = "abort"
    ERROR = "error"


class UpdateAsked(events.Row, frozen=True):
    """A trainer wants a version; `digest` is checked if it is given. The answer repeats `call_id`."""

    trainer: str
    version: int
    source: str
    digest: str = ""
    in_flight: InFlight = InFlight.FINISH
    call_id: int = 0


class Prepared(events.Row, frozen=True):
    """An instance checked weights beside its live ones; `problem` is empty when it can load them.

    `call_id` is that of the `Prepare` it answers; 0: an instance of an earlier release, which does not say.
    """

    instance: str
    version: int
    digest: str
    problem: str = ""
    call_id: int = 0


class Loaded(events.Row, frozen=True):
    """An instance loaded weights; with a `problem` it has none that can be trusted."""

    instance: str
    version: int
    problem: str = ""


Event = events.Joined | events.Left | UpdateAsked | Prepared | Loaded | events.Drained | events.Tick
