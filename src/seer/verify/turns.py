"""What cells with turns run: trajectories with a tool whose answers follow from what was generated.

Invariants (tests/unit/test_verify_turns.py asserts them):
- what the tool says is a function of what was generated, in tokens of the prompt; of a prompt with images it
  shows one again;
- a trajectory is compared as one response: what was generated and, with logprob 0, what the tool said;
- in the reference no turn is known as one: each is a request that has nothing to do with the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from seer.client import Group, Prompt, RolloutClient
from seer.client.image_uploads import Placed
from seer.client.open_rollout import OpenRollout
from seer.client.results import Response
from seer.common.errors import SeerError
from seer.common.types import SamplingParams, TurnSpec
from seer.common.wire import Tokens

if TYPE_CHECKING:
    from seer.verify.cell_run import Job

TURNS = 4
"""Turns of each trajectory."""

LEAST_BIAS = -100.0
"""A token with it is not sampled."""

LEAST_ADDED, MOST_ADDED = 5, 20
"""Tokens of text that the tool adds between two turns."""

Shown = dict[tuple[str, int], Sequence[Placed]]
"""What each response saw, in its prompt and later, by prompt and index."""


def of_a_turn(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters of a turn, which may generate its share of a response's tokens."""
    return replace(sampling, max_tokens=max(1, sampling.max_tokens // TURNS))


def most_tokens(sampling: SamplingParams, longest_image: int = 0) -> int:
    """Return how many tokens a trajectory may have after its prompt, whose images have up to so many."""
    return TURNS * of_a_turn(sampling).max_tokens + (TURNS - 1) * (MOST_ADDED + longest_image)


def tool(prompt: Tokens, images: Sequence[Placed], generated: Tokens) -> tuple[Tokens, list[Placed]]:
    """Return what the tool says to a turn: tokens of the prompt, int32 [length], and its images there."""
    mark = int(generated.astype(np.int64) @ np.arange(1, len(generated) + 1))
    length = LEAST_ADDED + mark % (MOST_ADDED - LEAST_ADDED + 1)
    spans = [np.arange(each.offset, each.offset + each.length) for each in images]
    text = np.delete(prompt, np.concatenate(spans)) if images else prompt
    said: Tokens = text[(mark + np.arange(length)) % len(text)] if len(text) else text
    if not images:
        return said, []
    which = mark % len(images)
    again = Placed(images[which].image, len(said), images[which].length)
    return np.concatenate([said, prompt[spans[which]]]), [again]


def without_placeholders(sampling: SamplingParams, prompts: Sequence[Prompt]) -> SamplingParams:
    """Return parameters with which no placeholder of these prompts' images is sampled.

    In a turn's own output a placeholder would be text; sent again in a prompt, the placeholder would lack its
    image, and the prompt would be refused.
    """
    seen = ((np.asarray(prompt.token_ids), each) for prompt in prompts for each in prompt.images)
    placeholders = {int(tokens[each.offset]) for tokens, each in seen}
    return replace(sampling, logit_bias=sampling.logit_bias | dict.fromkeys(placeholders, LEAST_BIAS))


async def run(
    client: RolloutClient, prompts: Sequence[Prompt], job: Job, resent: bool
) -> tuple[list[Group], Shown]:
    """Return all trajectories, each as a response. `resent`: as requests that know nothing of turns.

    Raises `SeerError` if one fails, or not all have ended in time.
    """
    rollout = client.open_rollout(rollout_number=0)
    shown: Shown = {}

    async def group(prompt: Prompt) -> Group:
        begin = np.asarray(prompt.token_ids, np.int32)
        told = await asyncio.gather(
            *(_trajectory(rollout, prompt, begin, index, job, resent) for index in range(job.n))
        )
        responses = [response for response, _ in told]
        shown.update({(prompt.id, response.index): images for response, images in told})
        return Group(prompt.id, begin, {}, 0, "", tuple(responses), chunks=0, migrations=0, preemptions=0)

    try:
        async with asyncio.timeout(job.cell_seconds):
            return await asyncio.gather(*(group(prompt) for prompt in prompts)), shown
    except TimeoutError as error:
        raise SeerError(f"not all trajectories ended within {job.cell_seconds:g} s") from error


async def _trajectory(
    rollout: OpenRollout, prompt: Prompt, begin: Tokens, index: int, job: Job, resent: bool
) -> tuple[Response, Sequence[Placed]]:
    sampling, name = of_a_turn(job.sampling), prompt.id
    cap, images = most_tokens(job.sampling), list(prompt.images)
    context, logprobs, generated = begin, np.zeros(0, np.float32), 0
    for number in range(TURNS):
        asked = rollout.submit(
            Prompt(f"{name}#{index}.{number}", token_ids=context, images=images), sampling=sampling,
            seed=job.seed, group=name, first_index=index,
            turn=None if resent else TurnSpec(len(begin), generated, cap),
        )  # fmt: skip
        turn = (await asked.result()).responses[0]
        generated += len(turn.token_ids)
        context = np.concatenate([context, turn.token_ids])
        said, again = tool(begin, prompt.images, turn.token_ids) if number < TURNS - 1 else (begin[:0], [])
        images += [Placed(each.image, len(context) + each.offset, each.length) for each in again]
        context = np.concatenate([context, said])
        logprobs = np.concatenate([logprobs, turn.logprobs, np.zeros(len(said), np.float32)])
    if not resent:
        rollout.end_trajectory(f"{name}#{index}.{TURNS - 1}")
    tokens = context[len(begin) :]
    return Response(index, tokens, logprobs, None, turn.finish_reason, turn.stop_reason), images
