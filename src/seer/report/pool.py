"""What the KV pool achieved, as text: for `seer status` and the end of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from seer.common.pool_metrics import PoolFigures
from seer.common.types import InstanceStats

GIB = 2**30

NOBODY = "NOBODY: saves are dropped until an owner holds memory again, which it does by itself"


class PoolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over instances, as `InstanceStats` has them; `away`: instances that leave the pool alone."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0
    saved_blocks: int = 0
    dropped_blocks: int = 0
    failures: int = 0
    corrupt: int = 0
    away: int = 0

    @property
    def used(self) -> bool:
        """Whether a pool was used."""
        return bool(self.pool_tokens or self.saved_blocks or self.dropped_blocks or self.failures)


def pool_use(stats: Sequence[InstanceStats]) -> PoolUse:
    """Sum the statistics of instances."""
    return PoolUse(
        prompt_tokens=sum(each.prompt_tokens for each in stats),
        cached_tokens=sum(each.cached_tokens for each in stats),
        pool_tokens=sum(each.pool_tokens for each in stats),
        saved_blocks=sum(each.pool_saved_blocks for each in stats),
        dropped_blocks=sum(each.pool_dropped_blocks for each in stats),
        failures=sum(each.pool_failures for each in stats),
        corrupt=sum(each.pool_corrupt for each in stats),
        away=sum(each.pool_away for each in stats),
    )


def use_text(use: PoolUse) -> str:
    """Return a text: where prompt tokens came from, and failures. A chunk's prompt is all tokens before
    it.
    """
    whole = max(use.prompt_tokens, 1)
    away = ", LEFT ALONE for now: saves are dropped" if use.away else ""
    return (
        f"{use.pool_tokens / whole:.1%} of {use.prompt_tokens} prompt tokens from the pool, "
        f"{(use.cached_tokens - use.pool_tokens) / whole:.1%} from engines' own caches; "
        f"{use.saved_blocks} blocks saved, {use.dropped_blocks} dropped, "
        f"{use.failures} failures, {use.corrupt} corrupt{away}"
    )


def figures_text(figures: PoolFigures) -> str:
    """Return a text with the metrics of the pool's master."""
    disk = (
        f", {figures.ssd_used / GIB:.2f} of {figures.ssd_total / GIB:.2f} GiB of disk"
        if figures.ssd_total
        else ""
    )
    owners = ", ".join(sorted(figures.owners)) or NOBODY
    return (
        f"{figures.keys} keys, {figures.dram_used / GIB:.2f} of {figures.dram_total / GIB:.2f} GiB of memory"
        f"{disk}, {figures.evicted_keys} evicted; owned by {owners}"
    )
