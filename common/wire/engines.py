"""Between engines and the buffer: chunks to run, and what came of them.

What they say about weights and sleep is in `weights.py`.
"""

from __future__ import annotations

import msgspec

from seer.common.types import Capacity, InstanceStats, SamplingParams
from seer.common.wire.base import (
    Counts,
    Folder,
    Goodbye,
    Hello,
    Logprobs,
    Message,
    Percent,
    Refused,
    ShortStr,
    Tokens,
    Welcome,
)
from seer.common.wire.weights import (
    DiscardWeights,
    LoadWeights,
    OpenSpool,
    PrepareWeights,
    ReadSpool,
    Sleep,
    Slept,
    SpoolData,
    SpoolState,
    WeightsLoaded,
    WeightsPrepared,
)


class Register(Message, tag=True):
    """An engine is loaded and ready for work, with these weights.

    `weights_source` is where an update had them from; empty: the model it was started with.
    """

    capacity: Capacity
    weight_version: int
    versions: dict[str, str] = {}
    weights_digest: ShortStr = ""
    weights_source: Folder = ""
    asleep: bool = False


class RunChunk(Message, tag=True):
    """Run one chunk of one request: generate up to `max_new_tokens` after `tokens`.

    `tokens` is the prompt (`prompt_len` ids) and all output so far; `key` is the request's noise
    key; `attempt` fences late answers. `wait_for_room`: start it only once its worst case fits free
    blocks, so that it preempts nobody. `acceptance` is how often drafts were right in this group, or
    in all if nothing is known of it; drafts of a `probe` come first.
    """

    request_id: ShortStr
    group_id: ShortStr
    attempt: int
    key: int
    prompt_len: int
    max_new_tokens: int
    sampling: SamplingParams
    tokens: Tokens
    wait_for_room: bool = False
    acceptance: Percent = []
    probe: bool = False


class DropChunk(Message, tag=True):
    """Stop a chunk; its answer is no longer wanted."""

    request_id: ShortStr
    attempt: int


class ChunkResult(msgspec.Struct, array_like=True):
    """One ended chunk in a `ChunksDone` (positional: hot). `count` new tokens in the flat arrays.

    `finish` is empty at a chunk boundary. `drafted` tokens were verified, `accepted` of them right.
    """

    request_id: str
    attempt: int
    count: int
    finish: str
    stop_reason: str
    preemptions: int
    drafted: Counts = []
    accepted: Counts = []


class ChunksDone(Message, tag=True):
    """All chunks that ended in one engine flush; `tokens`/`logprobs` are flat over `results`."""

    weight_version: int
    results: list[ChunkResult]
    tokens: Tokens
    logprobs: Logprobs


class ChunkFailed(Message, tag=True):
    """A chunk this engine cannot run, whoever asks again (`fatal`), or could not run this time."""

    request_id: ShortStr
    attempt: int
    code: ShortStr
    message: str
    fatal: bool


class EngineStatus(Message, tag=True):
    """An engine's periodic report; also its application-level sign of life."""

    stats: InstanceStats


class Ping(Message, tag=True):
    """Needs no answer: sending it reveals a peer whose connection is gone."""


EngineToBuffer = (
    Hello
    | Register
    | ChunksDone
    | ChunkFailed
    | EngineStatus
    | Goodbye
    | WeightsPrepared
    | WeightsLoaded
    | OpenSpool
    | ReadSpool
    | Slept
)
BufferToEngine = (
    Welcome
    | Refused
    | RunChunk
    | DropChunk
    | Ping
    | PrepareWeights
    | LoadWeights
    | SpoolState
    | SpoolData
    | Sleep
    | DiscardWeights
)
