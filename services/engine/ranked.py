"""An engine of data-parallel ranks: one backend to all else, each rank's in a process of its own.

The ranks of a mixture of experts step together (`common/policy/ranks.py`): each step sends every token to the
ranks that have its experts, so a rank without a request runs a dummy.

Invariants (tests/unit/test_ranked_backend.py, tests/e2e/test_data_parallel.py):
- each chunk runs on one rank; what it generates does not depend on which;
- new weights, sleep and draft tokens reach all ranks, in the same place among their steps;
- a rank that ends, fails or is late ends the engine within `RANK_SECONDS`, and all other ranks with it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from msgspec.structs import replace

from seer.common.errors import EngineBroken, EngineError
from seer.common.policy.ranks import Lockstep, RankPlacement
from seer.common.sleep import SleepLevel, SleepState
from seer.common.types import Capacity, InstanceStats
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Chunk, StepOutput
from seer.services.engine.nodes.leader import free_port
from seer.services.engine.rank_process import (
    Add,
    Bind,
    Call,
    Command,
    Done,
    Drop,
    End,
    Failed,
    Feed,
    Forget,
    Load,
    MakeRank,
    Report,
    Sleep,
    Started,
    Step,
    Stepped,
    serve,
)

HOST = "127.0.0.1"

RANK_SECONDS = 240.0
"""Longest step of a rank, and longest wait until it takes an order: below `step_watch.STEP_SECONDS`, so that
the error names the rank."""

LOOK_SECONDS = 1.0

LEAVE_SECONDS = 5.0
"""Longest wait for ranks to end once they are told to."""

OF_THE_SLOWEST = frozenset(
    {"steps", "step_seconds", "draft_seconds", "best_rate", "token_seconds_alone", "pool_away", "head_behind"}
)
"""Statistics that all ranks have together; others add up."""


class RankedBackend:
    """`Backend` of `ranks` backends; `make` makes each. `seconds`: the longest start, and call, of a rank.

    `lockstep` counts steps and dummies.
    """

    def __init__(
        self, make: MakeRank, ranks: int, seconds: float, step_seconds: float = RANK_SECONDS
    ) -> None:
        self._make, self._seconds, self._step_seconds = make, seconds, step_seconds
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self.lockstep = Lockstep(ranks, step_seconds)
        self._ranks = ranks
        self._stepped: list[deque[StepOutput]] = [deque() for _ in range(ranks)]
        self._stats = [InstanceStats()] * ranks
        self._runs: dict[tuple[str, int], tuple[int, int]] = {}  # rank and blocks of each chunk

    def start(self) -> None:
        """See `Backend.start`."""
        context = multiprocessing.get_context("spawn")
        port = free_port(HOST)
        for rank in range(self._ranks):
            ours, theirs = context.Pipe()
            _bound_sends(ours, self._step_seconds)
            process = context.Process(
                target=serve, args=(theirs, self._make, rank, port), name=f"rank-{rank}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            started = [each for each in self._answers("start") if isinstance(each, Started)]
        except EngineError:
            self.close()
            raise
        least = min((each.capacity for each in started), key=lambda each: each.kv_blocks)
        self._capacity = _whole(least, self._ranks)
        self._versions = started[0].versions | {"data_parallel": str(self._ranks)}
        self._placement = RankPlacement.of(self._ranks, least.kv_blocks, least.max_num_seqs)

    @property
    def capacity(self) -> Capacity:
        """See `Backend.capacity`: that of all ranks, in as many parts."""
        return self._capacity

    @property
    def versions(self) -> dict[str, str]:
        """See `Backend.versions`."""
        return self._versions

    # --- chunks --------------------------------------------------------------------------

    def add(self, chunk: Chunk) -> None:
        """See `Backend.add`; a chunk that a rank refuses is a failure of a step."""
        blocks = self._capacity.blocks_for(len(chunk.tokens), chunk.max_new_tokens)
        rank = self._placement.place(chunk.request_id, blocks)
        self._runs[chunk.request_id, chunk.attempt] = rank, blocks
        self.lockstep.work(rank)  # first: a rank that has ended meanwhile fails the next step
        self._tell(rank, Add(chunk))

    def drop(self, request_id: str, attempt: int) -> None:
        """See `Backend.drop`."""
        rank = self._over(request_id, attempt)
        if rank is not None:
            self._tell(rank, Drop(request_id, attempt))

    def end(self, request_id: str, attempt: int) -> None:
        """See `Backend.end`."""
        if (run := self._runs.get((request_id, attempt))) is not None:
            self._tell(run[0], End(request_id, attempt))

    def _over(self, request_id: str, attempt: int) -> int | None:
        """Forget a chunk; return the rank that has it."""
        if (run := self._runs.pop((request_id, attempt), None)) is None:
            return None
        self._placement.end(*run)
        return run[0]

    def has_work(self) -> bool:
        """See `Backend.has_work`."""
        return self.lockstep.works or all(self._stepped)

    def step(self) -> StepOutput:
        """See `Backend.step`: all ranks' of the oldest step. The next one is under way by then."""
        while self.lockstep.grant(time.monotonic()) is not None:
            self._tell_all(Step(self.lockstep.drafts(self._placement.chunks)))
        while not all(self._stepped):
            self._read()
        return self._merged([outputs.popleft() for outputs in self._stepped])

    def _merged(self, outputs: Sequence[StepOutput]) -> StepOutput:
        """Return one output of all ranks', without what was dropped meanwhile."""
        whole = StepOutput(seconds=max(each.seconds for each in outputs))
        for each in outputs:
            whole.generated += [new for new in each.generated if (new.request_id, new.attempt) in self._runs]
            for end in each.ended:
                if self._over(end.request_id, end.attempt) is not None:
                    whole.ended.append(end)
            for failure in each.failed:
                if self._over(failure.request_id, failure.attempt) is not None:
                    whole.failed.append(failure)
        return whole

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """See `Backend.feed`: any rank may have chunks of these groups."""
        self._tell_all(Feed(list(deltas)))

    def forget(self, group_ids: Iterable[str]) -> None:
        """See `Backend.forget`."""
        self._tell_all(Forget(list(group_ids)))

    # --- weights and memory ----------------------------------------------------------------

    def lay_out_weights(self, folder: Path | None, digest: str) -> None:
        """See `Backend.lay_out_weights`; nothing is."""

    def lays_out(self) -> bool:
        """See `Backend.lays_out`."""
        return False

    def load_weights(self, folder: Path, digest: str, base: Path | None = None) -> None:
        """See `Backend.load_weights`."""
        self._call(Load(folder, digest, base))

    def receive_weights(self, folder: Path, engine: str, digest: str) -> None:
        """See `Backend.receive_weights`; refused."""
        raise EngineError("data-parallel ranks take no weights in place: send a stream or a folder")

    def bind_weights(self, digest: str) -> None:
        """See `Backend.bind_weights`."""
        self._call(Bind(digest))

    def sleep(self, state: SleepState, level: SleepLevel) -> None:
        """See `Backend.sleep`."""
        self._call(Sleep(state, level))

    def _call(self, call: Call) -> None:
        """Have all ranks do what takes long, once they have run all granted steps. Raises `EngineError`."""
        while self.lockstep.done < self.lockstep.granted:
            self._read()
        self._tell_all(call)
        for answer in self._answers(type(call).__name__.lower()):
            if isinstance(answer, Done) and answer.problem:
                raise (EngineBroken if answer.broken else EngineError)(answer.problem)

    def stats(self) -> InstanceStats:
        """See `Backend.stats`."""
        return replace(merged_stats(self._stats), dummy_steps=self.lockstep.dummies)

    def close(self) -> None:
        """See `Backend.close`; a rank that hangs is killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + LEAVE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    # --- from and to the ranks -----------------------------------------------------------

    def _tell_all(self, command: Command) -> None:
        for rank in range(self._ranks):
            self._tell(rank, command)

    def _tell(self, rank: int, command: Command) -> None:
        try:
            self._pipes[rank].send(command)
        except BlockingIOError as error:
            why = f"rank {rank} of this engine takes no orders: the engine ends, and starts again"
            raise EngineBroken(why) from error
        except OSError as error:
            raise _gone(rank) from error

    def _answers(self, doing: str) -> list[Started | Stepped | Done]:
        """Return one answer of each rank. Raises `EngineBroken` if one takes too long."""
        found: dict[int, Started | Stepped | Done] = {}
        deadline = time.monotonic() + self._seconds
        while len(found) < self._ranks:
            found.update(self._ready())
            if time.monotonic() > deadline:
                late = [rank for rank in range(self._ranks) if rank not in found]
                limit = f"engine.load_seconds = {self._seconds:g}"
                raise EngineBroken(f"ranks {late} of this engine did not {doing} within {limit}: see the log")
        return [found[rank] for rank in range(self._ranks)]

    def _read(self) -> None:
        """Wait for a report of a step, for a moment. Raises `EngineBroken` when a rank is late or gone."""
        for rank, answer in self._ready():
            if isinstance(answer, Stepped):
                self._stepped[rank].append(answer.output)
                self.lockstep.ended(
                    rank, worked=answer.worked, busy=answer.busy, now=time.monotonic(), wanted=answer.wanted
                )
        if late := self.lockstep.late(time.monotonic()):
            raise EngineBroken(
                f"ranks {late} of this engine did not end a step in time: it ends, and starts again"
            )

    def _ready(self) -> Iterable[tuple[int, Started | Stepped | Done]]:
        """Yield what has come from ranks by now. Raises `EngineError` when one is gone, or failed."""
        ready = wait(self._pipes, LOOK_SECONDS)
        for rank, pipe in enumerate(self._pipes):
            if pipe not in ready:
                continue
            try:
                report: Report = pipe.recv()
            except (EOFError, OSError) as error:
                raise _gone(rank) from error
            if isinstance(report.answer, Failed):
                raise EngineError(f"rank {rank}: {report.answer.problem}")
            self._stats[rank] = report.stats
            yield rank, report.answer


def _bound_sends(pipe: Connection, seconds: float) -> None:
    """Have sends fail that wait so long: a rank that is stopped does not read."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        whole, part = divmod(seconds, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))


def _gone(rank: int) -> EngineBroken:
    return EngineBroken(f"rank {rank} of this engine has ended: the engine ends, and starts again")


def _whole(rank: Capacity, ranks: int) -> Capacity:
    return replace(
        rank, kv_blocks=ranks * rank.kv_blocks, max_num_seqs=ranks * rank.max_num_seqs, parts=ranks
    )


def merged_stats(ranks: Sequence[InstanceStats]) -> InstanceStats:
    """Return the statistics of an engine of these ranks."""
    values = {
        name: (max if name in OF_THE_SLOWEST else sum)(getattr(each, name) for each in ranks)
        for name in InstanceStats.__struct_fields__
    }
    return InstanceStats(**values)
