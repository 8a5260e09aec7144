"""What became of one run, and of many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.conversations import every
from chaos.conversations import missing as missing_types

_SHOWN = 20
"""Reasons listed in a summary."""


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
    stuck: int = 0
    """Trainers that nothing moved on, though nothing disturbed the system."""
    recovery: list[float] = field(default_factory=list)
    seconds: float = 0.0
    excuses: Counter[str] = field(default_factory=Counter, repr=False)
    """Why prompts ended without a group, or were asked for again, legitimately."""
    ways: Counter[Any] = field(default_factory=Counter, repr=False)
    """What became of messages: counts by fate, endpoint, direction and tag."""

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
        **{
            what: sum(getattr(each, what) for each in outcomes)
            for what in ("lost", "doubled", "changed", "stuck")
        },
        "recovery_seconds": {f"p{share}": _percentile(recovery, share) for share in (50, 99, 100)},
        **_coverage(outcomes),
        "failing_seeds": [each.seed for each in outcomes if each.problems],
    }


def _percentile(values: Sequence[float], share: int) -> float | None:
    return round(values[(len(values) - 1) * share // 100], 3) if values else None


def _coverage(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return how many messages took which fate, and the types that none did; nothing without counts."""
    ways = Counter[Any]()
    for each in outcomes:
        ways.update(each.ways)
    if not ways:
        return {}
    fates = Counter[str]()
    for (fate, _), count in ways.items():
        fates[fate] += count
    total, missing = len(every()), missing_types(ways)
    return {
        "messages": dict(fates),
        "message_types": {
            "all": total,
            **{what: total - len(names) for what, names in missing.items()},
            "never": {what: names for what, names in missing.items() if names},
        },
        "legitimate_endings": dict(
            sum((each.excuses for each in outcomes), Counter[str]()).most_common(_SHOWN)
        ),
    }
