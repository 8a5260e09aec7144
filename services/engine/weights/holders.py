"""Copies of streams of weights: where an engine gets its own, and how it gives that to other engines.

Invariants (tests/unit/test_weight_holders.py, tests/cluster/test_fan_out.py):
- the buffer is given up after `WAIT_SECONDS` without an answer;
- an engine that is dead, or answers nothing, is left after `HOLDER_SECONDS`;
- so is one that has bytes, but sends fewer than `HOLDER_BYTES` in that time;
- one that has no more to send is left only if the buffer has more, and later the more holders there are
  between the two: whoever is nearest to the fault leaves first, and the others need not;
- a holder that was left is not asked again for `AVOID_SECONDS`; what was copied so far is kept;
- a part is given once its checksum was right here, also while the copy still grows; an engine that has not
  begun a copy says so, and one that has deleted it says that, at once, to all who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from seer.common import wire
from seer.common.blobs import Answer, Asked, Blob, EndedForAll, Question, Readers
from seer.common.clock import Clock
from seer.common.errors import ConfigError, SeerError, Unreachable
from seer.common.net.channel import Channel
from seer.common.net.hub import Hub
from seer.common.net.identity import Identity
from seer.common.net.keys import with_key
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.common.slices import Slices
from seer.common.weights.mooncake import own_address

WAIT_SECONDS = 2 * wire.SPOOL_STALL_SECONDS
"""Longest wait for the buffer; longer than its own for the trainer, whose error says more."""

HOLDER_SECONDS = 10.0
"""How often it is judged whether a holder sends enough, and the longest wait for its first answer."""

HOLDER_BYTES = 200_000_000
"""What a holder that has so many must send in that time: 20 MB/s."""

MAX_READS = 512
"""Bound on questions that wait for their parts; those beyond it are asked again."""

AVOID_SECONDS = 600.0
"""A holder that was of no use may be cut off from this engine for good, as by a firewall."""

MAX_GONE = 4
"""Streams of which it is remembered that there is no copy; an update has two."""

OFF = "off"

GONE = "this engine has no copy of it any more"


class Copy(Blob):
    """A copy of a stream, in a temporary folder. Raises `OSError` if that cannot be made.

    `senders`: endpoints of other engines that parts may be from, so a wrong digest may be their fault.
    """

    def __init__(self, name: str, size: int, slices: Slices | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="seer-weights-", ignore_cleanup_errors=True)
        super().__init__(name, size, Path(self._temporary.name), secrets.token_hex(16), slices=slices)
        self.senders: list[str] = []

    def delete(self) -> None:
        """Delete the folder; blocks. Call `end` before, as readers may wait for parts."""
        self._temporary.cleanup()


class Peers:
    """The other engines: how this one reaches the holders of copies, and gives them its own.

    Call `start` before all else.
    """

    def __init__(self, transport: Transport, me: Identity, clock: Clock) -> None:
        self.clock = clock
        self.readers = Readers(self._find, MAX_READS)
        self._transport, self._me = transport, me
        self._avoided: dict[str, float] = {}
        self._copies: dict[str, Copy] = {}
        self._gone: deque[str] = deque(maxlen=MAX_GONE)
        self._host = ""
        self._hub: Hub[wire.HolderToEngine, wire.EngineToHolder] | None = None

    # --- giving --------------------------------------------------------------------------

    async def start(self, configured: str, buffer: str, key: str = "") -> str:
        """Listen at the `configured` endpoint; return where, or nothing if there is no need.

        `key` is the public one that answers there. Default: the address by which this machine reaches the
        `buffer`. Raises `ConfigError`.
        """
        endpoint = configured or await asyncio.to_thread(_default_endpoint, buffer)
        if endpoint in ("", OFF):
            return ""
        try:
            router = await self._transport.router(endpoint)
        except ConfigError as error:
            raise ConfigError(f"engine.weights_endpoint = {configured!r}: {error}") from error
        self._hub = Hub(
            router, self._me, wire.EngineToHolder, require_config_hash=True, roles=frozenset({"engine"})
        )
        self._host = _host(router.endpoint)
        return with_key(router.endpoint, key)

    def offer(self, copy: Copy) -> None:
        """Give this copy from now on."""
        self._copies[copy.name] = copy

    def withdraw(self, copy: Copy) -> None:
        """Give it no more."""
        if self._copies.get(copy.name) is copy:
            del self._copies[copy.name]
            self.decline(copy.name)

    def decline(self, name: str) -> None:
        """Say from now on that there is no copy of a stream, and will be none."""
        if name not in self._gone:
            self._gone.append(name)

    def beside(self, endpoint: str) -> bool:
        """Whether a holder has this one's own address, so its files are likely to be here."""
        return _host(endpoint) == self._host

    @property
    def serving(self) -> bool:
        """Whether other engines can copy from this one."""
        return self._hub is not None

    async def run(self) -> None:
        """Answer questions until cancelled."""
        hub = self._hub
        if hub is None:
            return
        try:
            while True:
                address, message = await hub.recv()
                if isinstance(message, wire.OpenSpool | wire.ReadSpool):
                    await self.readers.answer(hub.reply, address, message)
        finally:
            self.readers.close()

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._hub is not None:
            self._hub.close()

    def _find(self, name: str) -> Blob | str:
        return self._copies.get(name) or (GONE if name in self._gone else "")

    # --- fetching ------------------------------------------------------------------------

    def connect(self, endpoint: str) -> Channel[wire.EngineToHolder, wire.HolderToEngine]:
        """Return a connection that is not open yet."""
        return Channel(self._transport, endpoint, self._me, wire.HolderToEngine, self.clock)

    async def whole_size(self, name: str, holders: Sequence[str]) -> int:
        """Return the bytes of a stream by the first holder that has all of it; 0: none has."""
        for endpoint in self.usable(holders):
            connection = self.connect(endpoint)
            try:
                await connection.open(HOLDER_SECONDS)
                async with asyncio.timeout(HOLDER_SECONDS):
                    await connection.send(wire.OpenSpool(name=name))
                    while not isinstance(state := await connection.recv(), wire.SpoolState):
                        pass
                if 0 < state.size == state.have:
                    return state.size
            except (SeerError, TimeoutError) as error:
                get_logger().info("an engine does not say what it has", engine=endpoint, why=str(error))
            finally:
                connection.close()
        return 0

    def avoid(self, endpoint: str) -> None:
        """Leave a holder alone for a while."""
        self._avoided[endpoint] = self.clock.now() + AVOID_SECONDS

    def usable(self, holders: Sequence[str]) -> list[str]:
        """Return the holders that are not to be avoided."""
        now = self.clock.now()
        self._avoided = {each: until for each, until in self._avoided.items() if until > now}
        return [each for each in holders if each not in self._avoided]


class Buffer(Asked):
    """The buffer, or an engine's leader: asked until it says that there is no more of it.

    `send` reaches it; give its answers to `arrived`.
    """

    def __init__(self, name: str, send: Callable[[Question], Awaitable[None]]) -> None:
        # Bounded by what is asked for: a window of data and a state.
        self._answers: asyncio.Queue[Answer] = asyncio.Queue(4 * wire.SPOOL_WINDOW)
        super().__init__(name, send, self._answers.get)

    def arrived(self, answer: Answer) -> None:
        """Take an answer; those of no use are dropped."""
        if answer.name == self.name:
            with contextlib.suppress(asyncio.QueueFull):
                self._answers.put_nowait(answer)

    async def patience(self) -> float:
        """See `Asked`."""
        if self.silent >= WAIT_SECONDS:
            raise ValueError(f"the buffer sent nothing of it for {WAIT_SECONDS:g} s")
        return WAIT_SECONDS

    async def ask(self, question: Question) -> None:
        """If it cannot be reached it may only be stopped: it is asked again later."""
        with contextlib.suppress(Unreachable):
            await super().ask(question)


class Patience(msgspec.Struct):
    """Whether to stay with a holder: ask once every `HOLDER_SECONDS`. Pure.

    `distance`: holders between this engine and the buffer, that one included. When the interval began, `got`
    bytes were here, and the holder had `had`. `still`: intervals in which it got no further.
    """

    distance: int
    got: int
    had: int = 0
    still: int = 0

    def problem(self, got: int, had: int | None) -> str:
        """Return what is wrong with a holder, and begin the next interval; empty: nothing.

        `got`: bytes that are here; `had`: bytes that the holder had when asked at the interval's beginning;
        None: it did not answer.
        """
        before, self.got = self.got, got
        last, self.had = self.had, had or 0
        if got - before >= HOLDER_BYTES:
            self.still = 0
        elif had is None:
            return f"answered nothing for {HOLDER_SECONDS:g} s"
        elif got < min(had, before + HOLDER_BYTES):
            return f"has {had} bytes of it, and sent only {got - before} in {HOLDER_SECONDS:g} s"
        elif got > before or had > last:
            self.still = 0
        else:
            self.still += 1
        return ""

    @property
    def waited_in_vain(self) -> bool:
        """Whether to leave a holder that got no further, if the buffer has more than is here."""
        return self.still >= self.distance


class Holder(Asked):
    """One engine, at `endpoint`, that has a copy of a stream, or makes one; `distance`: see `Patience`."""

    def __init__(self, peers: Peers, endpoint: str, copy: Copy, distance: int, buffer: Buffer) -> None:
        self._connection = peers.connect(endpoint)
        super().__init__(copy.name, self._connection.send, self._connection.recv)
        self._peers, self.endpoint, self._copy, self._buffer = peers, endpoint, copy, buffer
        self._clock, self._distance, self._linking = peers.clock, distance, True

    def left(self, why: Exception) -> None:
        """Avoid it for a while, if it was of no use."""
        get_logger().warning("weights are not copied from an engine", engine=self.endpoint, why=str(why))
        if str(why) != GONE:
            self._peers.avoid(self.endpoint)

    async def fetch(self, blob: Blob) -> None:
        """Take the holder's whole file itself, if it is on this machine, or copy what is missing."""
        self._copy.senders.append(self.endpoint)
        self._patience = Patience(self._distance, blob.arrived)
        try:
            await self._connection.open(HOLDER_SECONDS)
            self._check_at = self._clock.now() + HOLDER_SECONDS
            folder = await self.whole_here()
            self._linking = False
            if folder is None or not await blob.link(folder):
                await super().fetch(blob)
        finally:
            self._connection.close()

    async def patience(self) -> float:
        """See `Asked`."""
        while (left := self._check_at - self._clock.now()) <= 0:
            await self._check()
        return left

    async def _check(self) -> None:
        """Raise `ValueError` if this holder is to be left; else begin the next interval."""
        self._check_at = self._clock.now() + HOLDER_SECONDS
        got, had, self.had = self._copy.arrived, self.had, None
        # Nothing is sent when the holder's own file is taken: what it has counts as here.
        if problem := self._patience.problem(max(got, had or 0) if self._linking else got, had):
            raise ValueError(problem)
        if self._patience.waited_in_vain:
            try:
                there = (await self._buffer.state()).have
            except ValueError as error:
                lost = self._buffer.had is None  # others have it all
                raise (ValueError if lost else EndedForAll)(str(error)) from error
            if there > max(got, had or 0):
                raise ValueError(f"got no further for {self._patience.still * HOLDER_SECONDS:g} s")
        await self.ask(wire.OpenSpool(name=self.name))


def _host(endpoint: str) -> str:
    return endpoint.partition("://")[2].rpartition(":")[0]


def _default_endpoint(buffer: str) -> str:
    """Return a free port of the address that reaches the buffer; empty if the buffer is on this machine."""
    scheme, _, address = buffer.partition("://")
    if scheme != "tcp":
        return ""
    try:
        own = own_address(address)
    except (OSError, ValueError) as error:
        get_logger().warning("weights are not sent on to other engines", buffer=buffer, why=str(error))
        return ""
    return "" if own.startswith("127.") else f"tcp://{own}:0"
