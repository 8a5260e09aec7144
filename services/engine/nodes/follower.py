"""A node that has further ranks of an engine: starts them when the leader says so, and ends with it.

Invariants (tests/unit/test_nodes.py):
- a node that hears nothing of its leader for `SILENT_SECONDS`, or hears another incarnation of it, ends with
  its ranks; so does one of which a rank has ended;
- told to stop, it tells the leader, which hands back its chunks first;
- it reads the weights that the leader names, a stream, or one of slices, from the leader itself, and answers
  each question when it is through; a later question ends an earlier one.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from seer.common import wire
from seer.common.blobs import FILE
from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.errors import EngineBroken, EngineError, Unreachable
from seer.common.net.channel import Channel
from seer.common.net.identity import this_process
from seer.common.net.keys import own_public, with_key
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.common.slices import Slices
from seer.common.weights.digest import tag_of
from seer.common.weights.safetensors import stamps
from seer.services.engine.driver import end_process
from seer.services.engine.nodes.leader import PING_SECONDS, SILENT_SECONDS, unless_over
from seer.services.engine.nodes.same_settings import meeting, settings_of
from seer.services.engine.nodes.shares import digest_of_slices
from seer.services.engine.weights.checker import CheckedWeights, WeightChecker
from seer.services.engine.weights.fetcher import WeightFetcher

if TYPE_CHECKING:
    from seer.services.engine.vllm.ranks import VllmRanks

LEAVE_SECONDS = 15.0
"""Longest wait for the leader to end when this node was told to stop."""

_log = get_logger()


class Follower:
    """See the module's docstring. A service, see `service.run_process`."""

    def __init__(self, config: Config, transport: Transport, clock: Clock, ranks: VllmRanks) -> None:
        settings = config.engine
        self._config, self._clock, self._ranks = config, clock, ranks
        self._meeting = meeting(settings)
        name = settings.name or f"{socket.gethostname()}-{os.getpid()}"
        me = this_process("node", f"{name}-{settings.node_rank}", config)
        self._leader: Channel[wire.NodeToLeader, wire.LeaderToNode] = Channel(
            # Nodes of one engine have its key.
            transport,
            with_key(settings.leader, own_public(config.security)),
            me,
            wire.LeaderToNode,
            clock,
        )
        self._fetcher = WeightFetcher(self._leader.send, settings.weights_root)
        self._checker = WeightChecker(
            self._fetcher, settings.in_place_updates, finite=settings.finite_weights
        )
        self._checking: asyncio.Task[None] | None = None
        self._call_id = 0
        self._answer: wire.WeightsChecked | None = None
        self._met, self._leaving, self._rank_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._loading: asyncio.Future[None] | None = None

    async def start(self) -> dict[str, str]:
        """Join the leader, and load this node's ranks. Raises `SeerError`."""
        seconds = self._config.engine.load_seconds
        _log.info("joining the leader of this engine", leader=self._config.engine.leader)
        self._incarnation = (await self._leader.open(seconds)).incarnation
        self._serving: asyncio.Task[None] = asyncio.create_task(self._serve())
        try:
            await unless_over(self._join(seconds), self._serving)
            ended = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self._rank_ended.set)
            work = asyncio.to_thread(self._ranks.start, self._meeting, ended)
            self._loading = loading = asyncio.ensure_future(work)
            await unless_over(self._loaded(loading, seconds), self._serving)
        except BaseException as error:
            await self._close(str(error) or type(error).__name__)
            raise
        return {}

    async def run(self) -> None:
        """Serve until the leader ends. Raises `EngineBroken` if it broke, or a rank did."""
        problem = "it failed"
        ended = asyncio.create_task(self._rank_ended.wait())
        leaving = asyncio.create_task(self._leave())
        try:
            await asyncio.wait({self._serving, ended, leaving}, return_when=asyncio.FIRST_COMPLETED)
            problem = ""
            if self._serving.done():
                self._serving.result()
            elif ended.done():
                problem = "has lost a rank"
                raise EngineBroken("a rank of this node has ended: see its log; this node ends, too")
        finally:
            for task in (ended, leaving):
                task.cancel()
            await self._close(problem)

    def drain(self) -> None:
        """Have the leader end this engine in order."""
        self._leaving.set()

    # --- beginning and end ---------------------------------------------------------------

    async def _join(self, seconds: float) -> None:
        settings = await asyncio.to_thread(settings_of, self._config)
        join = wire.JoinNode(node_rank=self._config.engine.node_rank, settings=settings)
        deadline = self._clock.now() + seconds
        while not self._met.is_set():
            if self._clock.now() > deadline:
                fix = (
                    "it waits for other nodes, or for the end of an earlier process of this one: see its log"
                )
                limit = f"engine.load_seconds = {seconds:g}"
                raise Unreachable(
                    f"{self._config.engine.leader} did not start the ranks within {limit}: {fix}"
                )
            await self._leader.send(join)
            await self._clock.sleep(PING_SECONDS)

    async def _loaded(self, loading: asyncio.Future[None], seconds: float) -> None:
        done, _ = await asyncio.wait({loading}, timeout=seconds)
        if not done:
            limit = f"engine.load_seconds = {seconds:g}"
            raise EngineError(f"the ranks did not load within {limit}: raise it, or see the log")
        await loading

    async def _leave(self) -> None:
        await self._leaving.wait()
        await self._say(wire.Goodbye())
        await self._clock.sleep(LEAVE_SECONDS)

    async def _close(self, problem: str) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])
        if self._checking is not None:
            self._checking.cancel()
        if problem:
            await self._say(wire.Goodbye(problem=problem))
        self._leader.close()
        await self._checker.discard()
        if self._loading is not None and not self._loading.done():
            _log.error("this node ends while its ranks load", why=problem)
            end_process()  # their thread waits for ranks of other nodes
        await asyncio.to_thread(self._ranks.close)

    # --- from and to the leader ------------------------------------------------------------

    async def _serve(self) -> None:
        """Return when the leader ends in order. Raises `SeerError` when it is gone, or refuses this node."""
        pinging = asyncio.create_task(self._ping())
        try:
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    message = await self._leader.recv()
                match message:
                    case wire.Goodbye(problem=problem):
                        if problem:
                            raise EngineBroken(f"the leader has ended: {problem}")
                        return
                    case wire.Welcome(incarnation=incarnation):
                        if incarnation != self._incarnation:
                            raise EngineBroken("the leader has started again: so must this node")
                    case wire.StartRanks(host=host, port=port):
                        self._meeting.host, self._meeting.port = host, port
                        self._met.set()
                    case wire.CheckWeights():
                        await self._asked(message)
                    case wire.DiscardWeights():
                        await self._discard()
                    case wire.SpoolState() | wire.SpoolData():
                        self._fetcher.arrived(message)
                    case wire.Ping():
                        pass
        except TimeoutError as error:
            raise EngineBroken(f"the leader sent nothing for {SILENT_SECONDS:g} s: this node ends") from error
        finally:
            pinging.cancel()

    async def _ping(self) -> None:
        while True:
            await self._clock.sleep(PING_SECONDS)
            await self._say(wire.Ping())

    async def _say(self, message: wire.NodeToLeader) -> None:
        try:
            await self._leader.send(message)
        except Unreachable as error:  # who is silent for long ends the other
            _log.warning("the leader does not take messages", error=str(error))

    # --- weights -------------------------------------------------------------------------

    async def _asked(self, question: wire.CheckWeights) -> None:
        if question.call_id != self._call_id:
            await self._stop_checking()
            self._call_id, self._answer = question.call_id, None
            self._checking = asyncio.create_task(self._check(question))
        elif self._answer is not None:
            await self._say(self._answer)

    async def _check(self, question: wire.CheckWeights) -> None:
        answer = wire.WeightsChecked(call_id=question.call_id)
        try:
            folder = await (self._read if question.read else self._present)(question)
            answer.folder, answer.stamps = str(folder), await self._stamps(folder)
        except Exception as error:  # noqa: BLE001 - whatever it is, the leader must hear it
            answer.problem = (str(error) or type(error).__name__)[:1000]
        self._answer = answer
        await self._say(answer)

    async def _read(self, question: wire.CheckWeights) -> Path:
        checker = self._checker
        if question.slices:
            return await self._read_slices(question)
        if checker.model is None and self._config.shared.model:
            checker.tag = tag_of(question.digest)
            await checker.start(Path(self._config.shared.model), self._config.drafts.head)
        return await checker.checked_folder(question.source, question.digest)

    async def _read_slices(self, question: wire.CheckWeights) -> Path:
        source, slices = question.source, Slices(question.slices, question.whole)
        _log.info("this node's share of new weights", source=source, bytes=slices.size, of=slices.whole)
        folder = await self._fetcher.folder(source, slices=slices)
        before = await asyncio.to_thread(stamps, folder)
        if (found := await digest_of_slices(folder / FILE, slices)) != question.digest:
            raise EngineError(f"its share has digest {found}, not {question.digest}: send it again")
        self._checker.checked = CheckedWeights(source, found, before)
        return folder

    async def _present(self, question: wire.CheckWeights) -> Path:
        """Return the folder of what was read last, or none: it was something else."""
        if self._checker.checked.source != question.source or not self._checker.checked.digest:
            return Path()
        return await self._checker.folder(question.source)

    async def _stamps(self, folder: Path) -> str:
        if folder == Path():
            return ""
        return hashlib.blake2b(repr(await self._checker.present(folder)).encode(), digest_size=16).hexdigest()

    async def _discard(self) -> None:
        await self._stop_checking()
        await self._checker.discard()

    async def _stop_checking(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])
