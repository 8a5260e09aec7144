"""Events of the weights machine alone; see `machine`."""

from __future__ import annotations

from enum import Enum

from seer.services.buffer import events


class InFlight(Enum):
    """Unfinished requests are finished before an update, or aborted, or it is refused."""

    FINISH = "finish"
    ABORT = "abort"
    ERROR = "error"


class UpdateAsked(events.Row, frozen=True):
    """A trainer requests an update. `digest` is checked unless empty; the answer repeats `call_id`."""

    trainer: str
    version: int
    source: str
    digest: str = ""
    in_flight: InFlight = InFlight.FINISH
    call_id: int = 0


class Prepared(events.Row, frozen=True):
    """An instance checked weights beside its live ones; `problem` is empty if it can load them.

    `call_id` is that of the `Prepare` that it answers; 0: from an engine of an earlier release, which has
    none.
    """

    instance: str
    version: int
    digest: str
    problem: str = ""
    call_id: int = 0


class Loaded(events.Row, frozen=True):
    """An instance loaded weights; with a `problem`, the weights that it has cannot be used.

    `call_id` is that of its `Load`.
    """

    instance: str
    version: int
    problem: str = ""
    call_id: int = 0


class Dropped(events.Row, frozen=True):
    """An instance dropped the values of its weights to sleep."""

    instance: str


Event = events.Joined | events.Left | UpdateAsked | Prepared | Loaded | Dropped | events.Drained | events.Tick
