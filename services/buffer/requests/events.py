"""What happens to the buffer's request machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seer.common.policy.length import Estimate
from seer.common.types import Capacity


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """An engine registered, for the first time, again, or in a new `life`: a number of its own each."""

    instance: str
    capacity: Capacity
    life: int = 0


@dataclass(frozen=True, slots=True)
class EnginesLeft:
    """Engines are gone: they said goodbye, fell silent, or `died` (their connections are gone)."""

    instances: Sequence[str]
    died: bool = False


@dataclass(frozen=True, slots=True)
class EngineReported:
    """How many blocks pool saves pin in an engine."""

    instance: str
    pinned_blocks: int = 0


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One prompt of a submission. `same`: its tokens are those of the prompt known under its id, if any."""

    prompt_id: str
    prompt_len: int
    same: bool = True


@dataclass(frozen=True, slots=True)
class GroupsSubmitted:
    """A trainer submitted prompts, n responses each. Known ones are accepted again.

    New ones wait until `weight_version` is live; -1: the rollout's own, or whatever is live. `submission`
    numbers the trainer's calls, the rest is as in `RolloutState`.
    """

    trainer: str
    rollout_id: str
    n: int
    max_tokens: int
    groups: list[GroupSpec]
    weight_version: int = -1
    submission: int = 0
    params_digest: int = 0
    life: bytes = b""


@dataclass(frozen=True, slots=True)
class GroupsAcknowledged:
    """The trainer holds these groups of this use; 0: of whichever it is."""

    trainer: str
    rollout_id: str
    prompt_ids: list[str]
    submission: int = 0


@dataclass(frozen=True, slots=True)
class RolloutCancelled:
    """The trainer gives up a use's unfinished prompts: the named ones, or all if none is named."""

    trainer: str
    rollout_id: str
    prompt_ids: list[str]
    submission: int = 0


@dataclass(frozen=True, slots=True)
class TrainerLost:
    """A life of a trainer has given no sign for so long that its unfinished work ends."""

    life: bytes


@dataclass(frozen=True, slots=True)
class ChunkEnded:
    """An engine says that a chunk ended with `count` new tokens; `finish` empty at a boundary."""

    instance: str
    request_id: str
    attempt: int
    count: int
    finish: str = ""
    stop_reason: str = ""
    preemptions: int = 0
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ChunkRejected:
    """An engine could not run a chunk; `fatal` when no engine could."""

    instance: str
    request_id: str
    attempt: int
    fatal: bool
    message: str


@dataclass(frozen=True, slots=True)
class EstimatesChanged:
    """The context service's news: group id -> length estimate, and acceptance of drafts."""

    estimates: Mapping[str, Estimate]
    acceptance: Mapping[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """These weights are live from now on."""

    version: int


@dataclass(frozen=True, slots=True)
class SubmissionsHeld:
    """From now on new groups are held back, or no longer."""

    held: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """From now on nothing new is taken; what was accepted is finished."""


@dataclass(frozen=True, slots=True)
class RolloutsAborted:
    """Every unfinished group ends here."""

    message: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines are looked at."""


Event = (
    EngineJoined
    | EnginesLeft
    | EngineReported
    | GroupsSubmitted
    | GroupsAcknowledged
    | RolloutCancelled
    | TrainerLost
    | Drained
    | ChunkEnded
    | ChunkRejected
    | EstimatesChanged
    | WeightsChanged
    | SubmissionsHeld
    | RolloutsAborted
    | Tick
)
