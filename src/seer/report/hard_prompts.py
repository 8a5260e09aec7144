"""Which prompts are hard: those with by far the longest responses, which hold up a rollout."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, median
from typing import NamedTuple

from seer.report.records import Response, Rollout

MOST = 6
"""Hard prompts at most: each has a colour of its own."""

LONGER = 1.5
"""A hard prompt's responses have so many times the tokens of the median prompt's, on average."""


class HardPrompt(NamedTuple):
    """A prompt, its number in the rollout, its responses' mean tokens, and how many ended at max_tokens."""

    prompt_id: str
    number: int
    responses: int
    tokens: float
    cut: int


def hard_prompts(rollout: Rollout) -> list[HardPrompt]:
    """Return the hard prompts of a rollout, that with the longest responses first."""
    by_prompt: dict[int, list[Response]] = defaultdict(list)
    for response in rollout.responses:
        by_prompt[response.prompt].append(response)
    prompts = [_described(responses) for responses in by_prompt.values()]
    least = LONGER * median(each.tokens for each in prompts) if prompts else 0.0
    hard = [each for each in prompts if each.tokens >= least and each.tokens > 0]
    return sorted(hard, key=lambda each: (-each.tokens, each.number))[:MOST]


def _described(responses: list[Response]) -> HardPrompt:
    first = responses[0]
    cut = sum(each.finish == "length" for each in responses)
    name = first.prompt_id
    return HardPrompt(name, first.prompt, len(responses), fmean(each.generated for each in responses), cut)
