"""The state of rollouts, groups and requests in the request machine: counts, never tokens."""

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
    """One use of a rollout id.

    `life` and `submission` are those of the last submission: answers go to that address, with that number.
    `params_digest`: digest of seed, rollout number, n and sampling parameters. `weight_version`: that of the
    groups opened so far; -1: none was opened. `members`: its groups that are not removed yet, also held ones.
    `groups` and `requests` count those opened. `collected`: the trainer acknowledged some groups; `failed`:
    some groups failed. `finish_times`: seconds since `submitted`; the server takes them away. `open`: its
    groups have parameters and weights of their own, so it has neither `params_digest` nor `weight_version`,
    and a submission number of their own, from `first_submission` on in this `life`.
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
    open: bool = False
    first_submission: int = 0


@dataclass(slots=True)
class GroupState:
    """All requests of one prompt.

    `held_since`: set while the group waits to be opened, for weights of version `awaits` (-1: any) or an
    engine. `submission`: the last one that has it. `kept`: output tokens of all its requests so far.
    `earlier`: what an earlier life of the buffer kept of it, until the group is opened. `results`: its
    requests in index order, once all have finished. `acceptance`: acceptance rates of its drafts, by cell;
    empty: unknown. `shared_id` and `first_index` are as in `GroupSpec`.
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
    shared_id: str = ""
    first_index: int = 0

    def __post_init__(self) -> None:
        self.unfinished = self.size

    @property
    def tokens(self) -> int:
        """Prompt tokens and output kept so far."""
        return self.prompt_len + self.kept

    @property
    def done(self) -> bool:
        """Whether every request has finished; the results then wait for acknowledgement."""
        return self.finished_at is not None


@dataclass(slots=True)
class RequestState:
    """One response while it is generated.

    `instance`: where a chunk of it runs; empty: none does. `attempt`: the number of the current placement, so
    answers to earlier ones are dropped. `losses`: chunks in a row that failed, not counting lost engines.
    `deaths`: the lives of engines that died while they ran it, since its last chunk that ended. `alone`: it
    runs on an instance of its own. `parked_since`: since when no registered engine can hold it.
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
