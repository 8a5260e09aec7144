"""What happens to the buffer's request machine alone; see `services/buffer/events.py` for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seer.common.policy.length import Estimate
from seer.services.buffer import events


class EngineReported(events.Row, frozen=True):
    """How many blocks pool saves pin in an engine."""

    instance: str
    pinned_blocks: int = 0


class KeptResponse(events.Row, frozen=True):
    """How many tokens an earlier life of the buffer kept of a response, and how it ended, if it did."""

    index: int
    count: int
    finish: str = ""
    stop_reason: str = ""


class Kept(events.Row, frozen=True):
    """What an earlier life of the buffer kept of a prompt's responses, and by which weights they are."""

    version: int
    digest: str
    responses: list[KeptResponse]


class GroupSpec(events.Row, frozen=True):
    """One prompt of a submission. `same`: its tokens are those of the prompt known under its id, if any."""

    prompt_id: str
    prompt_len: int
    same: bool = True
    kept: Kept | None = None


class GroupsSubmitted(events.Row, frozen=True):
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


class GroupsAcknowledged(events.Row, frozen=True):
    """The trainer holds these groups of this use; 0: of whichever it is."""

    trainer: str
    rollout_id: str
    prompt_ids: list[str]
    submission: int = 0


class RolloutCancelled(events.Row, frozen=True):
    """The trainer gives up a use's unfinished prompts: the named ones, or all if none is named."""

    trainer: str
    rollout_id: str
    prompt_ids: list[str]
    submission: int = 0


class TrainerLost(events.Row, frozen=True):
    """A life of a trainer has given no sign for so long that its unfinished work ends."""

    life: bytes


class ChunkEnded(events.Row, frozen=True):
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


class ChunkRejected(events.Row, frozen=True):
    """An engine could not run a chunk; `fatal` when no engine could."""

    instance: str
    request_id: str
    attempt: int
    fatal: bool
    message: str


class EstimatesChanged(events.Row, frozen=True):
    """The context service's news: group id -> length estimate, and acceptance of drafts."""

    estimates: Mapping[str, Estimate]
    acceptance: Mapping[str, list[int]] = {}


class WeightsChanged(events.Row, frozen=True):
    """These weights are live from now on."""

    version: int
    digest: str = ""


class SubmissionsHeld(events.Row, frozen=True):
    """From now on new groups are held back, or no longer."""

    held: bool


class RolloutsAborted(events.Row, frozen=True):
    """Every unfinished group ends here."""

    message: str


Event = (
    events.Joined
    | events.Left
    | EngineReported
    | GroupsSubmitted
    | GroupsAcknowledged
    | RolloutCancelled
    | TrainerLost
    | events.Drained
    | ChunkEnded
    | ChunkRejected
    | EstimatesChanged
    | WeightsChanged
    | SubmissionsHeld
    | RolloutsAborted
    | events.Tick
)
