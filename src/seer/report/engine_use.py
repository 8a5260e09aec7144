"""What the KV pool and drafts achieved, as text: for `seer status` and the end of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

from seer.common.pool_metrics import PoolFigures
from seer.common.types import InstanceStats

GIB = 2**30

NOBODY = "NOBODY: saves are dropped until an owner holds memory again, which it does by itself"


def total(stats: Sequence[InstanceStats]) -> InstanceStats:
    """Sum each count over instances; `pool_away`: an instance leaves the pool alone."""
    sums = {name: sum(getattr(each, name) for each in stats) for name in InstanceStats.__struct_fields__}
    return InstanceStats(**sums | {"pool_away": any(each.pool_away for each in stats)})


def pool_used(use: InstanceStats) -> bool:
    """Return whether a pool was used."""
    return bool(use.pool_tokens or use.pool_saved_blocks or use.pool_dropped_blocks or use.pool_failures)


def pool_text(use: InstanceStats) -> str:
    """Return a text: where prompt tokens came from, and failures. A chunk's prompt is all tokens before
    it.
    """
    whole = max(use.prompt_tokens, 1)
    away = ", LEFT ALONE for now: saves are dropped" if use.pool_away else ""
    return (
        f"{use.pool_tokens / whole:.1%} of {use.prompt_tokens} prompt tokens from the pool, "
        f"{(use.cached_tokens - use.pool_tokens) / whole:.1%} from engines' own caches; "
        f"{use.pool_saved_blocks} blocks saved, {use.pool_dropped_blocks} dropped, "
        f"{use.pool_failures} failures, {use.pool_corrupt} corrupt{away}"
    )


def acceptance_length(use: InstanceStats) -> float:
    """Return tokens per request and step, the bonus token included; 0 without data."""
    return use.generated_tokens / use.verifications if use.verifications else 0.0


def draft_text(use: InstanceStats) -> str:
    """Return a text: acceptance, and the time that drafting took."""
    share = use.draft_seconds / use.step_seconds if use.step_seconds else 0.0
    return (
        f"acceptance length {acceptance_length(use):.2f}, {use.accepted_tokens} of {use.drafted_tokens} "
        f"drafted tokens accepted, drafting took {share:.1%} of the time"
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
