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
    engine_silence_seconds: float = 20.0
    max_attempts: int = 8
    result_ttl_seconds: float = 3600.0
    result_tokens: int = 2**30


# --- state -----------------------------------------------------------------------------------


@dataclass(slots=True)
class RolloutState:
    """One trainer's rollout. `finish_times` are seconds since `submitted`, drained by the server."""

    rollout_id: str
    trainer: str
    submitted: float
    groups: int = 0
    groups_finished: int = 0
    groups_gone: int = 0
    requests: int = 0
    finished: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    finish_times: list[float] = field(default_factory=list)


@dataclass(slots=True)
class GroupState:
    """All requests of one prompt. `results` holds them, in index order, once all finished.

    `acceptance` says how often drafts were right in it, by cell; empty: unknown.
    """

    group_id: str
    prompt_id: str
    rollout: RolloutState
    size: int
    prompt_len: int
    max_tokens: int
    unfinished: int = 0
    finished_at: float | None = None
    counters: Counter[str] = field(default_factory=Counter)
    results: list[RequestState] = field(default_factory=list)
    acceptance: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unfinished = self.size

    @property
    def tokens(self) -> int:
        """Prompt tokens and, once finished, those of all results."""
        return self.prompt_len + sum(request.view.generated for request in self.results)

    @property
    def done(self) -> bool:
        """Whether every request finished and the results await acknowledgement."""
        return self.finished_at is not None


@dataclass(slots=True)
class RequestState:
    """One response. `instance` is set while a chunk runs; `attempt` fences late answers.

    `parked_since` is when the last engine that can hold it was missed first.
    """

    view: RequestView
    group: GroupState
    attempt: int = 0
    instance: str = ""
    blocks: int = 0
    losses: int = 0
    finish: str = ""
    stop_reason: str = ""
    parked_since: float | None = None


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """An engine registered, for the first time or in a new life."""

    instance: str
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """An engine said goodbye or its connection broke."""

    instance: str


@dataclass(frozen=True, slots=True)
class EngineReported:
    """An engine's sign of life, with the blocks that pool saves pin."""

    instance: str
    pinned_blocks: int = 0


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One prompt of a submission."""

    prompt_id: str
    prompt_len: int


@dataclass(frozen=True, slots=True)
class GroupsSubmitted:
    """A trainer submitted prompts, n responses each. Known ones are accepted again.

    New ones wait until `weight_version` is live; -1: whatever is live will do.
    """

    trainer: str
    rollout_id: str
    n: int
    max_tokens: int
    groups: list[GroupSpec]
    weight_version: int = -1


@dataclass(frozen=True, slots=True)
class GroupsAcknowledged:
    """The trainer holds these groups."""

    rollout_id: str
    prompt_ids: list[str]


@dataclass(frozen=True, slots=True)
class RolloutCancelled:
    """The trainer gives up unfinished prompts: the named ones, or all if none is named."""

    trainer: str
    rollout_id: str
    prompt_ids: list[str]


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
class RolloutsAborted:
    """Every unfinished group ends here."""

    message: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines are looked at."""


Event = (
    EngineJoined
    | EngineLeft
    | EngineReported
    | GroupsSubmitted
    | GroupsAcknowledged
    | RolloutCancelled
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
class Accept:
    """Tell the trainer that these prompts are queued."""

    trainer: str
    rollout_id: str
    prompt_ids: list[str]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the trainer that these prompts will not complete, and why."""

    trainer: str
    rollout_id: str
    prompt_ids: list[str]
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send a finished group to its trainer (again, if it resubmitted)."""

    trainer: str
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
    | Accept
    | Refuse
    | Deliver
    | Forget
    | PublishOpened
    | PublishProgress
    | PublishClosed
)
