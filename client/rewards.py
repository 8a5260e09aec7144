"""Rewards computed beside the rollout: each group is scored while others are still generated.

Invariants:
- every group ends exactly once: as a `Scored`, or in `failure`, which names it and the reason;
- a reward that fails costs no other group: iteration yields every scored group first and raises only then;
- no task is left after the `async with`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass

from seer.client.results import Group
from seer.client.reward_calls import (
    MAX_CONCURRENT,
    TIMEOUT_SECONDS,
    Reward,
    RewardError,
    RewardMetrics,
    Scorer,
    ScoringScope,
    measure,
)
from seer.client.rollout import Rollout, summary_of
from seer.common.errors import RequestRefused, RolloutFailed


class RewardFailed(RolloutFailed):
    """Groups without rewards, and prompts without groups if there are any; `prompt_ids` names both."""

    code = "reward"


@dataclass(frozen=True, slots=True)
class Scored:
    """A group and its rewards: one finite number per response, in index order."""

    group: Group
    rewards: tuple[float, ...]


class Scores(ScoringScope):
    """Use as `async with Scores(rollout, reward) as scores`: iterate, or `in_order()`, or `result()`.

    A plain `reward` runs in a thread, or in `executor` (e.g. a process pool for checkers that need CPU;
    arguments and results are pickled then); an async one runs in the event loop. `timeout_seconds` includes
    the wait for a worker of the executor: `max_concurrent` should not exceed its workers. A thread cannot be
    interrupted: one that hangs is abandoned. Leaving the `async with` abandons missing rewards, not the
    rollout.
    """

    def __init__(
        self,
        rollout: Rollout,
        reward: Reward,
        *,
        executor: Executor | None = None,
        max_concurrent: int = MAX_CONCURRENT,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._rollout = rollout
        super().__init__(Scorer(reward, executor, max_concurrent, timeout_seconds))
        self._scored: dict[str, Scored] = {}
        self._unrewarded: dict[str, RewardError] = {}
        self._rollout_end: float | None = None

    @property
    def scored(self) -> list[Scored]:
        """The groups scored so far, in the order in which their rewards came."""
        return list(self._scored.values())

    @property
    def unrewarded(self) -> list[Group]:
        """Finished groups whose reward failed so far."""
        return [group for group in self._rollout.groups if group.prompt_id in self._unrewarded]

    @property
    def metrics(self) -> RewardMetrics:
        """Times of the rewards so far."""
        return measure(self._scorer.calls, self._rollout_end)

    @property
    def failure(self) -> RequestRefused | None:
        """One error that names every prompt without rewards so far; the rollout's, if no reward failed."""
        reasons = {prompt_id: str(error) for prompt_id, error in list(self._unrewarded.items())}
        if self._task.done():
            ended = {group.prompt_id for group in self._rollout.groups} - reasons.keys()
            left = "the reward was cancelled"
            reasons |= dict.fromkeys(sorted(ended - self._scored.keys()), left)
        lost = self._rollout.failure
        if not reasons:
            return lost
        of = len(self._rollout.prompts)
        message = f"{len(reasons)} of {of} prompts have no rewards: {summary_of(reasons)}"
        named = {*reasons, *(lost.prompt_ids if lost else ())}
        error = RewardFailed(
            f"{message}; {lost}" if lost else message,
            tuple(prompt_id for prompt_id in self._rollout.prompts if prompt_id in named),
        )
        error.__cause__ = next((given.__cause__ for given in self._unrewarded.values()), lost)
        return error

    def __aiter__(self) -> AsyncIterator[Scored]:
        """Yield scored groups as they come; then raise `failure`, if any."""
        return self._as_they_come(lambda first: self.scored[first:], self._task.done)

    async def in_order(self) -> AsyncIterator[Scored]:
        """Yield scored groups in input order, each as soon as it can be; then raise `failure`, if any."""
        groups = self._rollout.in_order()
        while (group := await _next(groups)) is not None:
            prompt_id = group.prompt_id
            while not (prompt_id in self._scored or prompt_id in self._unrewarded or self._task.done()):
                await self._changed.wait()
            if prompt_id in self._scored:
                yield self._scored[prompt_id]
        await asyncio.wait([self._task])
        self._raise_failure()

    async def result(self) -> list[Scored]:
        """Wait for every reward and return all in input order, or raise `failure`.

        What was scored before a failure is still in `scored`.
        """
        return [scored async for scored in self.in_order()]

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            groups = aiter(self._rollout)
            while (group := await _next(groups)) is not None:
                tasks.create_task(self._score(group))
            self._rollout_end = asyncio.get_running_loop().time()

    async def _score(self, group: Group) -> None:
        try:
            rewards = await self._scorer.rewards(group)
            self._scored[group.prompt_id] = Scored(group, rewards)
        except RewardError as error:
            self._unrewarded[group.prompt_id] = error
        self._wake()

    def _raise_failure(self) -> None:
        if not self._task.cancelled():
            self._task.result()
        failure = self.failure
        if failure is not None:
            raise failure


async def _next(groups: AsyncIterator[Group]) -> Group | None:
    """Return the next group; None at the end: an error is in `Rollout.failure`."""
    try:
        return await anext(groups, None)
    except RequestRefused:
        return None
