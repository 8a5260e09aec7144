"""What happens to all of the buffer's machines: engines join and leave, time passes, the end comes.

Every event and instruction is a Struct that is encoded as a tagged array: the log writes them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from seer.common.types import Capacity


class Row(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all events and instructions: a row of the log. A new field goes last, and has a default."""


class Weights(Row, frozen=True):
    """`source`: a folder that every node sees, or a stream; empty: where the engine's configuration points.

    A negative `version` is an instance whose last load failed.
    """

    version: int
    digest: str
    source: str = ""


class Joined(Row, frozen=True):
    """An engine registered, for the first time, again, or in a new `life`: a number of its own each."""

    instance: str
    capacity: Capacity = Capacity(kv_blocks=0, block_size=1, max_num_seqs=0, max_model_len=0)
    life: int = 0
    weights: Weights = Weights(0, "")
    asleep: bool = False


class Left(Row, frozen=True):
    """Engines are gone: they said goodbye, fell silent, or `died` (their connections are gone)."""

    instances: Sequence[str]
    died: bool = False


class Drained(Row, frozen=True):
    """Nothing new is taken from now on; what was accepted is finished."""


class Tick(Row, frozen=True):
    """Time passed, or another machine's state changed; deadlines are looked at."""
