"""What passes between the buffer's machines and everybody else. Machines get events and return instructions.

Messages without arrays are defined once, in `common/wire`: a machine gets them as `FromEngine` and
`FromTrainer`, and returns them as `ToEngine`, `ToTrainer` and `ToIncarnation`; those to the context service
are instructions themselves. All that is defined here is a tagged array, so the log can write it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from seer.common import wire


class Row(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of events and instructions; logs have their class names. New fields go last, with defaults."""


# --- events --------------------------------------------------------------------------------


class Weights(Row, frozen=True):
    """The weights of an instance, or those that it is to load.

    `source`: a folder that every node can read, or a stream; empty: the model in the engine's configuration.
    A negative `version`: the instance's last load failed.
    """

    version: int
    digest: str
    source: str = ""


class Joined(Row, frozen=True):
    """An engine registered, for the first time or again. `incarnation`: see `peers.incarnation_of`.

    `weights_endpoint` in `register` is empty if others are not to copy streams of weights from it.
    """

    instance: str
    register: wire.Register
    incarnation: int = 0

    @property
    def dropped(self) -> bool:
        """Whether the engine dropped its weights to sleep, and has no others."""
        return self.register.weight_version < 0 <= self.register.dropped_version

    @property
    def weights(self) -> Weights:
        """The weights that it has, or dropped."""
        of = self.register
        version = of.dropped_version if self.dropped else of.weight_version
        return Weights(version, of.weights_digest, of.weights_source)


class FromEngine(Row, frozen=True):
    """A registered engine answered an order, or failed to run a chunk."""

    instance: str
    message: wire.WeightsPrepared | wire.WeightsLoaded | wire.Slept | wire.ChunkFailed


class FromTrainer(Row, frozen=True):
    """A trainer asks for something; what it submits are `GroupsSubmitted`, as prompts are arrays.

    `share`: whom what it has counts to; empty: itself.
    """

    trainer: str
    message: wire.UpdateWeights | wire.Sleep | wire.Cancel | wire.Acknowledge
    share: str = ""


class SleeperLost(Row, frozen=True):
    """Nobody whose work counts to `share` has been there for the lease of trainers: it needs no sleep."""

    share: str


class Left(Row, frozen=True):
    """Engines are gone: they sent `Goodbye`, were silent for too long, or `died` (connection lost)."""

    instances: Sequence[str]
    died: bool = False


class Drained(Row, frozen=True):
    """From now on nothing new is begun, but held for the buffer's successor; what was begun is finished."""


class Tick(Row, frozen=True):
    """Time passed: deadlines are checked."""


class Changed(Row, frozen=True):
    """Another machine's state changed, on which this machine's next decision depends. In no log."""


# --- instructions --------------------------------------------------------------------------


class ToEngine(Row, frozen=True):
    """Give an engine an order. A `Dispatch` is one, too: a chunk to run, whose tokens the machines lack."""

    instance: str
    message: (
        wire.PrepareWeights
        | wire.DiscardWeights
        | wire.LoadWeights
        | wire.Sleep
        | wire.DropChunk
        | wire.EndChunks
    )


class ToTrainer(Row, frozen=True):
    """Tell a trainer how its update, or its wish that engines sleep or wake, goes."""

    trainer: str
    message: wire.WeightsLoading | wire.WeightsLive | wire.WeightsFailed | wire.Slept


class ToIncarnation(Row, frozen=True):
    """Tell the trainer's incarnation that submitted prompts that they are accepted, or not completed."""

    address: bytes
    message: wire.Accepted | wire.Refused
