"""How far an engine sleeps: which of its memory is freed, in vLLM's words (levels and tags).

Invariants (tests/unit/test_sleep_states.py):
- states are ordered: each frees what the one before frees, and more;
- the weights wake first: KV is of no use without them.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import Literal

from seer.common.errors import InvalidField

SleepLevel = Literal[1, 2]
"""1: KV is freed, and weights on a GPU move to host memory. 2: weights are dropped, their values are lost."""

SleepTag = Literal["weights", "kv_cache"]
"""Names of memory that can be woken by itself."""


class SleepState(IntEnum):
    """What sleeps: nothing, the KV cache, or the KV cache and the weights."""

    AWAKE = 0
    KV_ASLEEP = 1
    ASLEEP = 2

    @property
    def tags(self) -> list[SleepTag]:
        """The names of what sleeps."""
        known: list[SleepTag] = ["kv_cache", "weights"]
        return known[: self.value]

    def woken(self, tags: Collection[SleepTag]) -> SleepState:
        """Return the state after waking `tags`; empty: all. Raises `InvalidField` for KV before weights."""
        if not tags or {"weights", "kv_cache"} <= set(tags):
            return SleepState.AWAKE
        if "weights" in tags:
            return min(self, SleepState.KV_ASLEEP)
        if self is SleepState.ASLEEP:
            raise InvalidField("tags", list(tags), "the weights sleep: wake them first, or all at once")
        return SleepState.AWAKE


def state_of(*, asleep: bool, tags: Collection[SleepTag] = ()) -> SleepState:
    """Return the state of an engine that says whether it sleeps, and which memory; empty: all of it."""
    if not asleep:
        return SleepState.AWAKE
    return SleepState.ASLEEP if not tags or "weights" in tags else SleepState.KV_ASLEEP
