"""Events of the request machine alone; the others are in `services/buffer/events.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seer.common import wire
from seer.common.policy.length import Estimate
from seer.common.types import TurnSpec
from seer.services.buffer import events


class EngineReported(events.Row, frozen=True):
    """An engine reports how many blocks saves to the KV pool pin, which placements depend on.

    The other fields are for those who read the log, as in `InstanceStats`: counts since the engine started,
    and the engine's best speeds. `computed_tokens` are those of prompts that were not cached. 0 in logs of
    releases up to 0.4.0.
    """

    instance: str
    pinned_blocks: int = 0
    generated_tokens: int = 0
    best_rate: float = 0.0
    token_seconds_alone: float = 0.0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    computed_tokens: int = 0
    pool_tokens: int = 0


class KeptResponse(events.Row, frozen=True):
    """The `count` tokens that an earlier incarnation kept of a response; `finish` is empty if it goes on."""

    index: int
    count: int
    finish: str = ""
    stop_reason: str = ""


class Kept(events.Row, frozen=True):
    """What an earlier incarnation kept of a prompt's responses, and version and digest of their weights."""

    version: int
    digest: str
    responses: list[KeptResponse]


class GroupSpec(events.Row, frozen=True):
    """One prompt of a submission.

    `same`: it has the tokens, parameters and place of the known prompt with its id, if any. Its responses are
    those from `first_index` on of the group `shared_id`; empty: of no other group. `turn`: its response is
    one turn of the trajectory that is that group's response `first_index`. Of its images, the largest takes
    `image_tokens` (0: it has none), and the images `missing` are not in the buffer yet. `stream`: its trainer
    wants tokens as chunks end.
    """

    prompt_id: str
    prompt_len: int
    same: bool = True
    kept: Kept | None = None
    shared_id: str = ""
    first_index: int = 0
    turn: TurnSpec | None = None
    image_tokens: int = 0
    missing: Sequence[str] = ()
    stream: bool = False


class GroupsSubmitted(events.Row, frozen=True):
    """A trainer submitted prompts, for n responses each. Known prompts are accepted again.

    New ones wait until `weight_version` is live; -1: the version of their rollout, or else whichever is live.
    If the trainer `expects` that it is live, they wait for `EXPECT_SECONDS` at most.
    `submission` numbers the trainer's submissions; the other fields are as in `RolloutState`. An empty
    `share` is the trainer's own.
    """

    trainer: str
    rollout_id: str
    n: int
    max_tokens: int
    groups: list[GroupSpec]
    weight_version: int = -1
    submission: int = 0
    params_digest: int = 0
    address: bytes = b""
    open: bool = False
    share: str = ""
    expects: bool = False


class TrainerLost(events.Row, frozen=True):
    """An incarnation of a trainer left, or was silent for too long: its unfinished groups are cancelled."""

    address: bytes


class ChunkEnded(events.Row, frozen=True):
    """A chunk ended, with `result.count` new tokens."""

    instance: str
    result: wire.ChunkResult


class TokensArrived(events.Row, frozen=True):
    """A chunk that goes on, of a streamed group, has generated the `tokens.count` next ones."""

    instance: str
    tokens: wire.ChunkTokens


class EstimatesChanged(events.Row, frozen=True):
    """The context service published length estimates and acceptance rates of drafts, by group id."""

    estimates: Mapping[str, Estimate]
    acceptance: Mapping[str, list[int]] = {}


class ImageArrived(events.Row, frozen=True):
    """An image is in the buffer now."""

    name: str


class ImagesStalled(events.Row, frozen=True):
    """The images that these groups wait for do not come."""

    groups: list[str]
    message: str


class WeightsChanged(events.Row, frozen=True):
    """These weights are live from now on, by an update of trainer `by`; empty: engines had them before."""

    version: int
    digest: str = ""
    by: str = ""


class SubmissionsHeld(events.Row, frozen=True):
    """From now on new groups are held, or no longer."""

    held: bool


class RolloutsAborted(events.Row, frozen=True):
    """All open groups are cancelled."""

    message: str


Event = (
    events.Joined
    | events.Left
    | events.FromEngine
    | events.FromTrainer
    | EngineReported
    | GroupsSubmitted
    | events.SleeperLost
    | TrainerLost
    | events.Drained
    | ChunkEnded
    | TokensArrived
    | EstimatesChanged
    | ImageArrived
    | ImagesStalled
    | WeightsChanged
    | SubmissionsHeld
    | RolloutsAborted
    | events.Tick
)
