"""Runs an agent for each of n trajectories of every prompt, and hands out groups as they finish.

Invariants (tests/unit/test_trajectories.py):
- every trajectory ends once: with what its agent returned, or as a `TrajectoryFailed`, which changes no
  other trajectory, nor the group;
- at most `max_open` agents, and so environments, are under way;
- when the rollout is left, no agent runs and the buffer knows of no trajectory.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from seer.client.open_rollout import OpenRollout
from seer.client.prompts import Prepared, check_id, check_request
from seer.client.text import Tokenizer
from seer.client.turns.trajectory import Settings, Trajectory, TrajectoryFailed, Weights
from seer.client.turns.turn_journal import Journal
from seer.common.bounds import INT64, check_whole
from seer.common.errors import InvalidField, SeerError
from seer.common.types import MAX_CONTEXT, SamplingParams, TurnSpec
from seer.common.wire import Tokens

Agent = Callable[[Trajectory], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """All trajectories of one prompt, in index order; in place of a failed trajectory its error."""

    prompt_id: str
    prompt_token_ids: Tokens
    trajectories: tuple[Trajectory | TrajectoryFailed, ...]


@dataclass(frozen=True, slots=True)
class TrajectoriesAsked:
    """What `RolloutClient.trajectories` was called with."""

    prompts: dict[str, Prepared]
    n: int
    sampling: SamplingParams
    seed: int
    rollout_number: int
    weight_version: int
    max_context: int
    idle_seconds: float
    max_open: int

    def check(self) -> None:
        """Raise `InvalidField` naming the first parameter that cannot be accepted."""
        check_request(self.n, self.sampling, self.seed, self.rollout_number, self.weight_version)
        longest = max(self.prompts.values(), key=lambda prompt: prompt.token_ids.size)
        length = longest.token_ids.size
        check_whole("max_context", self.max_context, 1, MAX_CONTEXT)
        if self.max_context <= length:
            fix = f"give more: prompt {longest.id!r} has {length} tokens"
            raise InvalidField("max_context", self.max_context, fix)
        check_whole("max_open", self.max_open, 1, INT64[1])
        TurnSpec(1, 0, 1, self.idle_seconds).check(1)
        for prompt_id in self.prompts:  # ids of turns are made of it
            check_id(f"{prompt_id}#{self.n - 1}.{self.max_context}", "prompts.id")

    def digest(self) -> str:
        """Return a digest of all that the tokens depend on: a journal is of use for the same alone."""
        digest = hashlib.blake2b(repr((self.n, self.seed, self.rollout_number)).encode(), digest_size=16)
        digest.update(msgspec.msgpack.encode((self.sampling, self.max_context)))
        for prompt in self.prompts.values():
            digest.update(f"{len(prompt.id)} {prompt.id} {prompt.token_ids.size} ".encode())
            digest.update(prompt.token_ids.tobytes())
            digest.update(msgspec.msgpack.encode(prompt.places) if prompt.images else b"")
        return digest.hexdigest()


class TrajectoryRollout:
    """See the module's docstring; `RolloutClient.trajectories` makes one. Use it as a context manager."""

    def __init__(
        self,
        asked: TrajectoriesAsked,
        rollout: OpenRollout,
        journal: Journal | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._asked = asked
        self._settings = Settings(
            asked.sampling, asked.seed, asked.rollout_number, asked.max_context, asked.idle_seconds,
            rollout.id if journal is None else journal.run,
        )  # fmt: skip
        self._weights = Weights(asked.weight_version)
        self._room = asyncio.Semaphore(asked.max_open)
        self._rollout = rollout
        self._journal = journal
        self._tokenizer = tokenizer
        self._tasks: set[asyncio.Task[TrajectoryGroup]] = set()
        self._ran = False

    @property
    def rollout_number(self) -> int:
        """The rollout number of the noise keys."""
        return self._asked.rollout_number

    @property
    def run_id(self) -> str:
        """The first part of all call ids."""
        return self._settings.run

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._rollout.leave()
        finally:
            if self._journal is not None:
                self._journal.close()

    async def run(self, agent: Agent) -> AsyncIterator[TrajectoryGroup]:
        """Run `agent(trajectory)` for every trajectory; yield groups as they finish. Once only."""
        if self._ran:
            raise InvalidField("run", self.run_id, "has run: open another rollout")
        self._ran = True
        self._tasks = {
            asyncio.create_task(self._group(prompt, agent)) for prompt in self._asked.prompts.values()
        }
        for group in asyncio.as_completed(list(self._tasks)):
            yield await group

    async def _group(self, prompt: Prepared, agent: Agent) -> TrajectoryGroup:
        found = await asyncio.gather(
            *(self._trajectory(prompt, index, agent) for index in range(self._asked.n))
        )
        return TrajectoryGroup(prompt.id, prompt.token_ids, tuple(found))

    async def _trajectory(self, prompt: Prepared, index: int, agent: Agent) -> Trajectory | TrajectoryFailed:
        async with self._room:
            trajectory = Trajectory(
                prompt, index, self._settings, self._rollout, self._weights, self._journal, self._tokenizer
            )
            try:
                trajectory.result = await agent(trajectory)
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # else what the agent awaited was cancelled
                    raise
                why = str(error) if isinstance(error, SeerError) else repr(error)
                failed = TrajectoryFailed(prompt.id, index, why)
                failed.__cause__ = error
                return failed
            finally:
                trajectory.end()
            return trajectory


def begun(
    asked: TrajectoriesAsked,
    journal: str | Path | None,
    tokenizer: Tokenizer | None,
    opened: Callable[[bool], OpenRollout],
) -> TrajectoryRollout:
    """Return what was asked for, once that is checked; `opened(again)` opens its rollout.

    `again`: who gives what environments said goes on with what was there. Raises `InvalidField`.
    """
    asked.check()
    book = None if journal is None else Journal(journal, asked.digest())
    try:
        rollout = opened(bool(book))
    except BaseException:
        if book is not None:
            book.close()
        raise
    return TrajectoryRollout(asked, rollout, book, tokenizer)
