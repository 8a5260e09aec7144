"""Between the nodes of one engine whose ranks are on several machines: each node talks to the leader.

The leader has the engine itself. Another node tells the settings that it would start its ranks with, starts
the ranks when the leader says so, and reads new weights for its ranks. Both send `Ping` every second; either
ends when the other is silent.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from seer.common.slices import MAX_SLICES, Slice
from seer.common.wire.base import Folder, Goodbye, Hello, Message, Refused, ShortStr, Welcome
from seer.common.wire.engines import Ping
from seer.common.wire.weights import CallId, DiscardWeights, OpenSpool, ReadSpool, SpoolData, SpoolState

Setting = Annotated[str, msgspec.Meta(max_length=4096)]
"""A setting's value as text, and stamps of files."""


class JoinNode(Message, tag=True):
    """Repeated until `StartRanks`: what this node would start its ranks with; it must be the leader's own."""

    node_rank: Annotated[int, msgspec.Meta(ge=1)]
    settings: Annotated[dict[ShortStr, Setting], msgspec.Meta(max_length=256)]


class StartRanks(Message, tag=True):
    """All nodes have joined: their ranks meet at this address of the leader."""

    host: ShortStr
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class CheckWeights(Message, tag=True):
    """Read weights that must have this digest; answered by `WeightsChecked`.

    A stream is read from the leader. Without a `source` they are the model that the node was started with.
    `read` false: only tell the present stamps of what was read last. With `slices`, the source is a stream of
    these alone, of a file of `whole` bytes (`common/slices.py`); the `digest` is that of their bytes.
    """

    call_id: CallId
    source: Folder
    digest: ShortStr = ""
    read: bool = True
    slices: Annotated[list[Slice], msgspec.Meta(max_length=MAX_SLICES)] = []
    whole: Annotated[int, msgspec.Meta(ge=0)] = 0


class WeightsChecked(Message, tag=True):
    """Where a node has the weights, and the state of their files; or the `problem` with them."""

    call_id: CallId
    folder: Folder = ""
    stamps: ShortStr = ""
    problem: Setting = ""


NodeToLeader = Hello | JoinNode | WeightsChecked | OpenSpool | ReadSpool | Ping | Goodbye
LeaderToNode = (
    Welcome | Refused | StartRanks | CheckWeights | DiscardWeights | SpoolState | SpoolData | Ping | Goodbye
)
