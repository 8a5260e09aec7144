"""Parts of the weights machine's state: the update under way, and an instance that has to load."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import field

from seer.common import wire
from seer.common.weights.in_place import is_in_place
from seer.services.buffer.events import ToEngine, ToTrainer, Weights
from seer.services.buffer.weights.instructions import Instruction

NO_DEADLINE = 1e300
"""A deadline that never passes. The log is JSON, which has no infinity."""


class Update(msgspec.Struct):
    """The update that is under way.

    `sent_to`: the instances that got its `PrepareWeights`. `awaited`: those whose answer, to that or to
    `LoadWeights`, is still missing. `digest`: that of the new weights, once it is given or reported.
    `committing`: all have prepared, and instances load. `left`: why instances that left meanwhile have not
    loaded weights in place. `succeeded`: an instance has loaded.
    """

    trainer: str
    request: wire.UpdateWeights
    number: int
    deadline: float
    awaited: set[str] = field(default_factory=set)
    sent_to: set[str] = field(default_factory=set)
    digest: str = ""
    committing: bool = False
    left: dict[str, str] = field(default_factory=dict)
    succeeded: bool = False

    @property
    def weights(self) -> Weights:
        """The weights that it makes live."""
        return Weights(self.request.version, self.digest, self.request.source)

    @property
    def whose(self) -> str:
        """A text behind "update" that says whose it is."""
        return f" of {self.trainer} to version {self.request.version}"

    def gives_other_bytes(self, live: Weights | None) -> bool:
        """Return whether these are other weights than the live ones, under the same version."""
        return live is not None and self.request.version == live.version and self.digest != live.digest

    def problem_of(self, answer: wire.WeightsPrepared) -> str:
        """Return why an instance cannot take these weights; empty if it can."""
        if not answer.problem and self.digest not in ("", answer.digest):
            return f"reads weights with digest {answer.digest}, not {self.digest}"
        return answer.problem

    def late(self, seconds: float) -> dict[str, str]:
        """Return by instance why this was not done in so many seconds."""
        old = f"requests of the old version went on for {seconds:g} s"
        none = "no engine is there to take weights: start one"
        late = dict.fromkeys(sorted(self.awaited), f"did not answer in {seconds:g} s")
        return late or {"": old if self.sent_to else none}

    def prepare(self, name: str, holders: Sequence[str]) -> ToEngine:
        """Return the order to check these weights."""
        request = self.request
        order = wire.PrepareWeights(
            version=request.version,
            source=request.source,
            call_id=self.number,
            digest=self.digest,
            holders=list(holders),
        )
        return ToEngine(name, order)

    def receivers(self, out: Sequence[Instruction]) -> list[Instruction]:
        """Return what tells the trainer of weights in place which instances load them now, by these `out`."""
        request = self.request
        if not (self.committing and is_in_place(request.source)):
            return []
        loads = [item for item in out if isinstance(item, ToEngine)]
        names = [item.instance for item in loads if isinstance(item.message, wire.LoadWeights)]
        loading = wire.WeightsLoading(version=request.version, engines=names, call_id=request.call_id)
        return [ToTrainer(self.trainer, loading)]

    def succeeded_with(self, live: Weights, quarantined: dict[str, str]) -> ToTrainer:
        """Return the answer when the weights are live; `quarantined` instances have a reason each."""
        answer = wire.WeightsLive(
            version=live.version, digest=live.digest, quarantined=quarantined, call_id=self.request.call_id
        )
        return ToTrainer(self.trainer, answer)


class Pending(msgspec.Struct):
    """An instance that gets no work before it has loaded the live weights.

    `loaded`: the weights that it has; None: unknown. `sent`: those of the last `LoadWeights` sent to it, and
    `call_id` its number. `source`: where to load the live weights from, if their own source failed; empty:
    from that.
    """

    loaded: Weights | None = None
    sent: Weights | None = None
    source: str = ""
    deadline: float = NO_DEADLINE
    call_id: int = 0


def load(name: str, weights: Weights, holders: Sequence[str], call_id: int) -> ToEngine:
    """Return the order to load weights."""
    order = wire.LoadWeights(
        version=weights.version,
        digest=weights.digest,
        source=weights.source,
        holders=list(holders),
        call_id=call_id,
    )
    return ToEngine(name, order)


def discard(name: str, version: int, call_id: int) -> ToEngine:
    """Return the order to discard what was prepared."""
    return ToEngine(name, wire.DiscardWeights(version=version, call_id=call_id))


def failed(trainer: str, request: wire.UpdateWeights, reasons: dict[str, str]) -> ToTrainer:
    """Return the answer when an update failed; reasons by instance (empty name: the update itself)."""
    answer = wire.WeightsFailed(version=request.version, reasons=reasons, call_id=request.call_id)
    return ToTrainer(trainer, answer)


def is_for(request: wire.UpdateWeights, live: Weights) -> bool:
    """Return whether a request is for the weights that are live."""
    same = request.digest == live.digest if request.digest else request.source == live.source
    return request.version == live.version and same


def same(some: Weights | None, live: Weights | None) -> bool:
    """Return whether both are known, and the same weights from wherever."""
    if some is None or live is None:
        return False
    return (some.version, some.digest) == (live.version, live.digest)
