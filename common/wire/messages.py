"""Every message between Seer's processes: one tagged union per socket direction.

Evolution rules (tests/unit/test_wire_evolution.py holds old and new readers to them):
- a new field goes last in its Struct and has a default; unknown fields are ignored by readers;
- never reorder the fields of an `array_like` Struct, never change a field's type or meaning,
  never reuse a removed name or tag;
- a new message type is a new tag; a reader that does not know it counts, logs and drops it;
- a new array goes into a new message type: a reader refuses frames that it cannot account for;
- `Hello` and `Refused` keep their meaning whatever the MAJOR, or peers could not refuse each other;
- anything an old peer would misread needs a new MAJOR in `version.py`.

Arrays (`Tokens`, `Logprobs` and `Bytes` fields) travel as frames of their own after the msgpack header; see
`codec.py`. Ragged data is one flat array plus a list of lengths.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from seer.common.types import Capacity, FinishReason, InstanceStats, SamplingParams

Tokens = npt.NDArray[np.int32]
"""One-dimensional token ids; the codec refuses every other dtype."""

Logprobs = npt.NDArray[np.float32]
"""One-dimensional logprobs; the codec refuses every other dtype."""

Bytes = npt.NDArray[np.uint8]
"""One-dimensional raw bytes; the codec refuses every other dtype."""

MAX_ID = 512
"""Bound on ids and names. Characters."""

ShortStr = Annotated[str, msgspec.Meta(max_length=MAX_ID)]
"""Ids and names: bounded, since they are stored per request and logged."""

Folder = Annotated[str, msgspec.Meta(max_length=4096)]
"""A path, as long as Linux has them."""

MAX_CELLS = 256
"""Bound on the cells by which drafts' acceptance is kept; `common/policy/drafting.py` says which."""

Counts = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_CELLS)]
"""Drafted tokens by cell; empty: none."""

Percent = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=100)]], msgspec.Meta(max_length=MAX_CELLS)]
"""Rates by cell; empty: unknown."""

MAX_GROUP_SIZE = 4096
"""Bound on n: one prompt's responses are assembled in memory before they are sent."""


class Message(msgspec.Struct, kw_only=True):
    """Base of all messages; subclasses are tagged by class name."""


# --- handshake, first in every direction -----------------------------------------------------


class Hello(Message, tag=True):
    """First message of a connecting peer, repeated every few seconds.

    `config_hash` covers only what must agree everywhere (see `config.SharedConfig`); empty from
    a trainer, which need not know it. `schema_hash` digests the sender's message schema. `sent`
    counts the sender's messages so far, Hellos apart: one that got lost is noticed by it (-1: not
    counted).
    """

    major: int
    minor: int
    schema_hash: str
    config_hash: str
    role: ShortStr
    name: ShortStr
    incarnation: int
    sent: int = -1


class Welcome(Message, tag=True):
    """The answer to `Hello`: the peer may go on.

    `lost`: something that the peer sent may not have arrived. `sent` counts the sender's messages to
    this peer, Welcomes apart, as in `Hello`.
    """

    major: int
    minor: int
    schema_hash: str
    name: ShortStr
    incarnation: int
    uptime_seconds: float = 0.0
    lost: bool = False
    sent: int = -1


class Refused(Message, tag=True):
    """A request that cannot be served, with the error's class code.

    `rollout_id` and `prompt_ids` say what it concerns; both empty: the connection itself.
    """

    code: ShortStr
    message: str
    rollout_id: ShortStr = ""
    prompt_ids: list[str] = []


# --- trainer <-> buffer ----------------------------------------------------------------------


class Submit(Message, tag=True):
    """A batch of prompts of one rollout. `tokens` is flat over prompts, split by `lengths`.

    A rollout may be submitted in several messages; `prompt_ids` must be unique over all of them.
    Resubmitting a known prompt id with equal content is harmless: it is answered again. It waits
    for weights of `weight_version`, and is refused when they are past; -1: whatever is live.
    """

    rollout_id: ShortStr
    rollout_number: int
    seed: int
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUP_SIZE)]
    sampling: SamplingParams
    prompt_ids: list[ShortStr]
    lengths: list[int]
    tokens: Tokens
    weight_version: int = -1


class Accepted(Message, tag=True):
    """These prompts were checked and queued."""

    rollout_id: ShortStr
    prompt_ids: list[ShortStr]


class Cancel(Message, tag=True):
    """Drop a rollout's unfinished prompts: the named ones, or all when the list is empty."""

    rollout_id: ShortStr
    prompt_ids: list[ShortStr] = []


class Acknowledge(Message, tag=True):
    """The trainer holds these groups; the buffer may forget them."""

    rollout_id: ShortStr
    prompt_ids: list[ShortStr]


class StatusRequest(Message, tag=True):
    """Ask for a `Status`."""


class GroupDone(Message, tag=True):
    """All responses of one prompt, in index order; `tokens`/`logprobs` are flat over responses.

    `stop_reasons[i]` is the stop string or the stop token id (as text) that ended response i,
    empty when it ran to max_tokens. One weight version for the whole group, by construction.
    """

    rollout_id: ShortStr
    prompt_id: ShortStr
    weight_version: int
    finish_reasons: list[FinishReason]
    stop_reasons: list[str]
    lengths: list[int]
    tokens: Tokens
    logprobs: Logprobs
    chunks: int = 0
    migrations: int = 0
    preemptions: int = 0
    weights_digest: ShortStr = ""


class Progress(Message, tag=True):
    """A rollout's counters, sent to its trainer at a bounded rate.

    `finish_times` are seconds since submission at which requests finished since the last
    `Progress`, for tail statistics.
    """

    rollout_id: ShortStr
    requests: int
    finished: int
    groups: int
    groups_finished: int
    tokens: int
    chunks: int
    migrations: int
    preemptions: int
    running: int
    finish_times: list[float] = []


SPOOL_BYTES = 2**21
"""Data of one `SpoolData`, the last one of a stream apart: small enough to let other messages through."""

SPOOL_WINDOW = 8
"""Most `SpoolData` under way to one peer."""

SPOOL_STALL_SECONDS = 30.0
"""A stream that does not grow for this long, before it is whole, is given up."""

SPOOL_SCHEME = "spool:"
"""Begins a `source` of weights that is not a folder but the name of a stream in the buffer's spool."""


class OpenSpool(Message, tag=True):
    """Begin or resume a stream of weights of `size` bytes; 0 only asks. Answered by `SpoolState`."""

    name: ShortStr
    size: Annotated[int, msgspec.Meta(ge=0)] = 0


class SpoolState(Message, tag=True):
    """The buffer has the first `have` of a stream's `size` bytes; `resend`: give what follows again.

    It keeps them as a safetensors file in `folder`, on its own machine: a reader that finds `token`
    in there needs no copy. A `problem` ends the stream.
    """

    name: ShortStr
    size: int
    have: int
    resend: bool = False
    folder: Folder = ""
    token: ShortStr = ""
    problem: str = ""


class SpoolData(Message, tag=True):
    """Bytes of a stream from `offset` on; `checksum` is their CRC-32."""

    name: ShortStr
    offset: Annotated[int, msgspec.Meta(ge=0)]
    checksum: int
    data: Bytes


class ReadSpool(Message, tag=True):
    """Ask for `SPOOL_BYTES` of a stream from `offset` on; answered by `SpoolData` once they are there."""

    name: ShortStr
    offset: Annotated[int, msgspec.Meta(ge=0)]


class Sleep(Message, tag=True):
    """Have all engines free the memory that KV takes, or, with `asleep` false, take it again."""

    asleep: bool


class Slept(Message, tag=True):
    """The answer to `Sleep`; with a `problem` nothing was done."""

    asleep: bool
    problem: str = ""


class UpdateWeights(Message, tag=True):
    """Bring all engines to the weights in `source`: a folder that every node sees, or a stream.

    A stream's source begins with a scheme: `SPOOL_SCHEME`, or another that engines know.

    `digest` is checked unless empty. `in_flight` says what becomes of unfinished requests.
    """

    version: Annotated[int, msgspec.Meta(ge=0)]
    source: Folder
    digest: ShortStr = ""
    in_flight: Literal["finish", "abort", "error"] = "finish"


class WeightsLive(Message, tag=True):
    """The answer to `UpdateWeights`: they are live. `quarantined` instances have a reason each."""

    version: int
    digest: ShortStr
    quarantined: dict[str, str] = {}


class WeightsFailed(Message, tag=True):
    """The other answer: nothing changed. Reasons by instance; the empty name is the update itself."""

    version: int
    reasons: dict[str, str]


class InstanceStatus(Message, tag=True):
    """One registered instance as the buffer sees it; `restarts`: lives it had before this one."""

    name: ShortStr
    capacity: Capacity
    stats: InstanceStats
    chunks: int
    reserved_blocks: int
    versions: dict[str, str] = {}
    restarts: int = 0


class Status(Message, tag=True):
    """A buffer's state; answer to `StatusRequest`. Counters are totals since it started.

    `quarantined` engines, which get no work, have a reason each. `asleep`: a trainer has them free memory.

    `services` are the other services' endpoints as the buffer's configuration has them; `pool` is the
    address where the KV pool's master tells its figures.
    """

    name: ShortStr
    incarnation: int
    policy: ShortStr
    instances: list[InstanceStatus]
    rollouts: int
    requests_waiting: int
    requests_running: int
    counters: dict[str, int] = {}
    uptime_seconds: float = 0.0
    services: dict[str, str] = {}
    weight_version: int = 0
    weights_digest: ShortStr = ""
    quarantined: dict[str, str] = {}
    asleep: bool = False


# --- engine <-> buffer -----------------------------------------------------------------------


class Register(Message, tag=True):
    """An engine is loaded and ready for work, with these weights.

    `weights_source` is where an update had them from; empty: the model it was started with.
    """

    capacity: Capacity
    weight_version: int
    vocab_size: int
    versions: dict[str, str] = {}
    weights_digest: ShortStr = ""
    weights_source: Folder = ""
    asleep: bool = False


class PrepareWeights(Message, tag=True):
    """Check new weights beside the live ones; answered by `WeightsPrepared`."""

    version: int
    source: Folder


class LoadWeights(Message, tag=True):
    """Load weights; answered by `WeightsLoaded`. Nothing runs meanwhile."""

    version: int
    digest: ShortStr
    source: Folder


class WeightsPrepared(Message, tag=True):
    """What the weights digest to, or the `problem` with them."""

    version: int
    digest: ShortStr
    problem: str = ""


class WeightsLoaded(Message, tag=True):
    """The weights are live in this engine; with a `problem`, none are that can be trusted."""

    version: int
    problem: str = ""


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
    cached_tokens: int
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


class Drain(Message, tag=True):
    """No more work will come: finish what runs, then say `Goodbye`."""


class Goodbye(Message, tag=True):
    """The sender leaves on purpose; what it still holds may run elsewhere."""


# --- buffer -> context (PUB), context -> buffer (PUB) ----------------------------------------


class GroupOpened(Message, tag=True):
    """A group was accepted. `cap` is max_tokens: the estimate until a response finishes."""

    group_id: ShortStr
    size: int
    prompt_len: int
    cap: int


class RequestProgress(Message, tag=True):
    """A request reached `generated` tokens at a chunk boundary, or finished there.

    `drafted` and `accepted` count what was verified since it was last heard of; not in snapshots.
    """

    group_id: ShortStr
    index: int
    generated: int
    finished: bool
    drafted: Counts = []
    accepted: Counts = []


class GroupClosed(Message, tag=True):
    """A group left the buffer: finished, failed or cancelled."""

    group_id: ShortStr


class Estimates(Message, tag=True):
    """What changed: group id -> median output tokens of its responses; `common/policy/length.py` says more.

    `acceptance` likewise says how often its drafts are right; the empty id stands for all groups.
    `spreads` are those of estimates, in natural log; 0 where none is given.
    """

    estimates: dict[str, float]
    acceptance: dict[str, Percent] = {}
    spreads: dict[str, float] = {}


class Sequenced(Message, tag=True):
    """Header of every PUB message: the publisher's life and a gapless sequence number."""

    incarnation: int
    sequence: int


class SnapshotRequest(Message, tag=True):
    """A subscriber saw a gap (or just joined) and asks for the whole state."""


class BufferSnapshot(Message, tag=True):
    """Every open group with its requests' progress, as of `sequence`."""

    incarnation: int
    sequence: int
    opened: list[GroupOpened]
    progress: list[RequestProgress]


class ContextSnapshot(Message, tag=True):
    """All estimates that differ from their cap, as of `sequence`, and all acceptance worth saying."""

    incarnation: int
    sequence: int
    estimates: dict[str, float]
    acceptance: dict[str, Percent] = {}
    spreads: dict[str, float] = {}


# --- engine <-> dgds -------------------------------------------------------------------------
#
# Token ids are packed here, 3 bytes each, little-endian, in a `Bytes` array (`services/dgds/packing.py`),
# and groups are named by the 63-bit digest of their id: a hot header of 20 bytes, whatever the id.

TOKEN_BYTES = 3
"""Bytes of one packed token id: vocabularies end below 2^24."""

Digest = Annotated[int, msgspec.Meta(ge=0)]
"""A 63-bit digest. Two ids with one digest would share drafts, never tokens of an answer."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
"""A number of tokens of one response; the bound is that of `SamplingParams.max_tokens`."""

ResponseIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUP_SIZE)]

StreamIndex = Annotated[int, msgspec.Meta(ge=0, lt=2 * MAX_GROUP_SIZE)]
"""A response of the group, or from `MAX_GROUP_SIZE` on one of an earlier group of the same prompt."""

Revision = Annotated[int, msgspec.Meta(ge=0)]
"""The number of a stream's last cut; the dgds numbers them itself."""


class GroupEntry(msgspec.Struct, array_like=True):
    """A group to keep; `prompt` is the digest of its prompt's tokens, 0 if unknown."""

    group: Digest
    prompt: Digest = 0


class RegisterGroups(Message, tag=True):
    """Keep these groups for `ttl_seconds` after they were last touched; 0: the dgds's default."""

    groups: list[GroupEntry]
    ttl_seconds: float = 0.0


class Append(msgspec.Struct, array_like=True, gc=False):
    """One request's new tokens in an `AppendBatch` (positional: hot).

    `previous` is the number of output tokens that precede them: a re-sent append is recognised
    by it, a gap is asked for again.
    """

    group: Digest
    index: ResponseIndex
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    previous: Count
    count: Count


class AppendBatch(Message, tag=True):
    """One engine flush: the new tokens of all its requests, packed one after the other."""

    appends: list[Append]
    tokens: Bytes


class Gap(msgspec.Struct, array_like=True):
    """The dgds holds only `have` tokens of this request: send again from there."""

    group: Digest
    index: ResponseIndex
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    have: Count


class AppendGaps(Message, tag=True):
    """Answer to an `AppendBatch` that left gaps; the rest of it was taken."""

    gaps: list[Gap]


class FetchGroup(msgspec.Struct, array_like=True):
    """What a draft client already holds of one group: stream index -> (revision, tokens).

    Responses in `leave_out` are not sent: the asker generates them itself.
    """

    group: Digest
    have: dict[StreamIndex, tuple[Revision, Count]]
    leave_out: list[ResponseIndex] = []


class Fetch(Message, tag=True):
    """Ask for what is new in these groups. `question` tells an answer from that to an earlier one."""

    groups: list[FetchGroup]
    question: int = 0


class Delta(msgspec.Struct, array_like=True):
    """Cut a stream to `previous` tokens, then append `count`; it is then at `revision`."""

    group: Digest
    index: StreamIndex
    revision: Revision
    previous: Count
    count: Count


class Deltas(Message, tag=True):
    """Answer to `Fetch`: what brings the asker up to date, its tokens packed one after the other.

    It covers the first `done` groups asked for, and perhaps a part of the next: ask again for the
    rest. `missing` groups are unknown.
    """

    deltas: list[Delta]
    tokens: Bytes
    missing: list[Digest] = []
    question: int = 0
    done: int = 0


class NotTaken(Message, tag=True):
    """A message to the dgds made no sense, for this reason; nothing of it was applied."""

    problem: str


# --- unions: one per socket direction --------------------------------------------------------

TrainerToBuffer = (
    Hello
    | Submit
    | Cancel
    | Acknowledge
    | StatusRequest
    | Goodbye
    | UpdateWeights
    | OpenSpool
    | SpoolData
    | Sleep
)
BufferToTrainer = (
    Welcome
    | Refused
    | Accepted
    | GroupDone
    | Progress
    | Status
    | WeightsLive
    | WeightsFailed
    | SpoolState
    | Slept
)
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
    | Drain
    | PrepareWeights
    | LoadWeights
    | SpoolState
    | SpoolData
    | Sleep
)
BufferPublished = GroupOpened | RequestProgress | GroupClosed
ContextPublished = Estimates
SnapshotAsked = Hello | SnapshotRequest
BufferSnapshotReply = Welcome | Refused | BufferSnapshot
ContextSnapshotReply = Welcome | Refused | ContextSnapshot
EngineToDgds = Hello | RegisterGroups | AppendBatch | Fetch | Goodbye
DgdsToEngine = Welcome | Refused | AppendGaps | Deltas | NotTaken
