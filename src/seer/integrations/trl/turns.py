"""Which responses of which groups a trainer's samples are, turn by turn: pure.

TRL repeats each prompt `num_generations` times, and computes advantages over so many samples in a row. In the
tool loop a sample's prompt is all its tokens so far, so that of siblings differ.

Invariants:
- the sample at position p over all processes is response p % num_generations of group p // num_generations;
  equal prompts next to each other in a group are one submission;
- a later turn of a sample is that response of the group of this step, sample group and turn; so no two
  requests of a step have the same noise;
- names are functions of the step, the call's number within it, the position and the turn: not of processes
  or time;
- a sample never has more tokens after its prompt than the trainer's limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from seer.common.types import Placed

Ids = tuple[int, ...]


class Context(NamedTuple):
    """All that a sample has so far: its tokens, and the images in them, by name."""

    tokens: Ids
    images: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """Asks for responses `first` to `first + n - 1` of `group` to one prompt.

    `whole`: the group has no others.
    """

    group: str
    first: int
    n: int
    tokens: Ids
    max_tokens: int
    whole: bool = False
    images: tuple[Placed, ...] = ()

    @property
    def prompt_id(self) -> str:
        """An id that no other submission of its call has."""
        return self.group if self.whole else f"{self.group}.{self.first}"


class Sample(list[int]):
    """The tokens of a sample so far. What is added to them belongs to the same sample.

    TRL's tool loop hands on tokens without saying whose they are, but makes them by adding to the prompt's.
    `number`: the sample's position in this process; `prompt_length`: of its first turn, in tokens.
    """

    def __init__(self, tokens: Sequence[int], number: int, prompt_length: int) -> None:
        super().__init__(tokens)
        self.number = number
        self.prompt_length = prompt_length

    def __add__(self, more: list[int]) -> Sample:  # type: ignore[override]
        return Sample([*self, *more], self.number, self.prompt_length)


def first_turns(call: str, prompts: Sequence[Context], size: int, max_tokens: int) -> list[Submission]:
    """Return the submissions of a call's prompts, `size` to a group; their responses in order are the
    samples'.
    """
    found: list[Submission] = []
    for number, start in enumerate(range(0, len(prompts), size)):
        members = prompts[start : start + size]
        first = 0
        for (tokens, images), copies in groupby(members):
            n = len(list(copies))
            whole = n == len(members)
            found.append(Submission(f"{call}-{number}", first, n, tokens, max_tokens, whole, images))
            first += n
    return found


def later_turn(
    step: int, call: str, position: int, size: int, turn: int, sample: Sample, limit: int,
    images: tuple[Placed, ...] = (),
) -> Submission:  # fmt: skip
    """Return the submission of turn `turn` >= 1 of the sample at `position` over all processes.

    `max_tokens` is what is left of the `limit` on tokens after the prompt; at 0 there is nothing to ask for.
    """
    number, index = divmod(position, size)
    group = f"/trl-{step}-{call}-{number}-{turn}"  # "/": siblings in other processes have the same group
    left = limit - (len(sample) - sample.prompt_length)
    return Submission(group, index, 1, tuple(sample), max(0, left), images=images)
