"""Two ways to step a backend: on a thread of its own, or inside the event loop.

Invariants:
- all calls of a backend come from one thread; nothing spins while there is no work;
- what a backend produced reaches the sink on the event loop, in order, once;
- a failing backend ends `run` with `EngineError`: an engine that cannot generate must not linger; so does a
  step that does not end (`step_watch.py`), and `close` then ends the process.

The queues are bounded by the chunks that the buffer has placed here, each of which is one command and a
bounded number of tokens.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from seer.common.clock import Clock
from seer.common.errors import EngineBroken, EngineError, SeerError
from seer.common.process.log import get_logger
from seer.common.sleep import SleepLevel, SleepState
from seer.common.types import Capacity, InstanceStats
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Backend, Chunk, StepOutput
from seer.services.engine.step_watch import LOOK_SECONDS, STEP_SECONDS, StepWatch

if TYPE_CHECKING:
    from seer.services.engine.server import EngineServer

T = TypeVar("T")

LAY_OUT_SECONDS = 0.05
"""How often it is looked whether weights are laid out."""

JOIN_SECONDS = 10.0
"""Longest wait for the backend's thread to end; it is a daemon, so the process ends anyway."""

EXIT_BROKEN = 70
"""Exit code of a process that a thread keeps from ending (`EX_SOFTWARE`)."""

STDERR = 2

_log = get_logger()


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What is known of a backend once it has started."""

    capacity: Capacity
    versions: dict[str, str]


class Driver(ABC):
    """Owns a backend and steps it; all methods are called on the event loop.

    What the backend produces goes to the `sink`, on the event loop, too.
    Each of its methods that is about the backend's own is that, run where the backend runs: see `Backend`.
    """

    def __init__(self, backend: Backend, sink: EngineServer) -> None:
        self._backend, self._sink = backend, sink

    @property
    @abstractmethod
    def stats(self) -> InstanceStats:
        """Return the backend's own report, as of the last step or call."""

    @abstractmethod
    async def start(self, seconds: float) -> BackendInfo:
        """Load the backend. Raises `EngineError` if it fails or takes longer than `seconds`."""

    @abstractmethod
    async def run(self) -> None:
        """Step while there is work, until cancelled. Raises `EngineError` when the backend fails."""

    @abstractmethod
    def give_up(self) -> None:
        """Have `close` end the process: the backend may wait for what will never come."""

    @abstractmethod
    async def close(self) -> None:
        """Free the backend."""

    # --- calls of the backend --------------------------------------------------------------

    @abstractmethod
    def tell(self, work: Callable[[], None]) -> None:
        """Have `work` done where the backend runs, between two steps; never blocks."""

    @abstractmethod
    async def call(self, work: Callable[[], T]) -> T:
        """Do `work` there, and return what it returns. Raises `EngineError` when it fails."""

    @abstractmethod
    def reject(self, chunk: Chunk, error: SeerError) -> None:
        """Give the sink a chunk back; called where the backend runs."""

    def add(self, chunk: Chunk) -> None:
        """Have a chunk run."""
        self.tell(lambda: self._add(chunk))

    def _add(self, chunk: Chunk) -> None:
        try:
            self._backend.add(chunk)
        except SeerError as error:
            self.reject(chunk, error)

    def drop(self, request_id: str, attempt: int) -> None:
        """Stop a chunk; output that was produced before may still arrive."""
        self.tell(lambda: self._backend.drop(request_id, attempt))

    def end(self, request_id: str, attempt: int) -> None:
        """Have a chunk end where it is; one without a token goes on."""
        self.tell(lambda: self._backend.end(request_id, attempt))

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """Give the draft trees tokens of other responses."""
        self.tell(lambda: self._backend.feed(deltas))

    def forget(self, group_ids: Iterable[str]) -> None:
        """Drop the draft trees of groups."""
        self.tell(lambda: self._backend.forget(group_ids))

    async def lay_out_weights(self, folder: Path | None, digest: str = "") -> None:
        """Prepare a load beside steps, and wait for that; without a folder: forget that, if it was done.

        Raises nothing but `EngineBroken`: a load does without, and a step finds what is broken.
        """
        try:
            await self.call(lambda: self._backend.lay_out_weights(folder, digest))
            while await self.call(self._backend.lays_out):  # noqa: ASYNC110 - a rank's thread tells nobody
                await asyncio.sleep(LAY_OUT_SECONDS)
        except EngineBroken:
            raise
        except EngineError as error:
            _log.warning("weights are laid out in the pause", why=str(error))

    async def load_weights(self, folder: Path, digest: str, base: Path | None = None) -> None:
        """Replace the live weights; drop all chunks before."""
        await self.call(lambda: self._backend.load_weights(folder, digest, base))

    async def receive_weights(self, folder: Path, engine: str, digest: str, seconds: float) -> None:
        """Receive weights in place; drop all chunks before.

        Raises `EngineBroken` after `seconds`: the thread that receives may never return.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.call(lambda: self._backend.receive_weights(folder, engine, digest))
        except TimeoutError as error:
            self.give_up()
            limit = f"engine.in_place_seconds = {seconds:g}"
            why = f"weights in place did not arrive within {limit}: this engine ends, and starts again"
            raise EngineBroken(why) from error

    async def bind_weights(self, digest: str) -> None:
        """Say which weights are live."""
        await self.call(lambda: self._backend.bind_weights(digest))

    async def sleep(self, state: SleepState, level: SleepLevel) -> None:
        """Free memory, or take it again."""
        await self.call(lambda: self._backend.sleep(state, level))


class InlineDriver(Driver):
    """Steps on the event loop, then waits as long as the step says it lasts: for modelled backends.

    Calls block the loop, so no deadline of them can be enforced.
    """

    def __init__(self, backend: Backend, sink: EngineServer, clock: Clock) -> None:
        super().__init__(backend, sink)
        self._clock = clock
        self._work = asyncio.Event()

    @property
    def stats(self) -> InstanceStats:
        """See `Driver.stats`."""
        return self._backend.stats()

    async def start(self, seconds: float) -> BackendInfo:
        """See `Driver.start`."""
        self._backend.start()
        return _info(self._backend)

    def tell(self, work: Callable[[], None]) -> None:
        """See `Driver.tell`."""
        work()
        self._work.set()

    async def call(self, work: Callable[[], T]) -> T:
        """See `Driver.call`."""
        try:
            return work()
        except Exception as error:
            raise _failure(error) from error

    def reject(self, chunk: Chunk, error: SeerError) -> None:
        """See `Driver.reject`."""
        self._sink.rejected(chunk, error)

    async def run(self) -> None:
        """See `Driver.run`."""
        while True:
            while not self._backend.has_work():
                self._work.clear()
                await self._work.wait()
            try:
                out = self._backend.step()
            except Exception as error:
                raise _failure(error) from error
            await self._clock.sleep(out.seconds)
            self._sink.output(out)

    def give_up(self) -> None:
        """See `Driver.give_up`; nothing here waits."""

    async def close(self) -> None:
        """See `Driver.close`."""
        self._backend.close()


_Event = BackendInfo | StepOutput | tuple[Chunk, SeerError] | EngineError


class ThreadDriver(Driver):
    """Steps on a dedicated thread: for backends that compute."""

    def __init__(self, backend: Backend, sink: EngineServer) -> None:
        super().__init__(backend, sink)
        self._stats = InstanceStats()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._stopping = self._hangs = False
        self._steps = self._step = 0  # how many have begun; the number of the one under way, or 0
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def stats(self) -> InstanceStats:
        """See `Driver.stats`."""
        return self._stats

    async def start(self, seconds: float) -> BackendInfo:
        """See `Driver.start`."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        try:
            async with asyncio.timeout(seconds):
                event = await self._events.get()
        except TimeoutError as error:
            raise EngineError(
                f"the model did not load within engine.load_seconds = {seconds:g}: raise it, or see the log"
            ) from error
        if isinstance(event, BackendInfo):
            return event
        raise event if isinstance(event, EngineError) else EngineError(f"unexpected {event!r}")

    def tell(self, work: Callable[[], None]) -> None:
        """See `Driver.tell`."""
        self._commands.put(work)

    async def call(self, work: Callable[[], T]) -> T:
        """See `Driver.call`."""
        done: asyncio.Future[T] = self._loop.create_future()
        self.tell(lambda: self._run_call(work, done))
        return await done

    def reject(self, chunk: Chunk, error: SeerError) -> None:
        """See `Driver.reject`."""
        self._emit((chunk, error))

    async def run(self) -> None:
        """See `Driver.run`."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                match await self._events.get():
                    case StepOutput() as out:
                        self._sink.output(out)
                    case (chunk, error):
                        self._sink.rejected(chunk, error)
                    case EngineError() as failure:
                        raise failure
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """Make `run` fail once a step stands still; the stacks of all threads go to stderr."""
        watch = StepWatch(self._loop.time())
        stands_still = False
        while not stands_still:
            await asyncio.sleep(LOOK_SECONDS)
            stands_still = watch.stands_still(self._step, self._loop.time())
        faulthandler.dump_traceback(STDERR)
        self.give_up()
        why = f"a step did not end within {STEP_SECONDS:g} s: this engine ends, and starts again"
        self._events.put_nowait(EngineBroken(why))

    def give_up(self) -> None:
        """See `Driver.give_up`."""
        self._hangs = True

    async def close(self) -> None:
        """See `Driver.close`; a step under way is waited for, `JOIN_SECONDS` at most.

        If the thread hangs in a collective, the process ends here: nothing else would end that thread.
        """
        if self._hangs:
            end_process()
        if self._thread.is_alive():
            self.tell(self._stop)
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    # --- on the backend's thread ---------------------------------------------------------

    def _main(self) -> None:
        try:
            self._backend.start()
            self._emit(_info(self._backend))
            while not self._stopping:
                self._run_commands()
                if self._backend.has_work():
                    self._emit(self._next_step())
                self._stats = self._backend.stats()
        except Exception as error:  # noqa: BLE001 - whatever it is, `run` must raise it
            self._emit(_failure(error))
        finally:
            self._backend.close()

    def _next_step(self) -> StepOutput:
        self._steps += 1
        self._step = self._steps
        out = self._backend.step()
        self._step = 0
        return out

    def _run_commands(self) -> None:
        """Run all queued commands; wait for one if the backend has no work."""
        wait = not self._backend.has_work()
        while not self._stopping:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()
            wait = False  # statistics are to tell what it changed

    def _stop(self) -> None:
        self._stopping = True

    def _run_call(self, work: Callable[[], T], done: asyncio.Future[T]) -> None:
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller must get it
            self._loop.call_soon_threadsafe(_settle, done, done.set_exception, _failure(error))
        else:
            self._loop.call_soon_threadsafe(_settle, done, done.set_result, found)

    def _emit(self, event: _Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: the process ends
            self._stopping = True


def end_process() -> NoReturn:
    """End this process and its workers at once, whatever they wait for."""
    for worker in multiprocessing.active_children():
        worker.kill()
    sys.stderr.flush()
    os._exit(EXIT_BROKEN)


def _settle(done: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object) -> None:
    if not done.cancelled():
        settle(outcome)


def _info(backend: Backend) -> BackendInfo:
    return BackendInfo(backend.capacity, backend.versions)


def _failure(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    _log.error("the backend failed", exc_info=error)
    return EngineError(f"the backend failed: {type(error).__name__}: {error}")
