"""The state of rollouts, groups and requests in the request machine: counts, never tokens.

All state is in the fields of these Structs, so each Struct is its own snapshot, but for the links to what the
Struct is part of (`log/snapshot.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import field

from seer.common import ids
from seer.common.policy.request import RequestView
from seer.common.types import TurnSpec
from seer.common.wire import ChunkResult, GroupOpened, RequestProgress
from seer.services.buffer.requests.events import Kept

if TYPE_CHECKING:
    ItsRollout: TypeAlias = "RolloutState"
    ItsGroup: TypeAlias = "GroupState"
else:
    ItsRollout = ItsGroup = Any  # an id or nothing, in a snapshot

COUNTED = ("chunks", "migrations", "preemptions", "tokens")


def _zeros() -> dict[str, int]:
    return dict.fromkeys(COUNTED, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and deadlines; see `config.BufferConfig`.

    `max_attempts`: a request whose chunk failed so often in a row is failed. `shares`: weights of trainers.
    """

    chunk_size: int | None
    max_requests: int = 200_000
    engine_wait_seconds: float = 600.0
    max_attempts: int = 8
    result_ttl_seconds: float = 3600.0
    result_tokens: int = 2**30
    unfinished_tokens: int = 2**31
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)


class RolloutState(msgspec.Struct, array_like=True):
    """One use of a rollout id.

    `address` and `submission` are those of the last submission: answers go there, with that number.
    `params_digest`: digest of seed, rollout number, n and sampling parameters. `weight_version`: that of the
    groups opened so far; -1: none was opened. `members`: its groups that are not removed yet, also held ones.
    `groups` and `requests` count those opened. `collected`: the trainer acknowledged some groups; `failed`:
    some groups failed. `counters`: by name, see `COUNTED`. `finish_times`: seconds since `submitted`; the
    server takes them away. `open`: its groups have parameters and weights of their own, so it has neither
    `params_digest` nor `weight_version`, and a submission number of their own, from `first_submission` on in
    this incarnation of its trainer. `share`: the trainer by whose share of the engines it runs.
    """

    rollout_id: str
    trainer: str
    address: bytes
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
    counters: dict[str, int] = field(default_factory=_zeros)
    finish_times: list[float] = field(default_factory=list)
    open: bool = False
    first_submission: int = 0
    share: str = ""


class GroupState(msgspec.Struct, array_like=True):
    """All requests of one prompt.

    `held_since`: set while the group waits to be opened, for weights of version `awaits` (-1: any) or an
    engine; `expects`: its trainer thinks that they are live. `submission`: the last one that has it. `kept`:
    output tokens of all its requests so far, `beside`: what came beside them, in 8 bytes, as a token and its
    logprob have.
    `earlier`: what an earlier incarnation of the buffer kept of it, until the group is opened. `results`: its
    requests in index order, once all have finished. `acceptance`: acceptance rates of its drafts, by cell;
    empty: unknown. `shared_id`, `first_index`, `turn`, `image_tokens` and `stream` are as in `GroupSpec`; as
    long as images are `missing`, it is held.
    """

    group_id: str
    prompt_id: str
    rollout: ItsRollout
    size: int
    prompt_len: int
    max_tokens: int
    awaits: int = -1
    submission: int = 0
    held_since: float | None = None
    unfinished: int = 0
    kept: int = 0
    finished_at: float | None = None
    counters: dict[str, int] = field(default_factory=_zeros)
    results: list[RequestState] = field(default_factory=list)
    acceptance: list[int] = field(default_factory=list)
    earlier: Kept | None = None
    shared_id: str = ""
    first_index: int = 0
    turn: TurnSpec | None = None
    image_tokens: int = 0
    missing: list[str] = field(default_factory=list)
    stream: bool = False
    beside: int = 0
    expects: bool = False

    @property
    def opened(self) -> GroupOpened:
        """What the context service is told when it is opened; of a turn, what holds for its trajectory."""
        turn = self.turn or TurnSpec(self.prompt_len, 0, self.max_tokens)
        return GroupOpened(
            group_id=self.group_id,
            size=self.size,
            prompt_len=turn.prompt_len,
            cap=turn.cap,
            shared_id=self.shared_id,
            first=self.first_index,
        )

    def view(self, number: int, index: int) -> RequestView:
        """Return its request `index` as policies see it, when it is new; `number` counts groups."""
        request_id = ids.request_id(self.group_id, index)
        place = self.first_index + index
        view = RequestView(
            request_id, number, place, self.prompt_len, self.max_tokens, image_tokens=self.image_tokens
        )
        if self.turn is not None:
            view.earlier, view.cap = self.turn.generated, self.turn.cap
        return view

    @property
    def held(self) -> int:
        """What is held of its output, in 8 bytes."""
        return self.kept + self.beside

    @property
    def tokens(self) -> int:
        """What is held of it, its prompt included, in 8 bytes."""
        return self.prompt_len + self.held

    @property
    def done(self) -> bool:
        """Whether every request has finished; the results then wait for acknowledgement."""
        return self.finished_at is not None


class RequestState(msgspec.Struct, array_like=True):
    """One response while it is generated.

    `instance`: where a chunk of it runs; empty: none does. `attempt`: the number of the current placement, so
    answers to earlier ones are dropped. `losses`: chunks in a row that failed, not counting lost engines.
    `deaths`: the incarnations of engines that died while they ran it, since its last chunk that ended.
    `alone`: it runs on an instance of its own. `parked_since`: since when no registered engine can hold it.
    `streamed`: tokens of the chunk that runs which came before its end. `cost`: what that chunk has of its
    engine; `ending`: the chunk was told to end where it stands.
    """

    view: RequestView
    group: ItsGroup
    attempt: int = 0
    instance: str = ""
    blocks: int = 0
    losses: int = 0
    deaths: frozenset[int] = frozenset()  # not a set of its own: nearly all are empty
    alone: bool = False
    finish: str = ""
    stop_reason: str = ""
    parked_since: float | None = None
    streamed: int = 0
    cost: int = 0
    ending: bool = False

    def progress(self, chunk: ChunkResult | None = None) -> RequestProgress:
        """Return how far it is, with the drafts of its `chunk` if one ended: more may come after a turn."""
        group, view = self.group, self.view
        return RequestProgress(
            group_id=group.group_id,
            index=view.index - group.first_index,
            generated=view.produced,
            finished=bool(self.finish) and group.turn is None,
            drafted=chunk.drafted if chunk else [],
            accepted=chunk.accepted if chunk else [],
        )
