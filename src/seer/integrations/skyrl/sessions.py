"""Which response of which group each of SkyRL's trajectories is: pure.

SkyRL samples each prompt n times. A sample is a trajectory, whose session id is `UID_REPETITION`, with the
prompt's uid in its dataset.

Invariants:
- trajectory r of a prompt is response r of the group of this step, call and prompt, so siblings share a
  group, and no two trajectories of a step have the same noise;
- names are functions of the phase, the call's number in its step and the uid: not of time. Calls of a step
  are counted for ever: a step may come again.
"""

from __future__ import annotations

from collections import Counter

from seer.integrations.submissions import Place


class Sessions:
    """The trajectories of one call of `generate` at a time. `step` is its rollout number."""

    def __init__(self) -> None:
        self.step = -1
        self._calls: Counter[tuple[str, int]] = Counter()
        self._call = ""

    def begin(self, step: int, phase: str) -> None:
        """Begin a call; `phase` is `train` or `eval`."""
        self.step = step
        self._call = f"{phase}-{self._calls[phase, step]}"
        self._calls[phase, step] += 1

    def place(self, session: str) -> Place:
        """Return the place of a trajectory."""
        uid, _, repetition = session.rpartition("_")
        if not uid or not repetition.isdecimal():
            uid, repetition = session, "0"
        return Place(f"skyrl-{self._call}-{uid}", int(repetition))
