"""What happens to the buffer's machine, what it asks to be done, and the state it keeps.

Token counts only: the tokens themselves lie in the server's `store`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seer.common.policy.length import Estimate
from seer.common.policy.request import RequestView
from seer.common.types import Capacity


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and deadlines; see `config.BufferConfig`."""

    chunk_size: int | None
    max_requests: int = 200_000
    engine_wait_seconds: float = 600.0
    max_attempts: int = 8
    result_ttl_seconds: float = 3600.0
    result_tokens: int = 2**30
    unfinished_tokens: int = 2**31


# --- state -----------------------------------------------------------------------------------


@dataclass(slots=True)
class RolloutState:
    """One use of a rollout id. `finish_times` are seconds since `submitted`, drained by the server.

    Answers go to `life`, the address of the trainer's process that asked last, and name its `use`.
    `asked` digests seed, rollout number, n and sampling: a use has one. `weight_version` is that of the
    groups opened so far; -1: none was. `members` are its groups that are not forgotten yet, held ones,
    too; `groups` and `requests` count those opened. Some of them were `collected` by the trainer, or
    `failed`.
    """

    rollout_id: str
    trainer: str
    life: bytes
    use: int
    asked: int
    submitted: float
    weight_version: int = -1
    members: dict[str, GroupState] = field(default_factory=dict)
    groups: int = 0
    groups_finished: int = 0
    requests: int = 0
    finished: int = 0
    collected: bool = False
    failed: bool = False
    counters: Counter[str] = field(default_factory=Counter)
    finish_times: list[float] = field(default_factory=list)


@dataclass(slots=True)
class GroupState:
    """All requests of one prompt. `results` holds them, in index order, once all finished.

    `held_since` is set while it waits to be opened, for weights of `awaits` (-1: any) or an engine.
    `use` asked for it last.
    `kept` counts output tokens of all its requests. `acceptance` says how often drafts were right in
    it, by cell; empty: unknown.
    """

    group_id: str
    prompt_id: str
    rollout: RolloutState
    size: int
    prompt_len: int
    max_tokens: int
    awaits: int = -1
    use: int = 0
    held_since: float | None = None
    unfinished: int = 0
    kept: int = 0
    finished_at: float | None = None
    counters: Counter[str] = field(default_factory=Counter)
    results: list[RequestState] = field(default_factory=list)
    acceptance: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unfinished = self.size

    @property
    def tokens(self) -> int:
        """Prompt tokens and output kept so far."""
        return self.prompt_len + self.kept

    @property
    def done(self) -> bool:
        """Whether every request finished and the results await acknowledgement."""
        return self.finished_at is not None


@dataclass(slots=True)
class RequestState:
    """One response. `instance` is set while a chunk runs; `attempt` fences late answers.

    `losses` counts chunks in a row that failed by their own doing. `deaths` are the lives of engines
    that died while they ran it, since its last chunk that ended; `alone`: it runs with no other.
    `parked_since` is when the last engine that can hold it was missed first.
    """

    view: RequestView
    group: GroupState
    attempt: int = 0
    instance: str = ""
    blocks: int = 0
    losses: int = 0
    deaths: set[int] = field(default_factory=set)
    alone: bool = False
    finish: str = ""
    stop_reason: str = ""
    parked_since: float | None = None


# --- events ----------------------------------------------------------------------------------


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

    New ones wait until `weight_version` is live; -1: the rollout's own, or whatever is live. `use`
    numbers the trainer's calls, the rest is as in `RolloutState`.
    """

    trainer: str
    rollout_id: str
    n: int
    max_tokens: int
    groups: list[GroupSpec]
    weight_version: int = -1
    use: int = 0
    asked: int = 0
    life: bytes = b""


@dataclass(frozen=True, slots=True)
class GroupsAcknowledged:
    """The trainer holds these groups of this use; 0: of whichever it is."""

    trainer: str
    rollout_id: str
    prompt_ids: list[str]
    use: int = 0


@dataclass(frozen=True, slots=True)
class RolloutCancelled:
    """The trainer gives up a use's unfinished prompts: the named ones, or all if none is named."""

    trainer: str
    rollout_id: str
    prompt_ids: list[str]
    use: int = 0


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


# --- instructions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the next chunk of a request to an instance, with the acceptance of its drafts if known.

    Drafts of a `probe` come first.
    """

    instance: str
    request_id: str
    attempt: int
    max_new_tokens: int
    acceptance: list[int] = field(default_factory=list)
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Tell an instance to stop a chunk."""

    instance: str
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Append the tokens of the chunk that just ended to its request's output."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Take:
    """Store a prompt of the submission at hand: its group is held, or opened."""

    group_id: str
    prompt_id: str


@dataclass(frozen=True, slots=True)
class Accept:
    """Tell the trainer that these prompts are queued, under which weights."""

    life: bytes
    rollout_id: str
    prompt_ids: list[str]
    use: int = 0
    weight_version: int = -1


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the trainer that these prompts will not complete, and why."""

    life: bytes
    rollout_id: str
    prompt_ids: list[str]
    code: str
    message: str
    use: int = 0


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send a finished group to its trainer (again, if it resubmitted)."""

    life: bytes
    group_id: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Free what is stored of a group."""

    group_id: str


@dataclass(frozen=True, slots=True)
class PublishOpened:
    """Publish that a group was accepted."""

    group_id: str
    size: int
    prompt_len: int
    cap: int


@dataclass(frozen=True, slots=True)
class PublishProgress:
    """Publish how far a request is, and what became of its drafts."""

    group_id: str
    index: int
    generated: int
    finished: bool
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PublishClosed:
    """Publish that a group needs no estimate any more."""

    group_id: str


Instruction = (
    Dispatch
    | Drop
    | Keep
    | Take
    | Accept
    | Refuse
    | Deliver
    | Forget
    | PublishOpened
    | PublishProgress
    | PublishClosed
)
