"""Which response of which group each request of SkyRL's trajectories is: pure.

SkyRL samples each prompt n times. A sample is a trajectory, whose session id is `UID_REPETITION`, with the
prompt's uid in its dataset; each of its turns is a request of its own.

Invariants:
- turn t of trajectory r of a prompt is response r of the group of this step, call, prompt and turn, so
  siblings share a group, and no two requests of a step have the same noise;
- equal prompts of one group that are asked for together, with indices in a row, are one submission;
- names are functions of the phase, the call's number in its step, the uid and the turn: not of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Response `index` of `group`."""

    group: str
    index: int


@dataclass(slots=True)
class Submission:
    """Asks for responses `first` to `first + n - 1` of `group` to one prompt."""

    group: str
    first: int
    n: int
    tokens: tuple[int, ...]

    @property
    def prompt_id(self) -> str:
        """An id that no other submission of a step has."""
        return f"{self.group}.{self.first}"


class Sessions:
    """The trajectories of one call of `generate` at a time. `step` is its rollout number."""

    def __init__(self) -> None:
        self.step = -1
        self._calls: Counter[str] = Counter()
        self._call = ""
        self._turns: Counter[str] = Counter()

    def begin(self, step: int, phase: str) -> None:
        """Begin a call; `phase` is `train` or `eval`."""
        if step != self.step:
            self.step = step
            self._calls.clear()
        self._call = f"{phase}-{self._calls[phase]}"
        self._calls[phase] += 1
        self._turns.clear()

    def next_turn(self, session: str) -> Place:
        """Return the place of a trajectory's next request."""
        turn = self._turns[session]
        self._turns[session] += 1
        uid, _, repetition = session.rpartition("_")
        if not uid or not repetition.isdecimal():
            uid, repetition = session, "0"
        return Place(f"skyrl-{self._call}-{uid}-{turn}", int(repetition))


def submissions(places: Sequence[Place], prompts: Sequence[Sequence[int]]) -> list[Submission]:
    """Return what to submit for prompts at these places; its responses, in order, are theirs."""
    found: list[Submission] = []
    for place, prompt in zip(places, prompts, strict=True):
        tokens = tuple(prompt)
        last = found[-1] if found else None
        if last and (last.group, last.first + last.n, last.tokens) == (place.group, place.index, tokens):
            last.n += 1
        else:
            found.append(Submission(place.group, place.index, 1, tokens))
    return found
