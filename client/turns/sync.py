"""Trajectories without asyncio: agents are plain functions, each in a thread of its own.

Invariants (tests/unit/test_sync_trajectories.py):
- all that an agent runs, what it gives to `once` included, runs in its own thread;
- when the rollout is left, turns that are under way are cancelled, and agents that go on get
  `RolloutCancelled` from their next call. A thread cannot be stopped: those whose environment is at work are
  waited for, up to `idle_seconds`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from seer.client.loop_thread import LoopThread, iterate
from seer.client.media import Placed
from seer.client.turns.rollout import TrajectoryGroup, TrajectoryRollout
from seer.client.turns.trajectory import Trajectory, Turn
from seer.common.errors import RolloutCancelled
from seer.common.types import SamplingParams
from seer.common.wire import Logprobs, Tokens

T = TypeVar("T")


class SyncTrajectory:
    """See `Trajectory`. For one agent, in its thread."""

    def __init__(self, trajectory: Trajectory, loop: asyncio.AbstractEventLoop) -> None:
        self._trajectory = trajectory
        self._loop = loop
        self._lock = threading.Lock()
        self._under_way: Future[Any] | None = None
        self._left = False

    @property
    def prompt_id(self) -> str:
        """The id of its prompt."""
        return self._trajectory.prompt_id

    @property
    def index(self) -> int:
        """Which of the prompt's trajectories it is."""
        return self._trajectory.index

    @property
    def metadata(self) -> Mapping[str, object]:
        """The prompt's."""
        return self._trajectory.metadata

    @property
    def prompt_token_ids(self) -> Tokens:
        """The prompt's tokens: int32 [length]."""
        return self._trajectory.prompt_token_ids

    @property
    def context(self) -> Tokens:
        """Prompt and all tokens after it: int32 [length]."""
        return self._trajectory.context

    @property
    def token_ids(self) -> Tokens:
        """All tokens after the prompt: int32 [length]."""
        return self._trajectory.token_ids

    @property
    def media(self) -> tuple[Placed, ...]:
        """See `Trajectory.media`."""
        return self._trajectory.media

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """True where a token was generated: bool [length]."""
        return self._trajectory.loss_mask

    @property
    def logprobs(self) -> Logprobs:
        """Logprobs of what was generated, 0 elsewhere: float32 [length]."""
        return self._trajectory.logprobs

    @property
    def turns(self) -> Sequence[Turn]:
        """What was generated so far."""
        return self._trajectory.turns

    @property
    def weight_version(self) -> int:
        """See `Trajectory.weight_version`."""
        return self._trajectory.weight_version

    @property
    def weights_digest(self) -> str:
        """See `Trajectory.weights_digest`."""
        return self._trajectory.weights_digest

    @property
    def room(self) -> int:
        """How many tokens `max_context` leaves."""
        return self._trajectory.room

    @property
    def call_id(self) -> str:
        """See `Trajectory.call_id`."""
        return self._trajectory.call_id

    @property
    def replaying(self) -> bool:
        """See `Trajectory.replaying`."""
        return self._trajectory.replaying

    def generate(self, sampling: SamplingParams | None = None, **changes: object) -> Turn:
        """See `Trajectory.generate`."""
        return self._wait(self._start(self._trajectory.generate(sampling, **changes)))

    def append(self, tokens: str | Sequence[int] | Tokens, media: Sequence[Placed] = ()) -> None:
        """See `Trajectory.append`."""
        self._trajectory.append(tokens, media)

    def once(self, call: Callable[[str], T]) -> T:
        """See `Trajectory.once`; `call` runs in this thread."""
        asked: Future[str] = Future()
        said: Future[T] = Future()
        wake = threading.Event()

        async def here(call_id: str) -> T:
            asked.set_result(call_id)
            return await asyncio.wrap_future(said)

        kept = self._start(self._trajectory.once(here))
        for either in (asked, kept):
            either.add_done_callback(lambda _: wake.set())
        wake.wait()  # at most as long as the loop takes to look into the journal
        if asked.done():
            try:
                said.set_result(call(asked.result()))
            except BaseException:
                kept.cancel()
                raise
        return self._wait(kept)

    # --- inside ------------------------------------------------------------------------------

    def leave(self) -> None:
        """End what is under way, and refuse what is asked for from now on."""
        with self._lock:
            self._left = True
            if self._under_way is not None:
                self._under_way.cancel()

    def _start(self, work: Coroutine[object, object, T]) -> Future[T]:
        with self._lock:
            if self._left:
                work.close()
                raise self._cancelled()
            self._under_way = future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future

    def _wait(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError as error:
            raise self._cancelled() from error

    def _cancelled(self) -> RolloutCancelled:
        return RolloutCancelled("its rollout was left", (self.prompt_id,))


SyncAgent = Callable[[SyncTrajectory], Any]


class SyncTrajectoryRollout:
    """See `TrajectoryRollout`; `SyncRolloutClient.trajectories` makes one. Use it as a context manager."""

    def __init__(self, rollout: TrajectoryRollout, thread: LoopThread, idle_seconds: float) -> None:
        self._rollout = rollout
        self._thread = thread
        self._idle_seconds = idle_seconds
        self._agents: set[threading.Thread] = set()

    @property
    def rollout_number(self) -> int:
        """The rollout number of the noise keys."""
        return self._rollout.rollout_number

    @property
    def run_id(self) -> str:
        """The first part of all call ids."""
        return self._rollout.run_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._rollout.__aexit__(kind, error, trace))
        deadline = time.monotonic() + self._idle_seconds
        for agent in list(self._agents):
            agent.join(max(0.0, deadline - time.monotonic()))

    def run(self, agent: SyncAgent) -> Iterator[TrajectoryGroup]:
        """Run `agent(trajectory)` for every trajectory, each in a thread; yield groups as they finish."""

        async def in_thread(trajectory: Trajectory) -> object:
            own = SyncTrajectory(trajectory, asyncio.get_running_loop())
            ended: Future[object] = Future()
            ended.set_running_or_notify_cancel()
            name = f"agent {trajectory.prompt_id}/{trajectory.index}"
            thread = threading.Thread(target=_run, args=(agent, own, ended), name=name, daemon=True)
            self._agents.add(thread)
            thread.start()
            try:
                result = await asyncio.wrap_future(ended)
            finally:
                own.leave()
            self._agents.discard(thread)
            return result

        return iterate(self._thread, self._rollout.run(in_thread))


def _run(agent: SyncAgent, trajectory: SyncTrajectory, ended: Future[object]) -> None:
    try:
        ended.set_result(agent(trajectory))
    except BaseException as error:  # noqa: BLE001 - it is its trajectory's end
        ended.set_exception(error)
