"""Dynamic sampling, as DAPO does it: draw prompts until enough groups have rewards that differ.

Invariants:
- all waves (submissions) have the same rollout number, and prompt ids are unique over all of them: no noise
  key is used for two prompts, and a group is the same in whichever wave it runs;
- which groups are accepted, in which order, and which are dropped depends only on the stream of prompts, the
  weights and the seed, unless `first_finished_biased` is set (`seer.client.dynamic_selection`);
- all groups have the same weight version, or there is an error;
- every prompt drawn has one outcome; those that were not needed are in `unused`;
- after the `async with` no task is left here, and no work at the buffer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import TypeAlias

from seer.client.client import GOODBYE_SECONDS, RolloutClient
from seer.client.dynamic_selection import Outcome, Selection
from seer.client.prompts import Prompt, prepare
from seer.client.results import Group
from seer.client.reward_calls import (
    MAX_CONCURRENT,
    TIMEOUT_SECONDS,
    Reward,
    RewardError,
    Scorer,
    ScoringScope,
)
from seer.client.rewards import RewardFailed, Scored
from seer.client.rollout import Rollout, summary_of
from seer.common.errors import DeadlineExceeded, InvalidField, RequestRefused, RolloutFailed, Unreachable
from seer.common.types import SamplingParams
from seer.common.wire import Tokens

PromptLike: TypeAlias = Prompt | str | Sequence[int] | Tokens

MAX_DRAWN = 8
"""Default bound on prompts drawn, in multiples of `target`: a model that always fails must not draw for
ever."""


def mixed(scored: Scored) -> bool:
    """Return whether rewards differ: a group with equal rewards has no advantages to learn from."""
    return len(set(scored.rewards)) > 1


class DynamicSampling(ScoringScope):
    """Use as `async with DynamicSampling(client, prompts, reward, target=64) as sampled`; iterate, or
    `await sampled.result()`.

    Prompts are drawn from `prompts` as needed, at most `max_prompts` (default 8 * target), so that
    `oversample` times as many as are still missing are in progress. Accepted are the first `target` groups,
    in the order of `prompts`, for which `keep` is true. With `first_finished_biased` they are accepted as
    they finish, and the rest is cancelled: this ends sooner, but prefers short responses (docs/rewards.md
    has figures). Rewards as in `Scores`; other options as in `RolloutClient.submit`; `deadline_seconds` is
    for all waves.
    """

    def __init__(
        self,
        client: RolloutClient,
        prompts: Iterable[PromptLike],
        reward: Reward,
        *,
        target: int,
        oversample: float = 1.5,
        max_prompts: int | None = None,
        keep: Callable[[Scored], bool] = mixed,
        first_finished_biased: bool = False,
        n: int = 8,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        rollout_number: int | None = None,
        repeat: bool = False,
        deadline_seconds: float | None = None,
        executor: Executor | None = None,
        max_concurrent: int = MAX_CONCURRENT,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        if n < 2 and keep is mixed:
            raise InvalidField("n", n, "the rewards of one response cannot differ: give 2 or more")
        limit = MAX_DRAWN * target if max_prompts is None else max_prompts
        self._selection = Selection(target, oversample, limit, first_finished_biased)
        super().__init__(Scorer(reward, executor, max_concurrent, timeout_seconds))
        self._client = client
        self._source = iter(prompts)
        self._keep = keep
        self._n, self._sampling, self._seed = n, sampling, seed
        self._number, self._repeat = rollout_number, repeat
        self._deadline_seconds = deadline_seconds
        self._given: list[PromptLike] = []
        self._positions: dict[str, int] = {}
        self._scored: dict[int, Scored] = {}
        self._failures: dict[int, RequestRefused | RewardError] = {}
        self._weights: tuple[int, str] | None = None
        self._waves: list[Rollout] = []

    @property
    def rollout_number(self) -> int | None:
        """The rollout number of all noise keys; None until the first wave is submitted."""
        return self._number

    @property
    def complete(self) -> bool:
        """Whether `target` groups are accepted; False at the end: `prompts` or `max_prompts` is exhausted."""
        return self._selection.complete

    @property
    def accepted(self) -> list[Scored]:
        """The groups accepted so far: in the stream's order, or with the bias in finishing order."""
        return [self._scored[position] for position in self._selection.accepted]

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """The outcome of every prompt by id, in the stream's order; complete once iteration has ended.

        Only which prompts were not needed (`surplus` or `cancelled`), and how many, depends on the schedule.
        """
        positions = dict(self._positions)  # another thread may look, while more are drawn
        ended = self._selection.outcomes()
        outcomes = {prompt_id: ended[position] for prompt_id, position in positions.items()}
        for prompt_id, position in positions.items():
            if position in self._failures and outcomes[prompt_id] == "dropped":
                outcomes[prompt_id] = "failed"
        return outcomes

    @property
    def counts(self) -> Counter[Outcome]:
        """How many prompts had which outcome."""
        return Counter(self.outcomes.values())

    @property
    def unused(self) -> list[PromptLike]:
        """Prompts that were drawn and not needed, as they were given: use them first next time."""
        unused = ("surplus", "cancelled")
        outcomes = self._selection.outcomes()
        return [given for given, outcome in zip(self._given, outcomes, strict=True) if outcome in unused]

    @property
    def failure(self) -> RequestRefused | None:
        """One error that names every prompt that failed before the last accepted one."""
        ids = [prompt_id for prompt_id, outcome in self.outcomes.items() if outcome == "failed"]
        if not ids:
            return None
        errors = {prompt_id: self._failures[self._positions[prompt_id]] for prompt_id in ids}
        unrewarded = [error for error in errors.values() if isinstance(error, RewardError)]
        why = summary_of({prompt_id: str(error) for prompt_id, error in errors.items()})
        failure = (RewardFailed if unrewarded else RequestRefused)(f"{len(ids)} prompts: {why}", tuple(ids))
        failure.__cause__ = unrewarded[0].__cause__ if unrewarded else None
        return failure

    def __aiter__(self) -> AsyncIterator[Scored]:
        """Yield groups as they are accepted; then raise the error that ended sampling, or `failure`."""
        accepted = self._selection.accepted
        return self._as_they_come(lambda first: [self._scored[i] for i in accepted[first:]], self._task.done)

    def _raise_failure(self) -> None:
        if self._task.cancelled():
            raise RolloutFailed("the `async with` of DynamicSampling has ended", tuple(self._positions))
        self._task.result()
        failure = self.failure
        if failure is not None:
            raise failure

    async def result(self) -> list[Scored]:
        """Wait for the end and return all accepted groups, or raise as iteration does.

        After an error, groups accepted before it are in `accepted`.
        """
        return [scored async for scored in self]

    # --- waves ---------------------------------------------------------------------------

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        deadline = None if self._deadline_seconds is None else clock() + self._deadline_seconds
        try:
            async with asyncio.TaskGroup() as tasks:
                followed = []
                while not self._selection.done:
                    changed, wanted = self._changed, self._selection.wanted()
                    if wanted:
                        rollout = await self._submit(wanted, None if deadline is None else deadline - clock())
                        followed += [tasks.create_task(self._follow(rollout))] if rollout else []
                    else:
                        await changed.wait()
                for task in followed:
                    task.cancel()
        except BaseExceptionGroup as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from error.__cause__
        finally:
            await self._cancel_waves()

    async def _submit(self, wanted: int, seconds: float | None) -> Rollout | None:
        first = len(self._given)
        given = list(itertools.islice(self._source, wanted))
        self._given += given
        self._selection.draw(len(given), ended=len(given) < wanted)
        if not given:
            return None
        prompts = prepare(given, self._client.tokenizer, first).values()
        for position, prompt in enumerate(prompts, first):
            if self._positions.setdefault(prompt.id, position) != position:
                fix = "was drawn before; ids must be unique in one sampling"
                raise InvalidField(f"prompts[{position}].id", prompt.id, fix)
        if first and seconds is not None and seconds <= 0:
            why = "not submitted: the deadline passed before enough groups were accepted"
            raise DeadlineExceeded(why, tuple(prompt.id for prompt in prompts))
        rollout = await self._client.submit(
            [
                Prompt(prompt.id, token_ids=prompt.token_ids, metadata=prompt.metadata, images=prompt.images)
                for prompt in prompts
            ],
            n=self._n,
            sampling=self._sampling,
            seed=self._seed,
            rollout_number=self._number,
            repeat=self._repeat,
            deadline_seconds=seconds,
        )
        self._number = rollout.rollout_number
        self._waves.append(rollout)
        return rollout

    async def _follow(self, rollout: Rollout) -> None:
        """Score every group of a wave. Raises the rollout's error unless single prompts were refused."""
        taken = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                groups, lost = rollout.groups, rollout.failure
                for group in groups[taken:]:
                    tasks.create_task(self._score(group))
                taken = len(groups)
                if lost is not None and type(lost) is not RequestRefused:
                    raise lost
                for prompt_id, why in rollout.failures.items():
                    self._fail(self._positions[prompt_id], RequestRefused(why, (prompt_id,)))
                if not rollout.unfinished:
                    break
                await rollout.changed()

    def _fail(self, position: int, error: RequestRefused | RewardError) -> None:
        if position not in self._failures:
            self._failures[position] = error
            self._judge(position, keep=False)

    async def _score(self, group: Group) -> None:
        weights = group.weight_version, group.weights_digest
        self._weights = self._weights or weights
        if weights != self._weights:
            why = f"the weights went from version {self._weights[0]} to {weights[0]} during one sampling"
            raise RolloutFailed(why, (group.prompt_id,))
        position = self._positions[group.prompt_id]
        try:
            scored = Scored(group, await self._scorer.rewards(group))
        except RewardError as error:
            self._fail(position, error)
            return
        keep = bool(self._keep(scored))
        if keep:
            self._scored[position] = scored
        self._judge(position, keep)

    def _judge(self, position: int, keep: bool) -> None:
        self._selection.judge(position, keep)
        self._wake()

    async def _cancel_waves(self) -> None:
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                for rollout in self._waves:
                    if rollout.unfinished:
                        await rollout.cancel()
        except (Unreachable, TimeoutError):
            pass  # the buffer is gone, and its work with it
