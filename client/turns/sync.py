"""Trajectories without asyncio: agents are plain functions, each in a thread of its own.

Invariants (tests/unit/test_sync_trajectories.py):
- all that an agent runs, what it gives to `once` included, runs in its own thread;
- when the rollout is left, turns that are under way are cancelled, and agents that go on get
  `RolloutCancelled` from their next call. A thread cannot be stopped: those whose environment is at work are
  waited for, up to `idle_seconds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from types import TracebackType
from typing import Any, TypeVar

from seer.client.image_uploads import Placed
from seer.client.loop_thread import Attribute, Calls, Face, WithBlock, in_loop, iterate
from seer.client.turns.rollout import TrajectoryGroup, TrajectoryRollout
from seer.client.turns.trajectory import Trajectory
from seer.common.errors import RolloutCancelled
from seer.common.wire import Tokens

T = TypeVar("T")


class _Agent:
    """The calls of one agent, one at a time, until its rollout is left."""

    def __init__(self, thread: Calls, prompt_id: str) -> None:
        self._thread = thread
        self._prompt_id = prompt_id
        self._lock = threading.Lock()
        self._under_way: Future[Any] | None = None
        self._left = False

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._left:
                work.close()
                raise self._cancelled()
            self._under_way = future = self._thread.begin(work)
        return future

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self.wait(self.begin(work))

    def wait(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError as error:
            raise self._cancelled() from error

    def leave(self) -> None:
        """End what is under way, and refuse what is asked for from now on."""
        with self._lock:
            self._left = True
            if self._under_way is not None:
                self._under_way.cancel()

    def _cancelled(self) -> RolloutCancelled:
        return RolloutCancelled("its rollout was left", (self._prompt_id,))


class SyncTrajectory(Face[Trajectory]):
    """See `Trajectory`. For one agent, in its thread."""

    _thread: _Agent

    prompt_id = Attribute(Trajectory, lambda it: it.prompt_id, "The id of its prompt.")
    index = Attribute(Trajectory, lambda it: it.index, "Which of the prompt's trajectories it is.")
    metadata = Attribute(Trajectory, lambda it: it.metadata, "The prompt's.")
    prompt_token_ids = Attribute(
        Trajectory, lambda it: it.prompt_token_ids, "The prompt's tokens: int32 [length]."
    )
    turns = Attribute(Trajectory, lambda it: it.turns, "What was generated so far.")
    context = Attribute(Trajectory, lambda it: it.context)
    images = Attribute(Trajectory, lambda it: it.images)
    token_ids = Attribute(Trajectory, lambda it: it.token_ids)
    loss_mask = Attribute(Trajectory, lambda it: it.loss_mask)
    logprobs = Attribute(Trajectory, lambda it: it.logprobs)
    weight_version = Attribute(Trajectory, lambda it: it.weight_version)
    weights_digest = Attribute(Trajectory, lambda it: it.weights_digest)
    room = Attribute(Trajectory, lambda it: it.room)
    call_id = Attribute(Trajectory, lambda it: it.call_id)
    replaying = Attribute(Trajectory, lambda it: it.replaying)
    generate = in_loop(Trajectory.generate)

    def append(self, tokens: str | Sequence[int] | Tokens, images: Sequence[Placed] = ()) -> None:
        """See `Trajectory.append`."""
        self._of.append(tokens, images)

    def once(self, call: Callable[[str], T]) -> T:
        """See `Trajectory.once`; `call` runs in this thread."""
        asked: Future[str] = Future()
        said: Future[T] = Future()
        wake = threading.Event()

        async def here(call_id: str) -> T:
            asked.set_result(call_id)
            return await asyncio.wrap_future(said)

        kept = self._thread.begin(self._of.once(here))
        for either in (asked, kept):
            either.add_done_callback(lambda _: wake.set())
        wake.wait()  # at most as long as the loop takes to look into the journal
        if asked.done():
            try:
                answer = call(asked.result())
            except BaseException:
                said.cancel()
                with contextlib.suppress(CancelledError):
                    kept.result()  # what the agent does next begins where this ends
                raise
            with contextlib.suppress(InvalidStateError):  # the rollout was left
                said.set_result(answer)
        return self._thread.wait(kept)


SyncAgent = Callable[[SyncTrajectory], Any]


class SyncTrajectoryRollout(WithBlock[TrajectoryRollout]):
    """See `TrajectoryRollout`; `SyncRolloutClient.trajectories` makes one. Use it as a context manager."""

    def __init__(self, of: TrajectoryRollout, thread: Calls) -> None:
        super().__init__(of, thread)
        self._agents: set[threading.Thread] = set()

    rollout_number = Attribute(TrajectoryRollout, lambda it: it.rollout_number)
    run_id = Attribute(TrajectoryRollout, lambda it: it.run_id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        deadline = time.monotonic() + self._of._settings.idle_seconds
        for agent in list(self._agents):
            agent.join(max(0.0, deadline - time.monotonic()))

    def run(self, agent: SyncAgent) -> Iterator[TrajectoryGroup]:
        """Run `agent(trajectory)` for every trajectory, each in a thread; yield groups as they finish."""

        async def in_thread(trajectory: Trajectory) -> object:
            calls = _Agent(self._thread, trajectory.prompt_id)
            ended: Future[object] = Future()
            ended.set_running_or_notify_cancel()
            thread = threading.Thread(
                target=_run,
                args=(agent, SyncTrajectory(trajectory, calls), ended),
                name=f"agent {trajectory.prompt_id}/{trajectory.index}",
                daemon=True,
            )
            self._agents.add(thread)
            thread.start()
            try:
                result = await asyncio.wrap_future(ended)
            finally:
                calls.leave()
            self._agents.discard(thread)
            return result

        return iterate(self._thread, self._of.run(in_thread))


def _run(agent: SyncAgent, trajectory: SyncTrajectory, ended: Future[object]) -> None:
    try:
        ended.set_result(agent(trajectory))
    except BaseException as error:  # noqa: BLE001 - it is its trajectory's end
        ended.set_exception(error)
