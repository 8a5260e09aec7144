"""Which response of which group each of SkyRL's trajectories is: pure.

SkyRL samples each prompt n times. A sample is a trajectory, whose session id is `UID_REPETITION`, with the
prompt's uid in its dataset.

Invariants:
- trajectory r of a prompt is response r of the group of this step, call and prompt, so siblings share a
  group, and no two trajectories of a step have the same noise;
- names are functions of the phase, the call's number in its step and the uid: not of time.
"""

from __future__ import annotations

from collections import Counter

from seer.integrations.submissions import Place


class Sessions:
    """The trajectories of one call of `generate` at a time. `step` is its rollout number."""

    def __init__(self) -> None:
        self.step = -1
        self._calls: Counter[str] = Counter()
        self._call = ""

    def begin(self, step: int, phase: str) -> None:
        """Begin a call; `phase` is `train` or `eval`."""
        if step != self.step:
            self.step = step
            self._calls.clear()
        self._call = f"{phase}-{self._calls[phase]}"
        self._calls[phase] += 1

    def place(self, session: str) -> Place:
        """Return the place of a trajectory."""
        uid, _, repetition = session.rpartition("_")
        if not uid or not repetition.isdecimal():
            uid, repetition = session, "0"
        return Place(f"skyrl-{self._call}-{uid}", int(repetition))
