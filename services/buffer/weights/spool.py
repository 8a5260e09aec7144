"""Streams of weights on their way from a trainer to the engines: one file each, written in order.

A trainer sends a stream once; any number of engines read it while it grows, and again later: an
engine that joins after the trainer went on finds it here. Engines on this machine read the file.

Invariants (tests/unit/test_spool.py, tests/cluster/test_weight_streams.py):
- a stream holds exactly the bytes whose checksums were sent with them, without gaps;
- it can be resumed after a broken connection; a whole one in a configured folder survives the buffer;
- a stream that does not grow for `SPOOL_STALL_SECONDS` before it is whole ends, and its readers hear
  so; a whole one stays while an update or the live weights need it, and one that no update has named
  yet, or that an earlier life left, stays for as long since it was opened, grew or was found;
- one task does everything, one thing after the other: nothing ends a stream while a part is written;
- whatever the disk refuses ends that one stream, its peers hear why, and the spool goes on;
- the file of one that is over is written over by the next: new pages cost more than all else here.
  Who still reads it, on an order that is over, too, is not believed, and loads again;
- what waits to be handled is bounded, in messages and bytes, and the disk is never waited for on the loop.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from seer.common import wire
from seer.common.clock import Clock
from seer.common.process.log import get_logger
from seer.services.buffer.weights.spool_folder import SpoolFolder

Reply = Callable[[bytes, wire.SpoolState | wire.SpoolData], Awaitable[None]]
"""Sends an answer to a peer's address, or loses it if the peer does not read."""

Asked = wire.OpenSpool | wire.SpoolData | wire.ReadSpool

P = ParamSpec("P")
T = TypeVar("T")

_NAME = re.compile(r"v[A-Za-z0-9._-]{0,99}")
_MAX_STREAMS = 8
_MAX_QUEUED = 1024
"""Requests waiting to be handled; more are dropped, and asked for again."""

_MAX_PARTS = 4 * wire.SPOOL_WINDOW
"""Of these, those that carry data: 64 MiB."""

_MAX_READERS = 4096
"""Reads of one stream that wait for its bytes."""

_log = get_logger()


@dataclass(slots=True)
class _Stream:
    name: str
    size: int
    folder: Path
    token: str
    have: int
    grew: float
    asked_again: bool = False
    named: bool = False
    """An update has named it: it is kept for as long as it is needed, and no longer."""
    inherited: bool = False
    """From an earlier life, and not needed since: engines that have it live may not be back yet."""
    readers: dict[tuple[bytes, int], Reply] = field(default_factory=dict)

    def state(self, *, resend: bool = False, problem: str = "") -> wire.SpoolState:
        return wire.SpoolState(
            name=self.name,
            size=self.size,
            have=self.have,
            resend=resend,
            folder=str(self.folder),
            token=self.token,
            problem=problem,
        )


@dataclass(frozen=True, slots=True)
class _Named:
    source: str


@dataclass(frozen=True, slots=True)
class _Tidy:
    needed: frozenset[str]


class Spool:
    """The streams of one buffer, below `folder`, or in a temporary one that ends with the process."""

    def __init__(self, folder: str, clock: Clock) -> None:
        self._folder = SpoolFolder(folder)
        self._log = _log.warning
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._queue: asyncio.Queue[tuple[Reply, bytes, Asked] | _Named | _Tidy] = asyncio.Queue(_MAX_QUEUED)
        self._parts = 0

    def start(self) -> None:
        """Take the configured folder. Raises `ConfigError` where it is not this buffer's."""
        self._folder.claim()

    def put(self, reply: Reply, address: bytes, message: Asked) -> None:
        """Have a peer's message handled soon."""
        part = isinstance(message, wire.SpoolData)
        if isinstance(message, wire.SpoolData) and len(message.data) > wire.SPOOL_BYTES:
            return
        if not self._queue.full() and not (part and self._parts >= _MAX_PARTS):
            self._parts += part
            self._queue.put_nowait((reply, address, message))

    def name(self, source: str) -> None:
        """Take note that an update names a stream: from now on it stays only while it is needed."""
        if source.startswith(wire.SPOOL_SCHEME) and not self._queue.full():
            self._queue.put_nowait(_Named(source))

    def tidy(self, needed: set[str]) -> None:
        """Soon end streams that stand still, and drop whole ones that no `needed` source names any more."""
        if not self._queue.full():
            self._queue.put_nowait(_Tidy(frozenset(needed)))

    async def run(self) -> None:
        """Handle what was put until cancelled."""
        try:
            await self._inherit()
            while True:
                match await self._queue.get():
                    case _Named(source):
                        if (stream := self._streams.get(source.removeprefix(wire.SPOOL_SCHEME))) is not None:
                            stream.named = True
                    case _Tidy(needed):
                        await self._tidy(needed)
                    case (reply, address, wire.OpenSpool() as message):
                        await reply(address, await self._open(message))
                    case (reply, address, wire.SpoolData() as message):
                        self._parts -= 1
                        await self._take(message, address, reply)
                    case (reply, address, wire.ReadSpool() as message):
                        await self._read(message.name, message.offset, address, reply)
        finally:
            self._folder.release()

    async def _disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have a thread do something that waits for the disk; it is over when this returns or raises."""
        job = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await asyncio.wait([job])
            raise

    # --- the end of streams --------------------------------------------------------------

    async def _tidy(self, needed: frozenset[str]) -> None:
        now = self._clock.now()
        for stream in list(self._streams.values()):
            quiet = now - stream.grew > wire.SPOOL_STALL_SECONDS
            wanted = wire.SPOOL_SCHEME + stream.name in needed
            stream.named, stream.inherited = stream.named or wanted, stream.inherited and not wanted
            if stream.have < stream.size and quiet:
                await self._end(stream, f"the trainer sent nothing for {wire.SPOOL_STALL_SECONDS:g} s")
            elif not wanted and (quiet or (stream.named and not stream.inherited)):
                await self._end(stream, "is no longer needed")

    async def _end(self, stream: _Stream, problem: str, *, broken: bool = False) -> None:
        del self._streams[stream.name]
        self._remember(stream.name, problem)
        for (address, _), reply in stream.readers.items():
            await reply(address, stream.state(problem=problem))
        try:
            if broken:  # the disk may be full: give it all back
                await self._disk(self._folder.remove, stream.name)
                await self._disk(self._folder.remove)
            else:
                await self._disk(self._folder.keep_as_spare, stream.name)
        except OSError as error:
            _log.warning("a stream's file stays", stream=stream.name, error=str(error))

    def _remember(self, name: str, problem: str) -> None:
        self._ended[name] = problem
        while len(self._ended) > _MAX_STREAMS:
            self._ended.popitem(last=False)

    # --- messages ------------------------------------------------------------------------

    async def _inherit(self) -> None:
        """Take over what an earlier life of this buffer left in the configured folder: whole streams."""
        try:
            found = await self._disk(self._folder.inherited)
        except OSError as error:
            _log.warning("what an earlier life left in the spool cannot be read", error=str(error))
            return
        for name, (size, token) in found.items():
            folder = self._folder.root / name
            self._streams[name] = _Stream(name, size, folder, token, size, self._clock.now(), inherited=True)

    async def _open(self, message: wire.OpenSpool) -> wire.SpoolState:
        name, size = message.name, message.size
        stream = self._streams.get(name)
        if stream is None:
            try:
                stream = await self._begin(name, size)
            except (OSError, ValueError) as error:
                return wire.SpoolState(name=name, size=size, have=0, problem=str(error))
        if size not in (0, stream.size):
            return stream.state(problem=f"has {stream.size} bytes, not {size}")
        return stream.state(resend=True)

    async def _begin(self, name: str, size: int) -> _Stream:
        if not size:
            raise ValueError(
                self._ended.get(name, "is not in this buffer's spool: update to another version")
            )
        if not _NAME.fullmatch(name):
            raise ValueError("is no name of a stream: give v, letters, digits, dots and dashes")
        if len(self._streams) >= _MAX_STREAMS:
            raise ValueError(f"the buffer holds {_MAX_STREAMS} streams already: wait for an update to end")
        token = secrets.token_hex(16)
        try:
            await self._disk(self._folder.begin, name, size, token)
            folder = self._folder.root / name
        except (OSError, ValueError) as error:
            await self._disk(self._folder.remove, name)
            self._remember(name, str(error))
            raise
        self._streams[name] = stream = _Stream(name, size, folder, token, 0, self._clock.now())
        return stream

    async def _take(self, message: wire.SpoolData, address: bytes, reply: Reply) -> None:
        stream = self._streams.get(message.name)
        if stream is None:
            # Else its opening was lost with a connection: the trainer opens it again as nothing is confirmed.
            if problem := self._ended.get(message.name):
                await reply(address, wire.SpoolState(name=message.name, size=0, have=0, problem=problem))
            return
        fits = 0 < len(message.data) <= stream.size - stream.have
        if message.offset != stream.have or not fits:
            if not stream.asked_again:  # once for all that is under way
                stream.asked_again = True
                await reply(address, stream.state(resend=True))
            return
        try:
            sound = await self._disk(self._folder.write, message)
            if sound and stream.have + len(message.data) == stream.size:
                await self._disk(self._folder.note, stream.name, stream.size, stream.token, whole=True)
        except OSError as error:
            problem = f"cannot be stored: {error}"
            _log.warning("a stream of weights failed", stream=stream.name, why=problem)
            await reply(address, stream.state(problem=problem))
            await self._end(stream, problem, broken=True)
            return
        stream.asked_again = not sound
        if sound:
            stream.have += len(message.data)
            stream.grew = self._clock.now()
        else:  # the first is told: whoever sends damaged parts could fill a log with them
            log, self._log = self._log, _log.debug
            log("damaged weights arrived", stream=message.name, offset=message.offset)
        await reply(address, stream.state(resend=not sound))
        waiting, stream.readers = stream.readers, {}
        for (reader, offset), answer in waiting.items():
            await self._read(stream.name, offset, reader, answer)

    async def _read(self, name: str, offset: int, address: bytes, reply: Reply) -> None:
        stream = self._streams.get(name)
        if stream is None or offset >= stream.size:
            problem = self._ended.get(name, "has no such bytes")
            await reply(address, wire.SpoolState(name=name, size=0, have=0, problem=problem))
            return
        length = min(wire.SPOOL_BYTES, stream.size - offset)
        if stream.have < offset + length:
            if len(stream.readers) < _MAX_READERS:
                stream.readers[address, offset] = reply
            return
        try:
            data, checksum = await self._disk(self._folder.read, name, offset, length)
        except OSError as error:
            await reply(address, stream.state(problem=f"cannot be read: {error}"))
            return
        await reply(address, wire.SpoolData(name=name, offset=offset, checksum=checksum, data=data))
