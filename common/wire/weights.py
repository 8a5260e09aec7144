"""Weight updates, the transfer of weights to the engines, and sleep: what a trainer asks of all engines.

A trainer asks the buffer, and the buffer tells each engine; most messages are used on both sockets. Engines
copy streams from each other, too: an engine that has a copy of a stream, or makes one, is a holder of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from seer.common.sleep import SleepLevel, SleepTag
from seer.common.wire.base import Bytes, Folder, Hello, Message, Refused, ShortStr, Welcome

SPOOL_BYTES = 2**23
"""Most data of one `SpoolData`: each costs an event loop about a millisecond, however small it is."""

SHORT_SPOOL_BYTES = 2**21
"""Most of a short stream's, which nodes pass on meanwhile, and for peers before protocol 3.14."""

SPOOL_WINDOW = 8
"""Most `SpoolData` in flight to one peer."""

SPOOL_WINDOW_BYTES = 2**25
"""Most of their data: other messages wait behind it, 27 ms at 10 Gbit/s."""

SPOOL_STALL_SECONDS = 30.0
"""An incomplete stream that does not grow for this long is given up."""

SPOOL_STALLED = f"the trainer sent nothing for {SPOOL_STALL_SECONDS:g} s"
"""Why it was, as readers hear: in all releases."""

SPOOL_SCHEME = "spool:"
"""Prefix of a `source` of weights that is the name of a stream in the buffer's spool, not a folder."""


SPOOL_PART = ".part"
"""In the name of a stream that is a part of another one, behind that one's name."""

MAX_HOLDERS = 8
"""Most holders that an order names."""

Holders = Annotated[list[ShortStr], msgspec.Meta(max_length=MAX_HOLDERS)]
"""Endpoints of engines to copy a stream from, the first one that can give it; after them, the buffer."""

CallId = Annotated[int, msgspec.Meta(ge=0)]
"""Number of a call, which its answer repeats. 0: the sender gives none."""

Wish = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Number of a trainers' wish that engines sleep or wake, greater than those before it. 0: none."""


SleepTags = Annotated[list[SleepTag], msgspec.Meta(max_length=64)]


class UpdateWeights(Message, tag=True):
    """Have all engines load the weights in `source`: a folder that every node can read, or a stream.

    A stream's source begins with a scheme: `SPOOL_SCHEME`, or another that engines know. That of a LoRA
    adapter is `lora:`, the digest of its base or nothing, `:`, and where the adapter is; that of an update in
    place is `inplace:` and a stream with its plan. `digest` is checked
    unless empty. `in_flight` says what happens to unfinished requests.
    """

    version: Annotated[int, msgspec.Meta(ge=0)]
    source: Folder
    digest: ShortStr = ""
    in_flight: Literal["finish", "abort", "error"] = "finish"
    call_id: CallId = 0


class WeightsLive(Message, tag=True):
    """Answer to `UpdateWeights`: they are live. `quarantined` instances failed to load, with the reason."""

    version: int
    digest: ShortStr
    quarantined: dict[str, str] = {}
    call_id: CallId = 0


class WeightsLoading(Message, tag=True):
    """The weights of an update in place are loaded now, by these engines and no others."""

    version: int
    engines: list[ShortStr]
    call_id: CallId = 0


class WeightsFailed(Message, tag=True):
    """Answer to a failed `UpdateWeights`: the weights before it are live, or, after one in place over others
    in place, the last ones before these. Reasons by instance; empty name: the update.
    """

    version: int
    reasons: dict[str, str]
    call_id: CallId = 0


class PrepareWeights(Message, tag=True):
    """Fetch and check new weights while the live ones are in use; answered by `WeightsPrepared`.

    `digest`: what they must have; empty: not known yet.
    """

    version: int
    source: Folder
    call_id: CallId = 0
    digest: ShortStr = ""
    holders: Holders = []


class DiscardWeights(Message, tag=True):
    """The update of an earlier `PrepareWeights` was cancelled: stop checking, and delete what was copied."""

    version: int
    call_id: CallId


class LoadWeights(Message, tag=True):
    """Load weights; answered by `WeightsLoaded`. Nothing runs meanwhile.

    Without a `source` they are the model that the engine was started with.
    """

    version: int
    digest: ShortStr
    source: Folder
    holders: Holders = []
    call_id: CallId = 0


class WeightsPrepared(Message, tag=True):
    """The digest of the weights, or the `problem` with them."""

    version: int
    digest: ShortStr
    problem: str = ""
    call_id: CallId = 0


class WeightsLoaded(Message, tag=True):
    """The weights are live in this engine; with a `problem`, the engine has no usable weights."""

    version: int
    problem: str = ""
    call_id: CallId = 0


class OpenSpool(Message, tag=True):
    """Begin or resume a stream of weights of `size` bytes; 0: only ask. Answered by `SpoolState`.

    With a `base`, the stream is to be made from that stream and a delta to it, which is a stream of its own.
    `keep`: engines keep their copies, as deltas to it may follow. A stream whose name is that of another one,
    `SPOOL_PART` and a number is the part of that other stream from `start` on; the other one has `whole_size`
    bytes, and is complete once its parts are.
    """

    name: ShortStr
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    base: ShortStr = ""
    keep: bool = False
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    whole_size: Annotated[int, msgspec.Meta(ge=0)] = 0


class SpoolState(Message, tag=True):
    """The sender has the first `have` of a stream's `size` bytes; `resend`: send again from there.

    It keeps them as a safetensors file in `folder`, on its own machine: a reader that finds `token` there
    sees the same folder, and needs nothing sent. A `problem` ends the stream, or that holder's copy. From a
    holder, `size` 0 means that it has not begun its copy. From the buffer, `base` is the stream that it is
    made from; empty: all bytes are to be sent. `keep` is that of `OpenSpool`. `most`: bytes of a `SpoolData`
    that the sender of this takes.
    """

    name: ShortStr
    size: int
    have: int
    resend: bool = False
    folder: Folder = ""
    token: ShortStr = ""
    problem: str = ""
    base: ShortStr = ""
    keep: bool = False
    most: Annotated[int, msgspec.Meta(ge=1)] = SHORT_SPOOL_BYTES


class SpoolData(Message, tag=True):
    """Bytes of a stream from `offset` on; `checksum` is their CRC-32."""

    name: ShortStr
    offset: Annotated[int, msgspec.Meta(ge=0)]
    checksum: int
    data: Bytes


class ReadSpool(Message, tag=True):
    """Ask for `length` bytes of a stream from `offset` on; answered by `SpoolData` as soon as it can be.

    That may have fewer: at the stream's end, or from a peer that gives no more at once.
    """

    name: ShortStr
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)] = SHORT_SPOOL_BYTES


class Sleep(Message, tag=True):
    """Have all engines free their memory, or, with `asleep` false, take it again.

    `level`: see `SleepLevel`; for sleep only. `tags`: what to wake; empty: all that sleeps; for waking only.
    `wish`: to an engine, the trainers' wish that it comes to by this; 0: more orders follow. From a trainer,
    the wish that an earlier incarnation of the buffer answered, and `tags` what slept then; it gets no
    answer.
    """

    asleep: bool
    call_id: CallId = 0
    level: SleepLevel = 1
    tags: SleepTags = []
    wish: Wish = 0


class Slept(Message, tag=True):
    """Answer to `Sleep`; with a `problem` nothing was done.

    To a trainer `asleep` repeats its request. From an engine it says whether anything sleeps, and `tags`
    what; empty: all. `dropped`: the values of its weights are lost until it loads some. To a trainer, too,
    `tags` are what sleeps, and `wish` is the number of its request.
    """

    asleep: bool
    problem: str = ""
    call_id: CallId = 0
    tags: SleepTags = []
    dropped: bool = False
    wish: Wish = 0


EngineToHolder = Hello | OpenSpool | ReadSpool
HolderToEngine = Welcome | Refused | SpoolState | SpoolData
