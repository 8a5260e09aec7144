"""Instructions of the weights machine; see `machine`."""

from __future__ import annotations

from collections.abc import Sequence

from seer.services.buffer import events
from seer.services.buffer.events import Weights


class Prepare(events.Row, frozen=True):
    """Have an instance check weights beside its live ones.

    `digest`: what they must have, if that is known. `holders`: where to copy a stream from before the buffer
    is asked for it.
    """

    instance: str
    version: int
    source: str
    call_id: int = 0
    digest: str = ""
    holders: tuple[str, ...] = ()


class Discard(events.Row, frozen=True):
    """Have an instance discard what it prepared: the update failed."""

    instance: str
    version: int
    call_id: int


class Load(events.Row, frozen=True):
    """Have an instance load weights; it gets no work until it has. `holders`: as in `Prepare`.

    `call_id`: its answer repeats it.
    """

    instance: str
    weights: Weights
    holders: tuple[str, ...] = ()
    call_id: int = 0


class Admit(events.Row, frozen=True):
    """From now on an instance may get work."""

    instance: str


class Expel(events.Row, frozen=True):
    """From now on an instance gets no work."""

    instance: str


class Hold(events.Row, frozen=True):
    """Hold submissions."""


class Release(events.Row, frozen=True):
    """Hold submissions no longer."""


class Abort(events.Row, frozen=True):
    """End every unfinished request."""


class Receivers(events.Row, frozen=True):
    """Tell the trainer of weights in place which instances were sent their `Load`: no other one will be."""

    trainer: str
    version: int
    instances: Sequence[str]
    call_id: int = 0


class Report(events.Row, frozen=True):
    """Tell the trainer that the weights are live; `quarantined` instances have a reason each."""

    trainer: str
    weights: Weights
    quarantined: dict[str, str]
    call_id: int = 0


class Fail(events.Row, frozen=True):
    """Tell the trainer that an update failed, and why, by instance (empty name: the update itself)."""

    trainer: str
    version: int
    reasons: dict[str, str]
    call_id: int = 0


Instruction = Prepare | Discard | Load | Admit | Expel | Hold | Release | Abort | Receivers | Report | Fail
