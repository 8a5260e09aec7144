"""The state of rollouts, groups and requests in the request machine: counts, never tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from seer.common import ids
from seer.common.group_events import GroupOpened, RequestProgress
from seer.common.policy.request import RequestView
from seer.common.types import TurnSpec
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
    empty: unknown. `shared_id`, `first_index`, `turn` and `image` are as in `GroupSpec`; as long as media are
    `missing`, it is held.
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
    turn: TurnSpec | None = None
    image: int = 0
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unfinished = self.size

    @property
    def opened(self) -> GroupOpened:
        """What the context service is told when it is opened; of a turn, what holds for its trajectory."""
        turn = self.turn or TurnSpec(self.prompt_len, 0, self.max_tokens)
        return GroupOpened(
            self.group_id, self.size, turn.prompt_len, turn.cap, self.shared_id, self.first_index
        )

    def view(self, number: int, index: int) -> RequestView:
        """Return its request `index` as policies see it, when it is new; `number` counts groups."""
        request_id = ids.request_id(self.group_id, index)
        place = self.first_index + index
        view = RequestView(request_id, number, place, self.prompt_len, self.max_tokens, image=self.image)
        if self.turn is not None:
            view.earlier, view.cap = self.turn.generated, self.turn.cap
        return view

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
    deaths: frozenset[int] = frozenset()  # not a set of its own: nearly all are empty
    alone: bool = False
    finish: str = ""
    stop_reason: str = ""
    parked_since: float | None = None

    def progress(self, drafted: Sequence[int] = (), accepted: Sequence[int] = ()) -> RequestProgress:
        """Return how far it is: more may come after a turn. Drafts are those of its last chunk, by cell."""
        group, view = self.group, self.view
        over = bool(self.finish) and group.turn is None
        index = view.index - group.first_index
        return RequestProgress(group.group_id, index, view.produced, over, drafted, accepted)
