"""The client without asyncio: it runs an event loop in a background thread.

Invariants:
- every call runs in that loop and raises what the asyncio client raises;
- closing the client ends the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from seer.client.client import RolloutClient
from seer.client.groups import Group
from seer.client.loop_thread import LoopThread, iterate
from seer.client.open_rollout import OpenRollout
from seer.client.prompts import Prompt
from seer.client.rollout import Rollout
from seer.client.sync_open_rollout import SyncOpenRollout
from seer.client.text import Tokenizer
from seer.client.turns.rollout import TrajectoryRollout
from seer.client.turns.sync import SyncTrajectoryRollout
from seer.client.weight_update import InFlight, Source
from seer.common.config import SecurityConfig
from seer.common.errors import RequestRefused
from seer.common.sleep import SleepLevel, SleepTag
from seer.common.types import SamplingParams
from seer.common.wire import Progress, Status, Tokens, WeightsLive

T = TypeVar("T")


class SyncRollout:
    """See `Rollout`: iterate over groups as they finish, or `in_order()`; or take `result()`."""

    def __init__(self, rollout: Rollout, thread: LoopThread) -> None:
        self._rollout = rollout
        self._thread = thread

    @property
    def id(self) -> str:
        """The rollout's id at the buffer."""
        return self._rollout.id

    @property
    def rollout_number(self) -> int:
        """The rollout number of the noise keys."""
        return self._rollout.rollout_number

    @property
    def progress(self) -> Progress | None:
        """The latest counters."""
        return self._rollout.progress

    @property
    def groups(self) -> list[Group]:
        """The groups finished so far, in the order in which they finished."""
        return self._rollout.groups

    @property
    def failure(self) -> RequestRefused | None:
        """One error that names every prompt that failed so far."""
        return self._rollout.failure

    def on_progress(self, callback: Callable[[Progress], None]) -> None:
        """Have `callback` called, in the client's thread, with every `Progress`."""
        self._rollout.on_progress = callback

    def __iter__(self) -> Iterator[Group]:
        """Yield groups as they finish; then raise `failure`, if any."""
        return iterate(self._thread, aiter(self._rollout))

    def in_order(self) -> Iterator[Group]:
        """Yield groups in input order; then raise `failure`, if any."""
        return iterate(self._thread, self._rollout.in_order())

    def result(self) -> list[Group]:
        """Wait for every prompt and return all groups in input order, or raise `failure`."""
        return self._thread.call(self._rollout.result())

    def cancel(self, prompt_ids: Sequence[str] = ()) -> None:
        """Give up these unfinished prompts, or all."""
        self._thread.call(self._rollout.cancel(prompt_ids))


class SyncRolloutClient:
    """See `RolloutClient`; use as `with SyncRolloutClient(endpoint) as client`."""

    def __init__(
        self,
        endpoint: str,
        *,
        name: str | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        connect_seconds: float = 30.0,
        silence_seconds: float = 60.0,
        security: SecurityConfig | None = None,
    ) -> None:
        self._client = RolloutClient(
            endpoint,
            name=name,
            tokenizer=tokenizer,
            connect_seconds=connect_seconds,
            silence_seconds=silence_seconds,
            security=security,
        )
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        self._thread = LoopThread()
        try:
            self._thread.call(self._client.__aenter__())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is unfinished and leave; idempotent."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.call(self._client.close())
            thread.stop()

    def submit(
        self,
        prompts: Iterable[Prompt | str | Sequence[int] | Tokens],
        *,
        n: int = 8,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        rollout_number: int | None = None,
        repeat: bool = False,
        deadline_seconds: float | None = None,
        rollout_id: str | None = None,
        weight_version: int | None = None,
    ) -> SyncRollout:
        """See `RolloutClient.submit`."""
        thread = self._running()
        rollout = thread.call(
            self._client.submit(
                prompts,
                n=n,
                sampling=sampling,
                seed=seed,
                rollout_number=rollout_number,
                repeat=repeat,
                deadline_seconds=deadline_seconds,
                rollout_id=rollout_id,
                weight_version=weight_version,
            )
        )
        return SyncRollout(rollout, thread)

    def open_rollout(
        self, rollout_id: str | None = None, *, rollout_number: int | None = None, repeat: bool = False
    ) -> SyncOpenRollout:
        """See `RolloutClient.open_rollout`."""

        async def opened(client: RolloutClient) -> OpenRollout:
            return client.open_rollout(rollout_id, rollout_number=rollout_number, repeat=repeat)

        return SyncOpenRollout(self.run(opened), self._running())

    def trajectories(
        self,
        prompts: Iterable[Prompt | str | Sequence[int] | Tokens],
        *,
        n: int = 8,
        sampling: SamplingParams | None = None,
        max_context: int,
        idle_seconds: float = 600.0,
        max_open: int = 256,
        journal: str | Path | None = None,
        seed: int = 0,
        rollout_number: int | None = None,
        repeat: bool = False,
        rollout_id: str | None = None,
        weight_version: int | None = None,
    ) -> SyncTrajectoryRollout:
        """See `RolloutClient.trajectories`; agents are plain functions, each in a thread of its own."""

        async def opened(client: RolloutClient) -> TrajectoryRollout:
            return client.trajectories(
                prompts, n=n, sampling=sampling, max_context=max_context, idle_seconds=idle_seconds,
                max_open=max_open, journal=journal, seed=seed, rollout_number=rollout_number,
                repeat=repeat, rollout_id=rollout_id, weight_version=weight_version,
            )  # fmt: skip

        return SyncTrajectoryRollout(self.run(opened), self._running(), idle_seconds)

    def update_weights(
        self,
        version: int,
        source: Source,
        *,
        digest: str = "",
        in_flight: InFlight = "finish",
        timeout_seconds: float = 3600.0,
    ) -> WeightsLive:
        """See `RolloutClient.update_weights`."""
        return self._running().call(
            self._client.update_weights(
                version, source, digest=digest, in_flight=in_flight, timeout_seconds=timeout_seconds
            )
        )

    def run(self, work: Callable[[RolloutClient], Coroutine[object, object, T]]) -> T:
        """Run `work` with the asyncio client in its loop, and return its result."""
        return self._running().call(work(self._client))

    def sleep(self, timeout_seconds: float = 600.0, *, level: SleepLevel = 1) -> None:
        """See `RolloutClient.sleep`."""
        self._running().call(self._client.sleep(timeout_seconds, level=level))

    def wake(self, timeout_seconds: float = 600.0, *, tags: Sequence[SleepTag] | None = None) -> None:
        """See `RolloutClient.wake`."""
        self._running().call(self._client.wake(timeout_seconds, tags=tags))

    def status(self, timeout_seconds: float = 10.0) -> Status:
        """See `RolloutClient.status`."""
        return self._running().call(self._client.status(timeout_seconds))

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError("use the client inside its with block")
        return self._thread
