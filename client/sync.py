"""The client without asyncio: an event loop in a background thread runs every call (`loop_thread.py`).

Invariants:
- every call runs in that loop and raises what the asyncio client raises;
- rewards do not block the caller, who may do other work inside the `with`;
- closing the client ends the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from seer.client.client import RolloutClient
from seer.client.dynamic import DynamicSampling
from seer.client.loop_thread import Attribute, Face, LoopThread, WithBlock, in_loop, parameters_of
from seer.client.open_rollout import OpenRollout, PromptInFlight
from seer.client.rewards import Scores
from seer.client.rollout import Rollout
from seer.client.turns.sync import SyncTrajectoryRollout
from seer.common.wire import Progress

T = TypeVar("T")


class SyncRollout(Face[Rollout]):
    """See `Rollout`: iterate over groups as they finish, or `in_order()`; or take `result()`."""

    id = Attribute(Rollout, lambda it: it.id, "The rollout's id at the buffer.")
    rollout_number = Attribute(Rollout, lambda it: it.rollout_number, "The rollout number of the noise keys.")
    progress = Attribute(Rollout, lambda it: it.progress, "The latest counters.")
    groups = Attribute(Rollout, lambda it: it.groups)
    failure = Attribute(Rollout, lambda it: it.failure)
    __iter__ = in_loop(Rollout.__aiter__)
    in_order = in_loop(Rollout.in_order)
    result = in_loop(Rollout.result)
    cancel = in_loop(Rollout.cancel)

    def on_progress(self, callback: Callable[[Progress], None]) -> None:
        """Have `callback` called, in the client's thread, with every `Progress`."""
        self._of.on_progress = callback


class SyncPromptInFlight(Face[PromptInFlight]):
    """See `PromptInFlight`."""

    ended = Attribute(PromptInFlight, lambda it: it.ended)
    result = in_loop(PromptInFlight.result)
    tokens = in_loop(PromptInFlight.tokens)
    cancel = in_loop(PromptInFlight.cancel)


class SyncOpenRollout(Face[OpenRollout]):
    """See `OpenRollout`."""

    id = Attribute(OpenRollout, lambda it: it.id, "The rollout's id at the buffer.")
    rollout_number = Attribute(
        OpenRollout, lambda it: it.rollout_number, "That of prompts that name no other."
    )
    counts = Attribute(OpenRollout, lambda it: it.counts, "What became of its prompts so far.")
    submit = in_loop(OpenRollout.submit, SyncPromptInFlight)
    close = in_loop(OpenRollout.close)


class SyncRolloutClient(WithBlock[RolloutClient]):
    """See `RolloutClient`; use as `with SyncRolloutClient(endpoint) as client`, from any thread."""

    _thread: LoopThread

    @parameters_of(RolloutClient)
    def __init__(self, endpoint: str, **options: Any) -> None:  # noqa: ANN401 - those of RolloutClient
        super().__init__(RolloutClient(endpoint, **options), LoopThread())

    submit = in_loop(RolloutClient.submit, SyncRollout)
    open_rollout = in_loop(RolloutClient.open_rollout, SyncOpenRollout)
    trajectories = in_loop(RolloutClient.trajectories, SyncTrajectoryRollout)
    next_prompts = in_loop(RolloutClient.next_prompts)
    update_weights = in_loop(RolloutClient.update_weights)
    sleep = in_loop(RolloutClient.sleep)
    wake = in_loop(RolloutClient.wake)
    status = in_loop(RolloutClient.status)
    report_mismatch = in_loop(RolloutClient.report_mismatch)

    def run(self, work: Callable[[RolloutClient], Coroutine[object, object, T]]) -> T:
        """Run `work` with the asyncio client in its loop, and return its result."""
        return self._thread.call(work(self._of))

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            return super().__enter__()
        except BaseException:
            self._thread.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is unfinished and leave; idempotent."""
        if self._thread.running:
            try:
                self._thread.call(self._of.close())
            finally:
                self._thread.stop()


class SyncScores(WithBlock[Scores]):
    """See `Scores`; use as `with SyncScores(rollout, reward) as scores`."""

    @parameters_of(Scores)
    def __init__(self, rollout: SyncRollout, *reward: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(Scores(rollout._of, *reward, **options), rollout._thread)

    scored = Attribute(Scores, lambda it: it.scored)
    unrewarded = Attribute(Scores, lambda it: it.unrewarded)
    metrics = Attribute(Scores, lambda it: it.metrics)
    failure = Attribute(Scores, lambda it: it.failure)
    __iter__ = in_loop(Scores.__aiter__)
    in_order = in_loop(Scores.in_order)
    result = in_loop(Scores.result)


class SyncDynamicSampling(WithBlock[DynamicSampling]):
    """See `DynamicSampling`; prompts are drawn in the client's thread."""

    @parameters_of(DynamicSampling)
    def __init__(self, client: SyncRolloutClient, *given: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(DynamicSampling(client._of, *given, **options), client._thread)

    rollout_number = Attribute(DynamicSampling, lambda it: it.rollout_number)
    complete = Attribute(DynamicSampling, lambda it: it.complete)
    accepted = Attribute(DynamicSampling, lambda it: it.accepted)
    outcomes = Attribute(DynamicSampling, lambda it: it.outcomes)
    counts = Attribute(DynamicSampling, lambda it: it.counts)
    unused = Attribute(DynamicSampling, lambda it: it.unused)
    failure = Attribute(DynamicSampling, lambda it: it.failure)
    __iter__ = in_loop(DynamicSampling.__aiter__)
    result = in_loop(DynamicSampling.result)
