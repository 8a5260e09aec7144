"""What became of one run, and of many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """What became of a seed; `problems` is empty when every promise was kept.

    `recovery` has one number a fault: seconds from its end (a kill ends at once, a stopped process when
    it goes on) to the next group's arrival, restarts included.
    """

    seed: int
    problems: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    responses: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0
    recovery: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def count(self) -> None:
        """Note lost, doubled and changed responses among the problems."""
        for what in ("lost", "doubled", "changed"):
            if number := getattr(self, what):
                self.problems.append(f"{number} responses {what}")

    def recovered(self, ends: Sequence[float], arrivals: Sequence[float]) -> None:
        """Note each fault's recovery; one after which nothing was left to arrive has none."""
        for end in ends:
            later = [at for at in arrivals if at >= end]
            self.recovery += [min(later) - end] if later else []


def summary(outcomes: Sequence[Outcome], wall_seconds: float) -> dict[str, object]:
    """Return the figures of a campaign, for JSON."""
    recovery = sorted(seconds for each in outcomes for seconds in each.recovery)
    faults = Counter(kind for each in outcomes for kind in each.faults)
    return {
        "runs": len(outcomes),
        "runs_per_minute": round(60 * len(outcomes) / wall_seconds, 1),
        "wall_seconds": round(wall_seconds, 1),
        "responses": sum(each.responses for each in outcomes),
        "faults": sum(faults.values()),
        "faults_by_kind": dict(sorted(faults.items())),
        **{what: sum(getattr(each, what) for each in outcomes) for what in ("lost", "doubled", "changed")},
        "recovery_seconds": {f"p{share}": _percentile(recovery, share) for share in (50, 99, 100)},
        "failing_seeds": [each.seed for each in outcomes if each.problems],
    }


def _percentile(values: Sequence[float], share: int) -> float | None:
    return round(values[(len(values) - 1) * share // 100], 3) if values else None
