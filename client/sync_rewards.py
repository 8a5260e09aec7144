"""`Scores` and `DynamicSampling` without asyncio, in the loop of a `SyncRolloutClient`.

Invariants:
- every call runs in that loop and raises what the asyncio class raises;
- rewards do not block the caller, who may do other work inside the `with`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from types import TracebackType
from typing import Any, Self

from seer.client.dynamic import DynamicSampling, PromptLike
from seer.client.groups import Group
from seer.client.loop_thread import LoopThread, iterate
from seer.client.rewards import Scored, Scores
from seer.client.scorer import MAX_CONCURRENT, TIMEOUT_SECONDS, Reward, RewardMetrics
from seer.client.selection import Outcome
from seer.client.sync import SyncRollout, SyncRolloutClient
from seer.common.errors import RequestRefused


class _Scope:
    """What both share: a `with` block in which one iterates."""

    def __init__(self, thread: LoopThread, scope: Scores | DynamicSampling) -> None:
        self._thread = thread
        self._scope = scope

    def __enter__(self) -> Self:
        self._thread.call(self._scope.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._scope.__aexit__(kind, error, trace))

    @property
    def failure(self) -> RequestRefused | None:
        """One error that names every prompt that failed so far."""
        return self._scope.failure

    def __iter__(self) -> Iterator[Scored]:
        """Yield scored groups as they come; then raise `failure`, if any."""
        return iterate(self._thread, aiter(self._scope))

    def result(self) -> list[Scored]:
        """Wait for the end and return all, or raise `failure`."""
        return self._thread.call(self._scope.result())


class SyncScores(_Scope):
    """See `Scores`; use as `with SyncScores(rollout, reward) as scores`."""

    def __init__(
        self,
        rollout: SyncRollout,
        reward: Reward,
        *,
        executor: Executor | None = None,
        max_concurrent: int = MAX_CONCURRENT,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._scores = Scores(
            rollout._rollout,
            reward,
            executor=executor,
            max_concurrent=max_concurrent,
            timeout_seconds=timeout_seconds,
        )
        super().__init__(rollout._thread, self._scores)

    @property
    def scored(self) -> list[Scored]:
        """See `Scores.scored`."""
        return self._scores.scored

    @property
    def unrewarded(self) -> list[Group]:
        """See `Scores.unrewarded`."""
        return self._scores.unrewarded

    @property
    def metrics(self) -> RewardMetrics:
        """See `Scores.metrics`."""
        return self._scores.metrics

    def in_order(self) -> Iterator[Scored]:
        """Yield scored groups in input order; then raise `failure`, if any."""
        return iterate(self._thread, self._scores.in_order())


class SyncDynamicSampling(_Scope):
    """See `DynamicSampling`, whose options it takes; prompts are drawn in the client's thread."""

    def __init__(
        self,
        client: SyncRolloutClient,
        prompts: Iterable[PromptLike],
        reward: Reward,
        *,
        target: int,
        **options: Any,  # noqa: ANN401 - those of DynamicSampling, which checks them
    ) -> None:
        self._sampled = DynamicSampling(client._client, prompts, reward, target=target, **options)
        super().__init__(client._running(), self._sampled)

    @property
    def rollout_number(self) -> int | None:
        """See `DynamicSampling.rollout_number`."""
        return self._sampled.rollout_number

    @property
    def complete(self) -> bool:
        """See `DynamicSampling.complete`."""
        return self._sampled.complete

    @property
    def accepted(self) -> list[Scored]:
        """See `DynamicSampling.accepted`."""
        return self._sampled.accepted

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """See `DynamicSampling.outcomes`."""
        return self._sampled.outcomes

    @property
    def counts(self) -> Counter[Outcome]:
        """See `DynamicSampling.counts`."""
        return self._sampled.counts

    @property
    def unused(self) -> list[PromptLike]:
        """See `DynamicSampling.unused`."""
        return self._sampled.unused
