"""Parts of the weights machine's state: the update under way, and an instance that has to load."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import field

from seer.common.weights.in_place import is_in_place
from seer.services.buffer.events import Weights
from seer.services.buffer.weights.events import UpdateAsked
from seer.services.buffer.weights.instructions import Instruction, Load, Receivers

NO_DEADLINE = 1e300
"""A deadline that never passes. The log is JSON, which has no infinity."""


class Update(msgspec.Struct):
    """The update that is under way.

    `sent_to`: the instances that got its `Prepare`. `awaited`: those whose answer, to `Prepare` or to `Load`,
    is still missing. `digest`: that of the new weights, once it is given or reported. `committing`: all have
    prepared, and instances load. `left`: why instances that left meanwhile have not loaded weights in place.
    `succeeded`: an instance has loaded.
    """

    # Fields are encoded under the names that they have in earlier logs.
    request: UpdateAsked = field(name="asked")
    number: int
    deadline: float
    awaited: set[str] = field(default_factory=set)
    sent_to: set[str] = field(default_factory=set, name="told")
    digest: str = ""
    committing: bool = False
    left: dict[str, str] = field(default_factory=dict)
    succeeded: bool = False

    def gives_other_bytes(self, live: Weights | None) -> bool:
        """Return whether these are other weights than the live ones, under the same version."""
        return live is not None and self.request.version == live.version and self.digest != live.digest

    def receivers(self, out: Sequence[Instruction]) -> list[Instruction]:
        """Return what tells the trainer of weights in place which instances load them now, by these `out`."""
        request = self.request
        if not (self.committing and is_in_place(request.source)):
            return []
        names = [item.instance for item in out if isinstance(item, Load)]
        return [Receivers(request.trainer, request.version, names, request.call_id)]


class Pending(msgspec.Struct):
    """An instance that gets no work before it has loaded the live weights.

    `loaded`: the weights that it has; None: unknown. `sent`: those of the last `Load` sent to it. `source`:
    where to load the live weights from, if their own source failed; empty: from that. `call_id`: that of the
    last `Load`.
    """

    loaded: Weights | None = field(default=None, name="has")
    sent: Weights | None = field(default=None, name="told")
    source: str = ""
    deadline: float = NO_DEADLINE
    call_id: int = 0


def is_for(event: UpdateAsked, live: Weights) -> bool:
    """Return whether a request is for the weights that are live."""
    same = event.digest == live.digest if event.digest else event.source == live.source
    return event.version == live.version and same
