"""How services are: what asks for it, and the figures of a `Status` beside the buffer's state itself."""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated

import msgspec

from seer.common.wire.base import Message, ShortStr

MAX_BUCKETS = 64
"""Bound on the buckets of a histogram; the buffer's have 12."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class StatusRequest(Message, tag=True):
    """Ask a buffer for its `Status`, a context service or a dgds for its `ServiceStatus`."""


class ServiceStatus(Message, tag=True):
    """How a service is that has few figures; see docs/operations.md. `messages` counts by kind."""

    figures: dict[str, float] = {}
    messages: dict[str, int] = {}


class Histogram(msgspec.Struct):
    """How often a value was at most each of the rising `bounds`, and above the one before; `total`: the sum.

    `counts` has one more entry than `bounds`, for values above all.
    """

    bounds: Annotated[list[float], msgspec.Meta(max_length=MAX_BUCKETS)]
    counts: Annotated[list[Count], msgspec.Meta(max_length=MAX_BUCKETS + 1)] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RolloutStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout: counts as in `Progress`, `seconds` since it was submitted.

    `eta_seconds`: in which time it is expected to end (`common/policy/eta.py`); None: too little is known.
    `tail_seconds`: for how long nine tenths of its responses have finished; None: they have not. `open`: an
    open rollout, whose prompts come as they come: it has neither of the two. `generated`: its tokens with
    those of chunks that run, about, by what engines report; 0: not told. `eta_least`, `eta_most`: before
    `eta_seconds` is known, a range: if lengths are a third of those estimated, or all at their caps.
    """

    rollout_id: ShortStr
    requests: int
    finished: int
    tokens: int
    groups_open: int
    seconds: float
    eta_seconds: float | None = None
    tail_seconds: float | None = None
    open: bool = False
    generated: Count = 0
    eta_least: float | None = None
    eta_most: float | None = None


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished request that has `generated` tokens, of about `expected` in the end.

    `engine`: where its chunk number `chunks` runs; empty: it waits. Of all requests of its prompt, `open`
    have not finished, and `running` of these run; 0: not told.
    """

    rollout_id: ShortStr
    prompt_id: ShortStr
    index: int
    generated: int
    expected: float
    engine: ShortStr = ""
    chunks: int = 0
    open: Count = 0
    running: Count = 0


class Unwritten(msgspec.Struct, frozen=True, kw_only=True):
    """Files of the buffer that cannot be written now: for how long, and why."""

    seconds: float
    problem: str


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """How far a trainer's logprobs of `tokens` that engines sampled are off the engines', as it told last.

    `mean` and `largest` are sizes of trainer - engine; `kl`: nats a token, from engines to trainer, estimated
    by these tokens. `weight_version`: the live one when the trainer told.
    """

    tokens: Count
    mean: float
    largest: float
    kl: float
    weight_version: int = 0


class ReportMismatch(Message, tag=True):
    """A trainer tells what it found, for `Status.mismatch`; there is no answer."""

    mismatch: Mismatch


class RolloutEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout was like whose responses have all finished: its tokens, and the longest response's.

    `tail_seconds` went from the finish of nine tenths of its responses to that of the last. `efficiency`: the
    least time that the work of this incarnation of the buffer could take, by the speeds that engines have
    shown and for how much of `seconds` each was there, as a share of `seconds`; None: unknown.
    """

    seconds: float
    tail_seconds: float
    requests: int
    tokens: int
    longest: int
    efficiency: float | None = None
    rollout_id: ShortStr = ""
