"""Events of all of the buffer's machines: engines join and leave, time passes, the buffer is drained.

Every event and instruction is a Struct that is encoded as a tagged array, so the log can write it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from seer.common.sleep import SleepTag
from seer.common.types import Capacity


class Row(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of events and instructions; logs have their class names. New fields go last, with defaults."""


class Weights(Row, frozen=True):
    """The weights of an instance, or those that it is to load.

    `source`: a folder that every node can read, or a stream; empty: the model in the engine's configuration.
    A negative `version`: the instance's last load failed.
    """

    version: int
    digest: str
    source: str = ""


class Joined(Row, frozen=True):
    """An engine registered, for the first time or again. `life` is a number that no other life of it has.

    `node`: its machine. Other engines may copy streams of weights from it at `weights_endpoint`; empty: none.
    `sleeping`: what of it sleeps; empty: all, if it is `asleep`. `sleep_levels`: it knows levels and tags.
    `dropped`: it dropped `weights` to sleep, and has no others. `wish`: see `Order.wish` of `sleep`.
    """

    instance: str
    capacity: Capacity = Capacity(kv_blocks=0, block_size=1, max_num_seqs=0, max_model_len=0)
    life: int = 0
    weights: Weights = Weights(0, "")
    asleep: bool = False
    node: str = ""
    weights_endpoint: str = ""
    sleeping: tuple[SleepTag, ...] = ()
    sleep_levels: bool = False
    dropped: bool = False
    wish: int = 0


class Left(Row, frozen=True):
    """Engines are gone: they sent `Goodbye`, were silent for too long, or `died` (connection lost)."""

    instances: Sequence[str]
    died: bool = False


class Drained(Row, frozen=True):
    """From now on new submissions are refused; accepted ones are finished."""


class Tick(Row, frozen=True):
    """Time passed, or another machine's state changed; deadlines are checked."""
