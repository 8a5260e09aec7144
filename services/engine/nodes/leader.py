"""The leader's side: has the other nodes start their ranks, and read new weights for them.

Invariants (tests/unit/test_nodes.py):
- no rank starts before all nodes have joined with the leader's own settings;
- once ranks have started, a node that leaves, breaks or is silent for `SILENT_SECONDS` ends the engine: its
  other ranks wait for that node's, and may never return;
- a question that was lost is asked again; weights that a node does not answer for in time are refused;
- other nodes read the streams that this node has, whole and checked, and no other file: only slices of them,
  once it is known what their ranks read, and only if those have this node's bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import structs

from seer.common import wire
from seer.common.blobs import FILE, Blob, Readers
from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.errors import ConfigError, EngineBroken, InvalidField
from seer.common.net.hub import Hub
from seer.common.net.identity import Identity
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.common.weights.lora import inner_source
from seer.common.wire.codec import encode
from seer.services.engine.nodes.same_settings import Meeting, difference, settings_of
from seer.services.engine.nodes.shares import RankReads, digest_of_slices, shares

PING_SECONDS = 1.0

SILENT_SECONDS = 30.0
"""A node that sends nothing for this long is gone: it pings every second, also while it loads."""

UNCONNECTED_SECONDS = 5.0
"""So is one that takes no message for this long: its process has ended, or its connection broke for good."""

ASK_SECONDS = 5.0
"""Wait for an answer before a question is sent again."""

MAX_READS = 64
"""Bound on parts of a stream that are read at once; what is beyond it is asked for again."""

_log = get_logger()


async def unless_over(work: Coroutine[Any, Any, object], serving: asyncio.Task[None]) -> None:
    """Do `work` while a connection is served. Raises why serving has ended, or `EngineBroken`."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            serving.result()
            raise EngineBroken("the leader has ended while this node joined it")
        task.result()
    finally:
        task.cancel()


class _Node(msgspec.Struct):
    """A node that has joined; `answers` are awaited, by their call's number."""

    address: bytes
    heard: float
    reached: float
    answers: dict[int, asyncio.Future[wire.WeightsChecked]] = {}


class Leader:
    """Call `start` first, then `gather` and `during`, then `run`."""

    def __init__(self, config: Config, clock: Clock, me: Identity, meeting: Meeting) -> None:
        self._config, self._clock, self._me, self._meeting = config, clock, me, meeting
        self._nodes: dict[int, _Node] = {}
        self._all_joined = asyncio.Event()
        self._call_ids = itertools.count(1)
        self._streams: dict[str, Blob] = {}
        self._asked: dict[int, wire.CheckWeights] = {}  # by the nodes' ranks, what was answered
        self._readers = Readers(self._find, MAX_READS)

    async def start(self, transport: Transport, leave: Callable[[], None], lost: Callable[[], None]) -> None:
        """Listen at `engine.leader`. Raises `ConfigError`.

        `leave` is called when a node was told to stop, `lost` when one is gone while ranks wait for it.
        """
        self._leave, self._lost = leave, lost
        try:
            router = await transport.router(self._config.engine.leader)
        except ConfigError as error:
            raise ConfigError(f"engine.leader = {self._config.engine.leader!r}: {error}") from error
        self._hub: Hub[wire.LeaderToNode, wire.NodeToLeader] = Hub(
            router, self._me, wire.NodeToLeader, require_config_hash=True, roles=frozenset({"node"})
        )
        self._settings = await asyncio.to_thread(settings_of, self._config)
        self._serving: asyncio.Task[None] = asyncio.create_task(self._serve())

    async def gather(self) -> None:
        """Wait for all nodes, and have them start their ranks. Raises `EngineBroken`."""
        seconds = self._config.engine.load_seconds
        try:
            async with asyncio.timeout(seconds):
                await self.during(self._all_joined.wait())
        except TimeoutError as error:
            missing = [rank for rank in range(1, self._config.engine.nodes) if rank not in self._nodes]
            fix = "run seer engine there with that engine.node_rank, and see its log"
            limit = f"engine.load_seconds = {seconds:g}"
            raise EngineBroken(
                f"nodes {missing} of this engine did not join within {limit}: {fix}"
            ) from error
        self._meeting.port = await asyncio.to_thread(free_port, self._meeting.host)
        for node in self._nodes.values():
            await self._hub.reply(node.address, self._start_ranks())

    async def during(self, work: Coroutine[Any, Any, object]) -> None:
        """Do `work`. Raises `EngineBroken` as soon as a node is gone."""
        await unless_over(work, self._serving)

    async def run(self) -> None:
        """Serve until cancelled. Raises `EngineBroken` when a node is gone."""
        await self._serving

    async def close(self, problem: str = "") -> None:
        """Tell all nodes to end."""
        self._serving.cancel()
        await asyncio.wait([self._serving])
        for node in self._nodes.values():
            await self._hub.reply(node.address, wire.Goodbye(problem=problem))
        self._hub.close()

    # --- weights -------------------------------------------------------------------------

    async def check(self, source: str, digest: str, folder: Path) -> tuple[str, ...]:
        """Have each node read a source; return their stamps. `folder`: where this node has it.

        Raises `InvalidField` unless all have weights of this digest.
        """
        stream = await asyncio.to_thread(_stream_of, source, folder)
        question = wire.CheckWeights(call_id=next(self._call_ids), source=source, digest=digest)
        questions = dict.fromkeys(sorted(self._nodes), question)
        self._streams, self._meeting.prove = {}, False
        if stream is not None:
            self._streams[stream.name] = stream
            if inner_source(source) == source and self._meeting.proofs is not None:  # no adapter, and no plan
                questions |= await self._about_shares(question, stream, self._meeting.proofs)
        answers = await self._ask(source, questions)
        self._asked = questions
        self._meeting.folders = [answer.folder for answer in answers]
        return tuple(answer.stamps for answer in answers)

    async def stamps(self, source: str) -> tuple[str, ...]:
        """Return the present stamps of what each node has checked. Raises `InvalidField`."""
        call_id = next(self._call_ids)
        questions = {
            rank: wire.CheckWeights(call_id=call_id, source=asked.source, read=False)
            for rank, asked in self._asked.items()
        }
        return tuple(answer.stamps for answer in await self._ask(source, questions))

    async def discard(self) -> None:
        """Have each node delete what it copied."""
        self._streams = {}
        for node in self._nodes.values():
            await self._hub.reply(node.address, wire.DiscardWeights(version=0, call_id=0))

    async def _about_shares(
        self, question: wire.CheckWeights, stream: Blob, proofs: Sequence[Sequence[RankReads]]
    ) -> dict[int, wire.CheckWeights]:
        """Return questions about the slices of a stream that nodes need, if that is known.

        Raises `InvalidField`.
        """
        questions = {}
        try:
            known = await asyncio.to_thread(shares, proofs, stream.file, sorted(self._nodes))
            for rank, part in (known or {}).items():
                name = f"part-{question.call_id}-{rank}"  # so no late answer is taken for one of another part
                self._streams[name] = Blob(name, part.size, stream.folder, have=part.size, slices=part)
                questions[rank] = structs.replace(
                    question, source=wire.SPOOL_SCHEME + name, slices=part.slices, whole=part.whole,
                    digest=await digest_of_slices(stream.file, part),
                )  # fmt: skip
        except (OSError, ValueError) as error:
            raise InvalidField("source", question.source, f"cannot be read: {error}") from error
        self._meeting.prove = known is None
        return questions

    async def _ask(
        self, source: str, questions: Mapping[int, wire.CheckWeights]
    ) -> list[wire.WeightsChecked]:
        """Return the answers to questions by the nodes' ranks. Raises `InvalidField`."""
        asked = [self._ask_node(self._nodes[rank], question) for rank, question in questions.items()]
        answers = await asyncio.gather(*asked)
        for rank, answer in zip(questions, answers, strict=True):
            if answer.problem:
                raise InvalidField("source", source, f"node {rank} of this engine: {answer.problem}")
        return list(answers)

    async def _ask_node(self, node: _Node, question: wire.CheckWeights) -> wire.WeightsChecked:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[wire.WeightsChecked] = loop.create_future()
        node.answers[question.call_id] = answer
        deadline = self._clock.now() + self._config.engine.load_seconds
        try:
            while not answer.done() and self._clock.now() < deadline:
                await self._hub.reply(node.address, question)
                await asyncio.wait({answer}, timeout=ASK_SECONDS)
            if answer.done():
                return answer.result()
            late = f"did not answer within engine.load_seconds = {self._config.engine.load_seconds:g}"
            return wire.WeightsChecked(call_id=question.call_id, problem=late)
        finally:
            del node.answers[question.call_id]

    # --- messages ------------------------------------------------------------------------

    async def _serve(self) -> None:
        tasks = {asyncio.create_task(self._receive()), asyncio.create_task(self._watch())}
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            self._readers.close()
            for task in tasks:
                task.cancel()

    async def _receive(self) -> None:
        while True:
            await self._take(*await self._hub.recv())

    async def _watch(self) -> None:
        """Ping all nodes; raise `EngineBroken` when one has been silent for too long."""
        while True:
            await self._clock.sleep(PING_SECONDS)
            now = self._clock.now()
            for rank, node in list(self._nodes.items()):
                if await self._hub.offer_frames(node.address, encode(wire.Ping())):
                    node.reached = now
                silent, unconnected = now - node.heard, now - node.reached
                if max(silent - SILENT_SECONDS, unconnected - UNCONNECTED_SECONDS) <= 0:
                    continue
                if not self._meeting.port:
                    self._forget(rank)
                elif unconnected > UNCONNECTED_SECONDS:
                    self._gone(rank, f"was not connected for {UNCONNECTED_SECONDS:g} s")
                else:
                    self._gone(rank, f"sent nothing for {SILENT_SECONDS:g} s")

    async def _take(self, address: bytes, message: wire.NodeToLeader) -> None:
        if isinstance(message, wire.JoinNode):
            await self._join(address, message)
        rank = next((rank for rank, node in self._nodes.items() if node.address == address), 0)
        if not rank:
            return
        node = self._nodes[rank]
        node.heard = self._clock.now()
        match message:
            case wire.WeightsChecked():
                if (answer := node.answers.get(message.call_id)) is not None and not answer.done():
                    answer.set_result(message)
            case wire.OpenSpool() | wire.ReadSpool():
                await self._readers.answer(self._hub.reply, address, message)
            case wire.Goodbye(problem=problem):
                if not self._meeting.port:
                    self._forget(rank)
                elif problem:
                    self._gone(rank, f"has ended: {problem}")
                else:
                    self._leave()

    async def _join(self, address: bytes, message: wire.JoinNode) -> None:
        rank = message.node_rank
        known = self._nodes.get(rank)
        problem = difference(self._settings, message.settings)
        if rank >= self._config.engine.nodes:
            problem = f"engine.node_rank = {rank}: give 1 to {self._config.engine.nodes - 1}"
        if problem:
            await self._hub.reply(address, wire.Refused(code=ConfigError.code, message=problem))
        elif known is not None and known.address == address:
            if self._meeting.port:
                await self._hub.reply(address, self._start_ranks())
        elif self._meeting.port:  # it waits until this engine has ended, and another leader has started
            await self._hub.reply(address, wire.Ping())
        else:
            if known is not None:
                fix = "give each node a rank of its own"
                why = f"another process has joined with engine.node_rank = {rank}: {fix}"
                await self._hub.reply(known.address, wire.Refused(code=ConfigError.code, message=why))
            now = self._clock.now()
            self._nodes[rank] = _Node(address, heard=now, reached=now)
            _log.info("node joined", node_rank=rank, of=self._config.engine.nodes)
            if len(self._nodes) == self._config.engine.nodes - 1:
                self._all_joined.set()

    def _forget(self, rank: int) -> None:
        self._nodes.pop(rank, None)  # it may have left while it was pinged
        self._all_joined.clear()

    def _start_ranks(self) -> wire.StartRanks:
        return wire.StartRanks(host=self._meeting.host, port=self._meeting.port)

    def _gone(self, rank: int, why: str) -> NoReturn:
        problem = f"node {rank} of this engine {why}: the engine ends, and starts again"
        _log.error(problem)  # the process may end at once
        self._lost()
        raise EngineBroken(problem)

    def _find(self, name: str) -> Blob | str:
        return self._streams.get(name, "the leader has no copy of it any more")


def _stream_of(source: str, folder: Path) -> Blob | None:
    """Return the stream that a source names, which is whole in `folder`. Raises `InvalidField`."""
    scheme, _, name = inner_source(source).partition(":")
    if scheme + ":" != wire.SPOOL_SCHEME:
        return None
    try:
        size = (folder / FILE).stat().st_size
    except OSError as error:
        raise InvalidField("source", source, f"cannot be read: {error}") from error
    return Blob(name, size, folder, have=size)


def free_port(host: str) -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
