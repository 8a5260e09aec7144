"""Instructions of the weights machine that other machines carry out; see `machine`."""

from __future__ import annotations

from seer.services.buffer.events import Row, ToEngine, ToTrainer


class Admit(Row, frozen=True):
    """From now on an instance may get work."""

    instance: str


class Expel(Row, frozen=True):
    """From now on an instance gets no work."""

    instance: str


class Hold(Row, frozen=True):
    """Hold submissions."""


class Release(Row, frozen=True):
    """Hold submissions no longer."""


class Abort(Row, frozen=True):
    """End every unfinished request; `whose` update wants that, if one does, as a text behind "update"."""

    whose: str = ""


Instruction = ToEngine | ToTrainer | Admit | Expel | Hold | Release | Abort
