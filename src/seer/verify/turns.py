"""What cells with turns run: trajectories with a tool whose answers follow from what was generated.

Invariants (tests/unit/test_verify_turns.py asserts them):
- what the tool says is a function of what was generated, in tokens of the prompt;
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
from seer.client.groups import Response
from seer.client.open_rollout import OpenRollout
from seer.common.errors import SeerError
from seer.common.types import SamplingParams, TurnSpec
from seer.common.wire import Tokens

if TYPE_CHECKING:
    from seer.verify.cell_run import Job

TURNS = 4
"""Turns of each trajectory."""

LEAST_ADDED, MOST_ADDED = 5, 20
"""Tokens that the tool adds between two turns."""


def of_a_turn(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters of a turn: it may generate its share of a response's tokens."""
    return replace(sampling, max_tokens=max(1, sampling.max_tokens // TURNS))


def most_tokens(sampling: SamplingParams) -> int:
    """Return how many tokens a trajectory may have after its prompt."""
    return TURNS * of_a_turn(sampling).max_tokens + (TURNS - 1) * MOST_ADDED


def tool(prompt: Tokens, generated: Tokens) -> Tokens:
    """Return what the tool says to a turn: tokens of the prompt, int32 [length]."""
    mark = int(generated.astype(np.int64) @ np.arange(1, len(generated) + 1))
    length = LEAST_ADDED + mark % (MOST_ADDED - LEAST_ADDED + 1)
    said: Tokens = prompt[(mark + np.arange(length)) % len(prompt)]
    return said


async def run(client: RolloutClient, prompts: Sequence[Prompt], job: Job, resent: bool) -> list[Group]:
    """Return all trajectories, each as a response. `resent`: as requests that know nothing of turns.

    Raises `SeerError` if one fails, or not all have ended in time.
    """
    rollout = client.open_rollout()

    async def group(prompt: Prompt) -> Group:
        begin = np.asarray(prompt.token_ids, np.int32)
        responses = await asyncio.gather(
            *(_trajectory(rollout, prompt.id, begin, index, job, resent) for index in range(job.n))
        )
        return Group(prompt.id, begin, {}, 0, "", tuple(responses), chunks=0, migrations=0, preemptions=0)

    try:
        async with asyncio.timeout(job.cell_seconds):
            return await asyncio.gather(*(group(prompt) for prompt in prompts))
    except TimeoutError as error:
        raise SeerError(f"not all trajectories ended within {job.cell_seconds:g} s") from error


async def _trajectory(
    rollout: OpenRollout, name: str, begin: Tokens, index: int, job: Job, resent: bool
) -> Response:
    sampling = of_a_turn(job.sampling)
    cap = most_tokens(job.sampling)
    context, logprobs, generated = begin, np.zeros(0, np.float32), 0
    for number in range(TURNS):
        asked = rollout.submit(
            Prompt(f"{name}#{index}.{number}", token_ids=context), sampling=sampling, seed=job.seed,
            group=name, first_index=index, turn=None if resent else TurnSpec(len(begin), generated, cap),
        )  # fmt: skip
        turn = (await asked.result()).responses[0]
        generated += len(turn.token_ids)
        said = tool(begin, turn.token_ids) if number < TURNS - 1 else begin[:0]
        context = np.concatenate([context, turn.token_ids, said])
        logprobs = np.concatenate([logprobs, turn.logprobs, np.zeros(len(said), np.float32)])
    if not resent:
        rollout.end_trajectory(f"{name}#{index}.{TURNS - 1}")
    tokens = context[len(begin) :]
    return Response(index, tokens, logprobs, None, turn.finish_reason, turn.stop_reason)
