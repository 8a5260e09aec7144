"""What all messages share: their base class, the types of their fields, and the handshake.

A connecting peer sends `Hello` first, and may leave with `Goodbye`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

# Not `NDArray[...]`: numpy 2.5 makes it an alias, and the codec is told what it stands for, not the alias.
Tokens = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
"""One-dimensional token ids; the codec refuses every other dtype."""

Logprobs = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]
"""One-dimensional logprobs; the codec refuses every other dtype."""

Bytes = np.ndarray[tuple[Any, ...], np.dtype[np.uint8]]
"""One-dimensional raw bytes; the codec refuses every other dtype."""

MAX_KINDS = 8
"""Bound on the kinds of what comes beside tokens."""

MAX_ID = 512
"""Bound on ids and names. Characters."""

ShortStr = Annotated[str, msgspec.Meta(max_length=MAX_ID)]
"""Ids and names: bounded, since they are stored per request and logged."""

Names = Annotated[list[ShortStr], msgspec.Meta(max_length=2**18)]
"""Ids or names, of which senders name far fewer at once: each takes time to decode, also an empty one."""

Folder = Annotated[str, msgspec.Meta(max_length=4096)]
"""A path, as long as Linux has them."""

MAX_CELLS = 256
"""Bound on the cells by which acceptance of drafts is counted (`common/policy/draft_costs.py`)."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""What one chunk counts: sums of many fit in 64 bits."""

Counts = Annotated[list[Count], msgspec.Meta(max_length=MAX_CELLS)]
"""Drafted tokens by cell; empty: none."""

Percent = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=100)]], msgspec.Meta(max_length=MAX_CELLS)]
"""Rates by cell; empty: unknown."""

MAX_GROUP_SIZE = 4096
"""Bound on n: one prompt's responses are assembled in memory before they are sent."""


ResponseIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUP_SIZE)]
"""A response's index in its group."""

SubmissionNumber = Annotated[int, msgspec.Meta(ge=0)]
"""A number of its own for each `submit` of a trainer, which every answer repeats; 0: none, or any."""


Sizes = Annotated[dict[ShortStr, Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_KINDS)]
"""Bytes by kind of what comes beside tokens; kinds are engines' and clients' (`common/beside.py`)."""


class Message(msgspec.Struct, kw_only=True):
    """Base of all messages; subclasses are tagged by class name."""


class Hello(Message, tag=True):
    """First message of a connecting peer, repeated every few seconds.

    `config_hash` covers only what must agree everywhere (see `config.SharedConfig`); empty from
    a trainer, which need not know it. `schema_hash` digests the sender's message schema. `sent`
    counts the sender's messages so far, Hellos apart, so that a lost one is noticed.
    """

    major: int
    minor: int
    schema_hash: str
    config_hash: str
    role: ShortStr
    name: ShortStr
    incarnation: int
    sent: int = 0


class Welcome(Message, tag=True):
    """The answer to `Hello`: the peer is admitted.

    `sent` counts the sender's messages to this peer, Welcomes apart, as in `Hello`. `session` numbers this
    admission of the peer, from 1: a new number means that something was lost, once, however often it is
    repeated. `weight_version`: that of a buffer's live weights; -1: not known. `digests`: the tag of digests
    of weights that nobody named (`common/weights/digest.py`).
    """

    major: int
    minor: int
    schema_hash: str
    name: ShortStr
    incarnation: int
    sent: int
    session: int
    uptime_seconds: float = 0.0
    weight_version: int = -1
    digests: ShortStr = ""


class Refused(Message, tag=True):
    """A request that cannot be served, with the error's class code.

    `rollout_id`, `prompt_ids` and `submission` name what is refused; if the first two are empty it is the
    connection. `discarded`: tokens that had been generated for each of these prompts; empty: none.
    """

    code: ShortStr
    message: str
    rollout_id: ShortStr = ""
    prompt_ids: list[str] = []
    submission: SubmissionNumber = 0
    discarded: list[int] = []


class Goodbye(Message, tag=True):
    """The sender leaves; its unfinished work may run elsewhere. `problem`: why, if it had to."""

    problem: str = ""
