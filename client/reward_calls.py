"""Runs a reward function on one group: concurrency, timeout, timing and checks of the result.

Invariants:
- at most `max_concurrent` rewards run at once, and each ends within `timeout_seconds`;
- no plain (not async) function runs in the event loop;
- a result must be one finite number per response; anything else is a `RewardError`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from seer.client.results import Group, Response
from seer.client.rollout import Arriving
from seer.common.bounds import check_seconds
from seer.common.errors import InvalidField, SeerError

Reward: TypeAlias = Callable[[Group], Iterable[float] | Coroutine[object, object, Iterable[float]]]
"""One finite number per response of the group, in index order; a plain or an async callable."""

ResponseReward: TypeAlias = Callable[[Group, Response], float | Coroutine[object, object, float]]

MAX_CONCURRENT = 8
TIMEOUT_SECONDS = 120.0
"""Long for a checker, short compared to a rollout: one that hangs must not block the training step."""


class RewardError(SeerError):
    """Why one group has no rewards."""


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """`seconds`: of all calls. `hidden_seconds`: of calls while the rollout still ran.

    `after_seconds`: wall time from the rollout's end to the last reward, which the trainer waits for.
    """

    calls: int
    seconds: float
    hidden_seconds: float
    after_seconds: float

    @property
    def overlap(self) -> float:
        """Share of the reward time that ran beside the rollout; 1 if there were no rewards."""
        return self.hidden_seconds / self.seconds if self.seconds else 1.0


def measure(calls: Sequence[tuple[float, float]], rollout_end: float | None) -> RewardMetrics:
    """Return the metrics of calls (start, end) on one clock; None for a rollout that still runs."""
    until = math.inf if rollout_end is None else rollout_end
    return RewardMetrics(
        calls=len(calls),
        seconds=sum(end - start for start, end in calls),
        hidden_seconds=sum(max(0.0, min(end, until) - start) for start, end in calls),
        after_seconds=max([0.0, *(end - until for _, end in calls)]),
    )


def per_response(reward: ResponseReward) -> Reward:
    """Return the `Reward` of a function of one response, `reward(group, response)`, plain or async."""
    return functools.partial(_each_async if _is_async(reward) else _each, reward)


class Scorer:
    """Calls a reward with its limits. Raises `InvalidField` for invalid limits.

    `calls`: (start, end) of every call in the loop's time, without the wait for a worker.
    """

    def __init__(
        self, reward: Reward, executor: Executor | None, max_concurrent: int, timeout_seconds: float
    ) -> None:
        if max_concurrent < 1:
            raise InvalidField("max_concurrent", max_concurrent, "must be 1 or more")
        self._async = _is_async(reward)
        if self._async and executor is not None:
            raise InvalidField("executor", executor, "give a plain reward; an async one runs in the loop")
        self.calls: list[tuple[float, float]] = []
        self._reward = reward
        self._timeout_seconds = check_seconds("timeout_seconds", timeout_seconds)
        self._slots = asyncio.Semaphore(max_concurrent)
        # Own threads: the loop's are shared and may be fewer than max_concurrent.
        self._own = None if executor is not None else ThreadPoolExecutor(max_concurrent, "seer-reward")
        self._executor = executor or self._own

    async def rewards(self, group: Group) -> tuple[float, ...]:
        """Return the rewards of one group. Raises `RewardError`, with what the reward raised as cause."""
        async with self._slots:
            clock = asyncio.get_running_loop().time
            start, seconds = clock(), None
            try:
                async with asyncio.timeout(self._timeout_seconds) as limit:
                    rewards, seconds = await self._call(group)
            except RewardError:
                raise
            except Exception as error:
                if limit.expired():
                    raise RewardError(f"no reward within {self._timeout_seconds:g} s") from error
                raise RewardError(f"the reward raised {error!r:.200}") from error
            finally:
                end = clock()
                self.calls.append((start if seconds is None else end - seconds, end))
        return rewards

    async def _call(self, group: Group) -> tuple[tuple[float, ...], float | None]:
        if self._async:
            return _checked(await self._reward(group), len(group.responses)), None  # type: ignore[misc]  # _is_async
        return await asyncio.get_running_loop().run_in_executor(self._executor, _timed, self._reward, group)

    def close(self) -> None:
        """Start no more calls; running threads are not waited for, as nothing can interrupt them."""
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)


class ScoringScope(Arriving):
    """What `Scores` and `DynamicSampling` share: a task, `_run`, that lives as long as their `async with`."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self._scorer = scorer

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: self._wake())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._scorer.close()

    @abstractmethod
    async def _run(self) -> None:
        """Score what comes until all is scored."""


def _is_async(call: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def _timed(reward: Reward, group: Group) -> tuple[tuple[float, ...], float]:
    """Run in a worker; return the rewards and the seconds they took."""
    start = time.perf_counter()
    try:
        rewards = _checked(reward(group), len(group.responses))
    except StopIteration as error:  # a future cannot hold it: the caller would wait until the timeout
        raise RuntimeError("StopIteration") from error
    return rewards, time.perf_counter() - start


def _checked(values: object, n: int) -> tuple[float, ...]:
    try:
        rewards = tuple(float(value) for value in values)  # type: ignore[attr-defined]  # TypeError says so
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward gave {values!r:.80}; give {n} numbers") from error
    if len(rewards) != n:
        raise RewardError(f"the reward gave {len(rewards)} numbers for {n} responses")
    for index, value in enumerate(rewards):
        if not math.isfinite(value):
            raise RewardError(f"the reward of response {index} is {value}; give a finite number")
    return rewards


def _each(reward: Callable[[Group, Response], Any], group: Group) -> list[Any]:
    return [reward(group, response) for response in group.responses]


async def _each_async(reward: Callable[[Group, Response], Any], group: Group) -> list[Any]:
    return await asyncio.gather(*(reward(group, response) for response in group.responses))
