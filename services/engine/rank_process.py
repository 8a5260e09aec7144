"""One data-parallel rank of an engine: a backend in a process of its own, told by a pipe what to do.

Commands are done in the order in which they come: ranks that are sent the same steps run the same steps.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from seer.common.errors import EngineBroken, EngineError, InvalidField
from seer.common.process.leave import leave
from seer.common.process.threads import end_with_parent
from seer.common.sleep import SleepLevel, SleepState
from seer.common.types import Capacity, InstanceStats
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Backend, Chunk, ChunkFailure, StepOutput


class RankBackend(Backend, Protocol):
    """A backend that steps together with others."""

    @property
    def wanted_drafts(self) -> int:
        """How many drafts of each request would have paid in the last step, where all have as many."""

    def agree(self, drafts: int) -> None:
        """Have all requests draft so many tokens after the next step, where steps are scheduled ahead."""


MakeRank = Callable[[int, int], RankBackend]
"""Makes the backend of a rank, which meets the others at a port of this machine. It must be picklable."""


# --- to a rank ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    """`Backend.add`; what it refuses is a failure of the next step."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Drop:
    """`Backend.drop`."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class End:
    """`Backend.end`."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Step:
    """`Backend.step`, also without work: answered by `Stepped`. `drafts`: see `RankBackend.agree`."""

    drafts: int


@dataclass(frozen=True, slots=True)
class Feed:
    """`Backend.feed`."""

    deltas: list[StreamDelta]


@dataclass(frozen=True, slots=True)
class Forget:
    """`Backend.forget`."""

    group_ids: list[str]


@dataclass(frozen=True, slots=True)
class Load:
    """`Backend.load_weights`; answered by `Done`, as what follows is."""

    folder: Path
    digest: str
    base: Path | None


@dataclass(frozen=True, slots=True)
class Bind:
    """`Backend.bind_weights`."""

    digest: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """`Backend.sleep`."""

    state: SleepState
    level: SleepLevel


Call = Load | Bind | Sleep
Command = Add | Drop | End | Step | Feed | Forget | Call


# --- from a rank -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The backend has started."""

    capacity: Capacity
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step has ended. `worked`: it was none without a request; `busy`: there is more to do.

    `wanted`: see `RankBackend.wanted_drafts`.
    """

    output: StepOutput
    worked: bool
    busy: bool
    wanted: int


@dataclass(frozen=True, slots=True)
class Done:
    """A call has ended, with a problem or without."""

    problem: str = ""
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank ends: its backend failed."""

    problem: str


@dataclass(frozen=True, slots=True)
class Report:
    """An answer, with the backend's statistics after it."""

    answer: Started | Stepped | Done | Failed
    stats: InstanceStats = field(default_factory=InstanceStats)


def serve(pipe: Connection, make: MakeRank, rank: int, port: int) -> None:
    """Run a rank until the pipe is closed, or its backend fails."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # sent to the whole group: the engine's process hands back first
    end_with_parent()
    backend = make(rank, port)
    with contextlib.suppress(OSError):  # the engine has ended
        try:
            backend.start()
            pipe.send(Report(Started(backend.capacity, backend.versions), backend.stats()))
            _Rank(pipe, backend).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must hear it
            pipe.send(Report(Failed(str(error) or type(error).__name__)))
        finally:
            backend.close()
    leave(0)


class _Rank:
    def __init__(self, pipe: Connection, backend: RankBackend) -> None:
        self._pipe, self._backend = pipe, backend
        self._refused: list[ChunkFailure] = []  # of the chunks that came since the last step
        # Bounded by the chunks that are placed here. Read at once: else the engine might wait for this rank
        # to take a command, and this rank for the engine to take an answer.
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        command: Command | None = None
        while True:
            try:
                command = self._pipe.recv()
            except (EOFError, OSError):
                command = None
            self._commands.put(command)
            if command is None:
                return

    def run(self) -> None:
        """Do commands until the pipe is closed."""
        while (command := self._commands.get()) is not None:
            match command:
                case Add(chunk):
                    self._add(chunk)
                case Drop(request_id, attempt):
                    self._backend.drop(request_id, attempt)
                case End(request_id, attempt):
                    self._backend.end(request_id, attempt)
                case Step(drafts):
                    self._answer(self._step(drafts))
                case Feed(deltas):
                    self._backend.feed(deltas)
                case Forget(group_ids):
                    self._backend.forget(group_ids)
                case _:
                    self._answer(self._call(command))

    def _answer(self, answer: Stepped | Done) -> None:
        self._pipe.send(Report(answer, self._backend.stats()))

    def _add(self, chunk: Chunk) -> None:
        try:
            self._backend.add(chunk)
        except InvalidField as error:
            failure = ChunkFailure(request_id=chunk.request_id, attempt=chunk.attempt, error=error)
            self._refused.append(failure)

    def _step(self, drafts: int) -> Stepped:
        worked = self._backend.has_work()
        self._backend.agree(drafts)
        output = self._backend.step()
        output.failed += self._refused
        self._refused = []
        return Stepped(output, worked, self._backend.has_work(), self._backend.wanted_drafts)

    def _call(self, call: Call) -> Done:
        try:
            match call:
                case Load(folder, digest, base):
                    self._backend.load_weights(folder, digest, base)
                case Bind(digest):
                    self._backend.bind_weights(digest)
                case Sleep(state, level):
                    self._backend.sleep(state, level)
        except EngineError as error:
            return Done(str(error), isinstance(error, EngineBroken))
        return Done()
