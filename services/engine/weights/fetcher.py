"""Fetches the weights of an update: returns the folder that holds them, copying a stream if necessary.

A source's scheme, as in `spool:v7`, says how a stream is fetched; without a scheme it is a folder.

Invariants:
- the buffer's own spool folder is used if this machine sees it (it holds the token that the buffer named);
  otherwise the stream is copied, part by part, each with a checksum: from the holders that the buffer names,
  one after the other, and what they did not give from the buffer;
- a holder that was left is not asked again for `AVOID_SECONDS`;
- a copy is deleted once it is loaded or no longer needed, also when copying failed, and is never used for
  another source;
- a stream is not copied if its size shows that it is not this model, an adapter of it or a plan, or if it
  does not fit on the disk;
- a folder lies in `engine.weights_root` if that is set, once links are resolved;
- nothing waits for ever: a stream that sends nothing for `WAIT_SECONDS` is an error;
- every problem is an `InvalidField` that names the source.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from seer.common import wire
from seer.common.clock import Clock
from seer.common.errors import ConfigError, InvalidField, SeerError, Unreachable
from seer.common.net.channel import Channel
from seer.common.net.handshake import Identity
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.common.weights.in_place import is_in_place
from seer.common.weights.lora import inner_source, is_adapter
from seer.common.weights.mooncake import SCHEME as MOONCAKE_SCHEME
from seer.common.weights.safetensors import MAX_HEADER_BYTES
from seer.services.engine.weights import mooncake_reader
from seer.services.engine.weights.copies import GONE, StreamCopy, copy_parts, on_this_machine
from seer.services.engine.weights.copy_server import CopyServer
from seer.services.engine.weights.holders import ASK_SECONDS, POLL_SECONDS, Connection, Holder
from seer.services.engine.weights.manifest import resolve_beneath

WAIT_SECONDS = 2 * wire.SPOOL_STALL_SECONDS
"""Longest wait for the buffer; longer than its own for the trainer, whose error says more."""

AVOID_SECONDS = 600.0
"""A holder that was of no use may be cut off from this engine for good, as by a firewall."""

Send = Callable[[wire.OpenSpool | wire.ReadSpool], Awaitable[None]]

FETCH: dict[str, Callable[[str, Path], Awaitable[None]]] = {MOONCAKE_SCHEME: mooncake_reader.fetch}
"""By scheme: copies the stream that the rest of a source names into a file, within its own deadlines.

Raises `OSError` or `ValueError` saying what failed. The spool's scheme is `WeightFetcher`'s own.
"""

SIZE: dict[str, Callable[[str], int]] = {MOONCAKE_SCHEME: mooncake_reader.size_of}
"""By scheme: returns the size of a stream before it is fetched. Raises `ValueError`."""


class Peers:
    """How an engine reaches the holders of streams, and serves those that copy from it."""

    def __init__(self, transport: Transport, me: Identity, clock: Clock) -> None:
        self.server = CopyServer(me)
        self.clock = clock
        self._transport, self._me = transport, me
        self._avoided: dict[str, float] = {}

    def connect(self, endpoint: str) -> Connection:
        """Return a connection that is not open yet."""
        return Channel(self._transport, endpoint, self._me, wire.HolderToEngine, self.clock)

    def avoid(self, endpoint: str) -> None:
        """Leave a holder alone for a while."""
        self._avoided[endpoint] = self.clock.now() + AVOID_SECONDS

    def usable(self, holders: Sequence[str]) -> list[str]:
        """Return the holders that are not to be avoided."""
        now = self.clock.now()
        self._avoided = {each: until for each, until in self._avoided.items() if until > now}
        return [each for each in holders if each not in self._avoided]


class WeightFetcher:
    """See the module's docstring. `send` reaches the buffer; give its answers to `arrived`.

    Without `peers` nothing is copied from other engines, nor sent to them. Raises `ConfigError` if `root`,
    which all weights must lie in, is no folder.
    """

    def __init__(self, send: Send, root: str = "", peers: Peers | None = None) -> None:
        if root and not Path(root).is_dir():
            fix = "is not a folder on this machine; give the one that all weights lie in, or leave it empty"
            raise ConfigError(f"engine.weights_root = {root!r}: {fix}")
        self._send = send
        self._root = root
        self._peers = peers
        self.model_bytes = 0
        """Bytes of all tensors of the live model; 0: unknown."""
        # Bounded by what is asked for: a window of data and a state.
        self._answers: asyncio.Queue[wire.SpoolState | wire.SpoolData] = asyncio.Queue(4 * wire.SPOOL_WINDOW)
        self._expected = ""
        self._whole = True
        self._copy: StreamCopy | None = None
        self._copied = ""

    def distrust(self) -> bool:
        """Avoid the engines that sent parts of the present copy; return whether there are any."""
        senders = self._copy.senders if self._copy is not None else []
        for endpoint in senders:
            if self._peers is not None:
                self._peers.avoid(endpoint)
        return bool(senders)

    def arrived(self, message: wire.SpoolState | wire.SpoolData) -> None:
        """Take an answer of the buffer; late and unexpected ones are dropped."""
        if message.name == self._expected:
            with contextlib.suppress(asyncio.QueueFull):
                self._answers.put_nowait(message)

    async def folder(self, source: str, holders: Sequence[str] = ()) -> Path:
        """Return the folder with these weights once all of them are there. Raises `InvalidField`.

        `holders`: endpoints of engines to copy a stream from before the buffer is asked.
        """
        self._whole = not (is_adapter(source) or is_in_place(source))
        source = inner_source(source)
        scheme = source.partition(":")[0] + ":"
        if scheme != wire.SPOOL_SCHEME and scheme not in FETCH:
            if self._root:
                return await asyncio.to_thread(resolve_beneath, Path(source), Path(self._root))
            return Path(source)
        if source == self._copied and self._copy is not None:
            return self._copy.folder
        name = source.removeprefix(scheme)
        try:
            if scheme == wire.SPOOL_SCHEME:
                return await self._receive(name, holders)
            size = SIZE[scheme](name) if scheme in SIZE else 0
            return await self._copy_by(lambda copy: FETCH[scheme](name, copy.file), name, source, size)
        except (OSError, ValueError) as error:
            raise InvalidField("source", source, str(error)) from error

    async def discard(self) -> None:
        """Delete the copy, if there is one; cancelling this does not keep it from being deleted."""
        copy, self._copy, self._copied = self._copy, None, ""
        if copy is not None:
            if self._peers is not None:
                self._peers.server.withdraw(copy)
            await copy.delete()

    async def _copy_by(
        self, fetch: Callable[[StreamCopy], Awaitable[None]], name: str, source: str, size: int
    ) -> Path:
        await self.discard()
        self._check_size(size)
        self._copy = copy = StreamCopy(name, size)
        try:
            await asyncio.to_thread(copy.begin)
            await fetch(copy)
        except BaseException:
            await self.discard()
            raise
        self._copied = source
        return copy.folder

    def _check_size(self, size: int) -> None:
        """Raise `ValueError` if a stream cannot be this model: a header, then exactly its tensors.

        An adapter may have fewer of them, and a plan has none.
        """
        most = self.model_bytes + 8 + MAX_HEADER_BYTES
        least = self.model_bytes + 8 if self._whole else 0
        if self.model_bytes and size and not least <= size <= most:
            raise ValueError(f"has {size} bytes: the model's tensors have {self.model_bytes}")

    async def _receive(self, name: str, holders: Sequence[str]) -> Path:
        self._expected = name
        try:
            return await self._received(name, holders)
        finally:
            self._expected = ""
            while not self._answers.empty():
                self._answers.get_nowait()

    async def _received(self, name: str, holders: Sequence[str]) -> Path:
        state = await self._state(name)
        self._check_size(state.size)
        if await asyncio.to_thread(on_this_machine, state):
            while state.have < state.size:
                await asyncio.sleep(POLL_SECONDS)
                state = await self._state(name)
            return Path(state.folder)
        fetch = functools.partial(self._fetch, holders)
        return await self._copy_by(fetch, name, wire.SPOOL_SCHEME + name, state.size)

    async def _fetch(self, holders: Sequence[str], copy: StreamCopy) -> None:
        """Copy a stream from the first holder that gives it, and the rest from the buffer."""
        if self._peers is not None:
            self._peers.server.offer(copy)
            usable = self._peers.usable(holders)
            for distance, endpoint in zip(range(len(usable), 0, -1), usable, strict=True):
                if await self._fetch_from(self._peers, endpoint, distance, copy):
                    return
        await copy_parts(copy, self)

    async def _fetch_from(self, peers: Peers, endpoint: str, distance: int, copy: StreamCopy) -> bool:
        """Copy what is missing from a holder; return whether that is all here now."""
        given_up: list[ValueError] = []

        async def source_has() -> int:
            try:
                return (await self._state(copy.name)).have
            except ValueError as error:
                given_up.append(error)
                raise

        copy.senders.append(endpoint)
        holder = Holder(peers.connect(endpoint), copy, distance, peers.clock, source_has)
        try:
            await holder.fetch()
        except (SeerError, ValueError) as error:
            if error in given_up:  # nobody will have more of it
                raise
            get_logger().warning("weights are not copied from an engine", engine=endpoint, why=str(error))
            if str(error) != GONE:
                peers.avoid(endpoint)
            return False
        return True

    async def _state(self, name: str) -> wire.SpoolState:
        question = wire.OpenSpool(name=name)
        await self.ask(question)
        while not isinstance(answer := await self.next([question]), wire.SpoolState):
            pass
        return answer

    async def ask(self, question: wire.OpenSpool | wire.ReadSpool) -> None:
        """Ask the buffer. If it cannot be reached it may only be stopped: it is asked again later."""
        with contextlib.suppress(Unreachable):
            await self._send(question)

    async def next(
        self, questions: Sequence[wire.OpenSpool | wire.ReadSpool]
    ) -> wire.SpoolState | wire.SpoolData:
        """Return the next answer; repeat the `questions` while there is none. Raises `ValueError`."""
        waited = 0.0
        while waited < WAIT_SECONDS:
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    answer = await self._answers.get()
            except TimeoutError:
                waited += ASK_SECONDS
                for question in questions:
                    await self.ask(question)
                continue
            if isinstance(answer, wire.SpoolState) and answer.problem:
                raise ValueError(answer.problem)
            return answer
        raise ValueError(f"the buffer sent nothing of it for {WAIT_SECONDS:g} s")
