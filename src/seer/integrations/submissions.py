"""Samples that a trainer asks for one by one, as parts of groups of an open rollout.

Invariants:
- equal prompts of one group that are asked for together, with indices in a row, are one submission;
- responses come in the order of the samples; the first that fails raises its error, and what nobody waits
  for any more is cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seer.client import OpenRollout, Prompt, Response, SamplingParams
from seer.client.open_rollout import results


@dataclass(frozen=True, slots=True)
class Place:
    """A sample is response `index` of `group`."""

    group: str
    index: int


@dataclass(slots=True)
class Submission:
    """Asks for responses `first` to `first + n - 1` of `group` to one prompt."""

    group: str
    first: int
    n: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keys:
    """What the samples of a call have in common: their weights, seed and rollout number."""

    seed: int
    rollout_number: int
    weight_version: int


def submissions(places: Sequence[Place], prompts: Sequence[Sequence[int]]) -> list[Submission]:
    """Return what to submit; the responses, in order, are the samples' responses."""
    found: list[Submission] = []
    for place, prompt in zip(places, prompts, strict=True):
        tokens = tuple(prompt)
        last = found[-1] if found else None
        if last and (last.group, last.first + last.n, last.tokens) == (place.group, place.index, tokens):
            last.n += 1
        else:
            found.append(Submission(place.group, place.index, 1, tokens))
    return found


async def generate(
    rollout: OpenRollout,
    places: Sequence[Place],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    keys: Keys,
) -> list[Response]:
    """Return a response for each place, in order. No two places that are under way may be equal.

    Raises `InvalidField` and the client's errors.
    """
    groups = await results(
        rollout.submit(
            Prompt(f"{each.group}.{each.first}", token_ids=each.tokens),
            n=each.n,
            sampling=sampling,
            seed=keys.seed,
            rollout_number=keys.rollout_number,
            weight_version=keys.weight_version,
            group=each.group,
            first_index=each.first,
        )
        for each in submissions(places, prompts)
    )
    return [response for group in groups for response in group.responses]
