"""What the buffer's request machine knows of rollouts, groups and requests: counts, never tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from seer.common.policy.request import RequestView
from seer.services.buffer.requests.events import Kept


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


@dataclass(slots=True)
class RolloutState:
    """One use of a rollout id. `finish_times` are seconds since `submitted`, drained by the server.

    Answers go to `life`, the address of the trainer's process that asked last, and name its `submission`.
    `params_digest` digests seed, rollout number, n and sampling. `weight_version` is that of the
    groups opened so far; -1: none was. `members` are its groups that are not forgotten yet, held ones,
    too; `groups` and `requests` count those opened. Some of them were `collected` by the trainer, or
    `failed`.
    """

    rollout_id: str
    trainer: str
    life: bytes
    submission: int
    params_digest: int
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
    `submission` asked for it last.
    `kept` counts output tokens of all its requests; `earlier` is what a life of the buffer before this one
    kept of them, until the group is opened. `acceptance` says how often drafts were right in
    it, by cell; empty: unknown.
    """

    group_id: str
    prompt_id: str
    rollout: RolloutState
    size: int
    prompt_len: int
    max_tokens: int
    awaits: int = -1
    submission: int = 0
    held_since: float | None = None
    unfinished: int = 0
    kept: int = 0
    finished_at: float | None = None
    counters: Counter[str] = field(default_factory=Counter)
    results: list[RequestState] = field(default_factory=list)
    acceptance: list[int] = field(default_factory=list)
    earlier: Kept | None = None

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
