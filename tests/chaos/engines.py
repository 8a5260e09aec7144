"""Engines of the virtual campaign: the replay engine, with what real ones have beyond it.

Weights take time to load, siblings' tokens are fetched as for drafts (no token depends on them), a chunk
is turned down now and then, a poison prompt ends the process, and one whose rows cannot be sampled fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from chaos.in_place import NO_BYTES
from chaos.plan import POISON, UNSAMPLEABLE
from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.errors import EngineError, Unsampleable
from seer.common.net.transport.base import Transport
from seer.common.sleep import SleepLevel, SleepState
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Chunk, ChunkFailure, StepOutput
from seer.services.engine.draft_groups import DraftGroups
from seer.services.engine.driver import InlineDriver
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.server import EngineServer
from seer.services.engine.weights.manifest import Manifest, Tensor


@dataclass(slots=True)
class Nature:
    """What an engine is like: `rejections` chunks are turned down; `die` ends it; `complain` tells a breach."""

    load_seconds: float
    rejections: int
    die: Callable[[], None]
    complain: Callable[[str], None]


class ChaosBackend(ReplayBackend):
    """See the module's docstring."""

    def __init__(self, config: Config, nature: Nature) -> None:
        super().__init__(config.engine, config.shared)
        self._nature = nature
        self._fed: dict[tuple[str, int], int] = {}

    def add(self, chunk: Chunk) -> None:
        """See `ReplayBackend.add`."""
        if self._nature.rejections and hash((chunk.key, chunk.attempt)) % 3 == 0:
            self._nature.rejections -= 1
            raise EngineError("out of something, this time")
        super().add(chunk)

    def step(self) -> StepOutput:
        """See `ReplayBackend.step`."""
        if any(run.chunk.tokens[0] == POISON for run in self._runs.values()):
            self._nature.die()
        mute = {name for name, run in self._runs.items() if run.chunk.tokens[0] == UNSAMPLEABLE}
        out = super().step()
        for each in (each for each in out.generated if each.request_id in mute):
            error = Unsampleable(f"request {each.request_id}: no token can be sampled")
            out.failed.append(ChunkFailure(request_id=each.request_id, attempt=each.attempt, error=error))
            self.drop(each.request_id, each.attempt)
        out.generated = [each for each in out.generated if each.request_id not in mute]
        out.ended = [each for each in out.ended if each.request_id not in mute]
        return out

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """Follow streams as drafts do: each delta must continue what was fed."""
        for delta in deltas:
            stream = delta.group_id, delta.index
            if delta.previous > self._fed.get(stream, 0):
                self._nature.complain(f"drafts of {stream} lack tokens before {delta.previous}")
            self._fed[stream] = delta.previous + len(delta.tokens)

    def forget(self, group_ids: Iterable[str]) -> None:
        """Drop the streams of these groups."""
        gone = set(group_ids)
        self._fed = {stream: length for stream, length in self._fed.items() if stream[0] not in gone}

    def load_weights(self, folder: Path, digest: str, base: Path | None = None) -> None:
        """See `ReplayBackend.load_weights`; memory that sleeps cannot take weights."""
        if self._sleeping is SleepState.ASLEEP:
            self._nature.complain("told to load weights while asleep")
        if self._runs:
            self._nature.complain("told to load weights while chunks run")
        super().load_weights(folder, digest, base)


class ChaosDriver(InlineDriver):
    """Takes time for what takes time."""

    def __init__(self, backend: ChaosBackend, server: EngineServer, clock: Clock, nature: Nature) -> None:
        super().__init__(backend, server, clock)
        self._nature = nature

    async def load_weights(self, folder: Path, digest: str, base: Path | None = None) -> None:
        """See `Driver.load_weights`."""
        await self._clock.sleep(self._nature.load_seconds)
        await super().load_weights(folder, digest, base)

    async def receive_weights(self, folder: Path, engine: str, digest: str, seconds: float) -> None:
        """See `Driver.receive_weights`; one in four times the trainer's bytes do not come."""
        await self._clock.sleep(self._nature.load_seconds)
        if hash((engine[-1:] == "0", int(self._clock.now() * 1000))) % 4 == 0:
            raise EngineError(NO_BYTES)
        await super().receive_weights(folder, engine, digest, seconds)

    async def sleep(self, state: SleepState, level: SleepLevel) -> None:
        """See `Driver.sleep`."""
        await self._clock.sleep(self._nature.load_seconds / 4)
        await super().sleep(state, level)


def make(config: Config, transport: Transport, clock: Clock, nature: Nature) -> EngineServer:
    """Build an engine that follows its chunks' siblings, as one that drafts does."""
    backend = ChaosBackend(config, nature)
    server = EngineServer(config, transport, clock, backend)
    server._driver = server._updater._driver = ChaosDriver(backend, server, clock, nature)
    assert server.sharing is not None
    server.sharing.groups, server.sharing._driver = DraftGroups(), server._driver
    server._updater.checker.model = Manifest({"w": Tensor("F32", (1000,))}, "")  # to compare plans with
    return server
