"""New weights, their way to the engines, and sleep: what a trainer asks of all engines at once.

Both of the buffer's sockets carry these: a trainer asks, the buffer orders each engine.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from seer.common.wire.base import Bytes, Folder, Message, ShortStr

SPOOL_BYTES = 2**21
"""Data of one `SpoolData`, the last one of a stream apart: small enough to let other messages through."""

SPOOL_WINDOW = 8
"""Most `SpoolData` under way to one peer."""

SPOOL_STALL_SECONDS = 30.0
"""A stream that does not grow for this long, before it is whole, is given up."""

SPOOL_SCHEME = "spool:"
"""Begins a `source` of weights that is not a folder but the name of a stream in the buffer's spool."""


CallId = Annotated[int, msgspec.Meta(ge=0)]
"""Number of a call, which its answer repeats. 0: the sender gives none."""


class UpdateWeights(Message, tag=True):
    """Bring all engines to the weights in `source`: a folder that every node sees, or a stream.

    A stream's source begins with a scheme: `SPOOL_SCHEME`, or another that engines know.

    `digest` is checked unless empty. `in_flight` says what becomes of unfinished requests.
    """

    version: Annotated[int, msgspec.Meta(ge=0)]
    source: Folder
    digest: ShortStr = ""
    in_flight: Literal["finish", "abort", "error"] = "finish"
    call_id: CallId = 0


class WeightsLive(Message, tag=True):
    """The answer to `UpdateWeights`: they are live. `quarantined` instances have a reason each."""

    version: int
    digest: ShortStr
    quarantined: dict[str, str] = {}
    call_id: CallId = 0


class WeightsFailed(Message, tag=True):
    """The other answer: nothing changed. Reasons by instance; the empty name is the update itself."""

    version: int
    reasons: dict[str, str]
    call_id: CallId = 0


class PrepareWeights(Message, tag=True):
    """Check new weights beside the live ones; answered by `WeightsPrepared`."""

    version: int
    source: Folder
    call_id: CallId = 0


class DiscardWeights(Message, tag=True):
    """The update that `PrepareWeights` was about is off: stop checking, and delete what was copied."""

    version: int
    call_id: CallId


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
    call_id: CallId = 0


class WeightsLoaded(Message, tag=True):
    """The weights are live in this engine; with a `problem`, none are that can be trusted."""

    version: int
    problem: str = ""


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
    call_id: CallId = 0


class Slept(Message, tag=True):
    """The answer to `Sleep`; with a `problem` nothing was done."""

    asleep: bool
    problem: str = ""
    call_id: CallId = 0
