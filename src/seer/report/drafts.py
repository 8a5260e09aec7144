"""What drafts achieved, as text: for `seer status` and the end of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from seer.common.types import InstanceStats


class DraftUse(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over instances, as `InstanceStats` counts them."""

    tokens: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per request and step, the bonus token included; 0 without data."""
        return self.tokens / self.verifications if self.verifications else 0.0


def draft_use(stats: Sequence[InstanceStats]) -> DraftUse:
    """Sum the statistics of instances."""
    return DraftUse(
        tokens=sum(each.generated_tokens for each in stats),
        verifications=sum(each.verifications for each in stats),
        drafted=sum(each.drafted_tokens for each in stats),
        accepted=sum(each.accepted_tokens for each in stats),
        draft_seconds=sum(each.draft_seconds for each in stats),
        step_seconds=sum(each.step_seconds for each in stats),
    )


def draft_text(use: DraftUse) -> str:
    """Return a text: acceptance, and the time that drafting took."""
    share = use.draft_seconds / use.step_seconds if use.step_seconds else 0.0
    return (
        f"acceptance length {use.acceptance_length:.2f}, {use.accepted} of {use.drafted} drafted tokens "
        f"accepted, drafting took {share:.1%} of the time"
    )
