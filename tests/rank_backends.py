"""Backends of ranks for tests: as the replay engine, with a fault at some step; each in a process of its own."""

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

from ahead import scheduling_ahead

from seer.common.config import EngineConfig, ReplayConfig, SharedConfig
from seer.common.errors import EngineBroken, InvalidField
from seer.common.sleep import SleepLevel, SleepState
from seer.common.types import InstanceStats
from seer.services.engine.backend import Chunk, StepOutput
from seer.services.engine.rank_process import MakeRank, RankBackend
from seer.services.engine.replay.backend import ReplayBackend

BLOCKS = 40


class FaultyRank(ReplayBackend):
    """Does `fault` in its step `at`: `dies`, `hangs`, `fails`, `is full`; or `load` fails, or the start.

    `log`: a file to which it writes what it is told, so that tests see in which order ranks are.
    """

    def __init__(self, rank: int, fault: str, at: int, log: Path) -> None:
        config = EngineConfig(backend="replay", kv_blocks=BLOCKS, max_num_seqs=4, replay=ReplayConfig())
        super().__init__(config, SharedConfig())
        self._rank, self._fault, self._at, self._log = rank, fault, at, log / f"rank-{rank}"
        self._taken = 0
        self.wanted_drafts = 10 + rank

    def _note(self, what: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{what}\n")

    def start(self) -> None:
        if self._fault == "start slowly":
            time.sleep(600)
        if self._fault == "start":
            raise InvalidField("shared.model", "m", "cannot be loaded")
        super().start()
        self._note(str(os.getpid()))

    def add(self, chunk: Chunk) -> None:
        if len(chunk.tokens) > 300:
            raise InvalidField("tokens", len(chunk.tokens), "too many")
        super().add(chunk)

    def agree(self, drafts: int) -> None:
        with self._log.with_name(f"drafts-{self._rank}").open("a") as file:
            file.write(f"{drafts}\n")

    def step(self) -> StepOutput:
        self._taken += 1
        self._note("step")
        if self._taken == self._at:
            if self._fault == "dies":
                os._exit(3)
            if self._fault == "hangs":
                time.sleep(600)
            if self._fault == "is full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if self._fault == "fails":
                raise InvalidField("weights", "w", "no numbers")
        return super().step()

    def load_weights(self, folder: Path, digest: str, base: Path | None = None) -> None:
        self._note(f"load {digest}")
        if self._fault == "load":
            raise EngineBroken("the weights are gone")

    def sleep(self, state: SleepState, level: SleepLevel) -> None:
        self._note(f"sleep {level}")

    def forget(self, group_ids: Iterable[str]) -> None:
        self._note(f"forget {','.join(group_ids)}")

    def stats(self) -> InstanceStats:
        return InstanceStats(steps=self._taken, running=self._rank + 1, generated_tokens=10)


_kept = contextlib.ExitStack()


def patient(make: MakeRank, ahead: bool, rank: int, port: int) -> RankBackend:
    """Make a rank of vLLM's, for which a call into the pool is no miss for being slow beside others.

    `ahead`: it may schedule ahead, as on GPUs.
    """
    from seer.services.engine.vllm.kv_pool import unreachable_store

    unreachable_store.CALL_SECONDS = 20.0
    if ahead:
        _kept.enter_context(scheduling_ahead())
    backend = make(rank, port)
    start = backend.start

    def start_and_note() -> None:
        start()
        if AGREED in os.environ:
            _note_agreed_steps(Path(os.environ[AGREED]) / f"rank-{rank}")

    backend.start = start_and_note
    return backend


AGREED = "SEER_TEST_AGREED_STEPS"
"""Names a folder in which each of vLLM's ranks notes the tokens a request of its steps: its own, and agreed ones."""


def _note_agreed_steps(file: Path) -> None:
    from vllm.v1.worker.gpu import dp_utils

    agree = dp_utils.sync_cudagraph_and_dp_padding

    def noted(manager: object, desc: object, tokens: int, requests: int, uniform: int | None, *rest, **named):
        found, state = agree(manager, desc, tokens, requests, uniform, *rest, **named)
        with file.open("a") as out:
            out.write(f"{requests} {uniform or 0} {state.uniform_token_count or 0}\n")
        return found, state

    dp_utils.sync_cudagraph_and_dp_padding = noted


def make(faulty: int, fault: str, at: int, log: Path, rank: int, port: int) -> FaultyRank:
    """Make a rank; the one of number `faulty` has the fault."""
    return FaultyRank(rank, fault if rank == faulty else "", at, log)
