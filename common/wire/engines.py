"""Between engines and the buffer: chunks to run, and their results.

Messages about weights and sleep are in `weights.py`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from seer.common.types import MAX_IMAGES, Capacity, InstanceStats, Placed, SamplingParams
from seer.common.wire.base import (
    Bytes,
    Count,
    Counts,
    Folder,
    Goodbye,
    Hello,
    Logprobs,
    Message,
    Percent,
    Refused,
    ResponseIndex,
    ShortStr,
    Sizes,
    Tokens,
    Welcome,
)
from seer.common.wire.drafts import Digest
from seer.common.wire.images import ImageData, ImageState, ReadImage
from seer.common.wire.weights import (
    DiscardWeights,
    LoadWeights,
    OpenSpool,
    PrepareWeights,
    ReadSpool,
    Sleep,
    SleepTags,
    Slept,
    SpoolData,
    SpoolState,
    WeightsLoaded,
    WeightsPrepared,
    Wish,
)


class Register(Message, tag=True):
    """An engine is loaded and ready for work, with these weights.

    `weights_source` is the `source` of the weights' update; empty: the model that the engine was started
    with. `node` names the engine's machine. The engine sends streams of weights on to other engines at
    `weights_endpoint`; empty: it sends none. `sleeping`: what of the engine sleeps. An engine that dropped
    its weights has version -1; `dropped_version`, digest and source are those of the dropped weights. -1: it
    dropped none. `wish`: the wish of the last `Sleep` that named one; 0: none did.
    """

    capacity: Capacity
    weight_version: int
    versions: Annotated[dict[str, str], msgspec.Meta(max_length=2**12)] = {}
    weights_digest: ShortStr = ""
    weights_source: Folder = ""
    node: ShortStr = ""
    weights_endpoint: ShortStr = ""
    sleeping: SleepTags = []
    dropped_version: Annotated[int, msgspec.Meta(ge=-1)] = -1
    wish: Wish = 0


class RunChunk(Message, tag=True):
    """Run one chunk of one request: generate up to `max_new_tokens` after `tokens`.

    `tokens` is the prompt (`prompt_len` ids) and all output so far; `key` is the request's noise
    key; an answer counts only if its `attempt` is the current one. `wait_for_room`: start only once the
    chunk's worst case fits free blocks, so that nothing is preempted. `acceptance` are the acceptance rates
    of drafts of this group, if they differ from those of all groups; drafts of a `probe` come first. Drafts
    are shared in `draft_group`, where this response has `draft_index`, and which is remembered by the prompt
    with the digest `draft_prompt` (0: by none); empty: in `group_id`, with the index of `request_id`, by the
    chunk's prompt.

    In a response with several turns, `tokens` also has what tools and environments added between the turns.
    The current turn's output begins at position `turn_start` of `tokens`; 0: at `prompt_len`, there is one
    turn. The parameters in `sampling` are this turn's: its limits, stop strings and penalties, but the
    repetition penalty, count what follows `turn_start`. `parks`: another turn may follow, so the KV is kept
    as that of a response that continues, even if this turn ends.

    `images` are all that stand in `tokens`, in every chunk: vLLM would read the placeholders of those left
    out as text, and say nothing. Only engines whose `Capacity.image_tokens` allow it get such chunks.

    `stream`: tokens are wanted as they are generated, as `ChunkTokens` of a `ChunksDone`. `have`: what the
    buffer has beside the response's tokens. `ahead`: only its drafts are wanted; it is counted apart.
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
    draft_group: ShortStr = ""
    draft_index: ResponseIndex = 0
    turn_start: int = 0
    parks: bool = False
    images: Annotated[list[Placed], msgspec.Meta(max_length=MAX_IMAGES)] = []
    stream: bool = False
    have: Sizes = {}
    ahead: bool = False
    draft_prompt: Digest = 0


class DropChunk(Message, tag=True):
    """Abort a chunk; its result is not needed any more."""

    request_id: ShortStr
    attempt: int


class EndChunks(Message, tag=True):
    """End chunks where they stand, with a token at least: their room is another trainer's."""

    request_ids: list[ShortStr]
    attempts: list[int]


MAX_RESULTS = 2**12
"""Bound on the chunks of a `ChunksDone`: to decode as many, with all their counts, takes 0.1 s."""


class ChunkResult(msgspec.Struct, array_like=True):
    """One ended chunk in a `ChunksDone` (positional, since sent often): `count` tokens of the flat arrays.

    `finish` is the finish reason, empty if the response goes on. Of `drafted` tokens `accepted` were, by
    cell, of all that drafted from the same tree. The chunk's first `start` tokens were streamed before.
    `beside`: what comes beside the response's tokens, after what the buffer had. `verified`: how many tokens
    were drafted for this chunk alone, and how many of them accepted; empty: none were.
    """

    request_id: str
    attempt: int
    count: int
    finish: str
    stop_reason: str
    preemptions: Count
    drafted: Counts = []
    accepted: Counts = []
    start: int = 0
    beside: Sizes = {}
    verified: Annotated[list[Count], msgspec.Meta(max_length=2)] = []


class ChunkTokens(msgspec.Struct, array_like=True):
    """`count` tokens of the flat arrays of a `ChunksDone`, of a chunk that goes on: those after `start`.

    `beside`: sizes of what comes beside the tokens, as far as known.
    """

    request_id: str
    attempt: int
    count: int
    start: int
    beside: Sizes = {}


class ChunksDone(Message, tag=True):
    """All chunks that ended in the same flush of an engine, and what streamed chunks have generated since.

    `tokens`/`logprobs` are flat over `results`, then over `going_on`. A result's tokens are those that did
    not come before it. `beside` is flat likewise, and over the kinds of each; None if there is nothing.
    """

    weight_version: int
    results: Annotated[list[ChunkResult], msgspec.Meta(max_length=MAX_RESULTS)]
    tokens: Tokens
    logprobs: Logprobs
    going_on: Annotated[list[ChunkTokens], msgspec.Meta(max_length=MAX_RESULTS)] = []
    beside: Bytes | None = None


class ChunkFailed(Message, tag=True):
    """A chunk that failed. `fatal`: it would fail anywhere, and again; else another attempt may work."""

    request_id: ShortStr
    attempt: int
    code: ShortStr
    message: str
    fatal: bool


class EngineStatus(Message, tag=True):
    """An engine's periodic report; also its heartbeat."""

    stats: InstanceStats


class Ping(Message, tag=True):
    """Needs no answer: sending it reveals whether the peer is still connected."""


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
    | ReadImage
)
BufferToEngine = (
    Welcome
    | Refused
    | RunChunk
    | DropChunk
    | EndChunks
    | Ping
    | PrepareWeights
    | LoadWeights
    | SpoolState
    | SpoolData
    | Sleep
    | DiscardWeights
    | ImageState
    | ImageData
)
