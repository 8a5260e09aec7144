"""Streams of weights on their way from a trainer to the engines: one file each, written in order.

A trainer sends a stream once; any number of engines read it while it grows, and again later: an
engine that joins after the trainer went on finds it here. Engines on this machine read the file.

Invariants:
- a stream holds exactly the bytes whose checksums were sent with them, without gaps;
- it can be resumed after a broken connection; a whole one in a configured folder survives the buffer;
- a stream that does not grow for `SPOOL_STALL_SECONDS` before it is whole ends, and its readers hear
  so; a whole one stays while an update or the live weights need it;
- the file of one that is over is written over by the next: new pages cost more than all else here.
  Who still reads it, on an order that is over, too, is not believed, and loads again;
- what waits to be handled is bounded, and nothing here delays the buffer's loop by more than a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from seer.common.clock import Clock
from seer.common.log import get_logger
from seer.common.weights import SPOOL_FILE, SPOOL_NOTES, checksum, write_part
from seer.common.wire import messages as m

Reply = Callable[[bytes, m.SpoolState | m.SpoolData], Awaitable[None]]
"""Sends an answer to a peer's address, or loses it if the peer does not read."""

Asked = m.OpenSpool | m.SpoolData | m.ReadSpool

_NAME = re.compile(r"v[A-Za-z0-9._-]{0,99}")
_MAX_STREAMS = 8
_MAX_QUEUED = 1024
"""Requests waiting to be handled; more are dropped, and asked for again."""

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
    inherited: bool = False
    readers: dict[tuple[bytes, int], Reply] = field(default_factory=dict)

    def note(self) -> None:
        """Write down what a reader, or a later life of the buffer, has to know. Raises `OSError`."""
        notes = {"size": self.size, "token": self.token, "whole": self.have == self.size}
        (self.folder / SPOOL_NOTES).write_text(json.dumps(notes))

    def state(self, *, resend: bool = False, problem: str = "") -> m.SpoolState:
        return m.SpoolState(
            name=self.name,
            size=self.size,
            have=self.have,
            resend=resend,
            folder=str(self.folder),
            token=self.token,
            problem=problem,
        )


class Spool:
    """The streams of one buffer, in `folder`, or in a temporary one that ends with the process."""

    def __init__(self, folder: str, clock: Clock) -> None:
        self._configured = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._queue: asyncio.Queue[tuple[Reply, bytes, Asked]] = asyncio.Queue(_MAX_QUEUED)

    def put(self, reply: Reply, address: bytes, message: Asked) -> None:
        """Have a peer's message handled soon."""
        if not self._queue.full():
            self._queue.put_nowait((reply, address, message))

    async def run(self) -> None:
        """Handle messages until cancelled."""
        self._inherit()
        try:
            while True:
                reply, address, message = await self._queue.get()
                match message:
                    case m.OpenSpool():
                        await reply(address, self._open(message))
                    case m.SpoolData():
                        await self._take(message, address, reply)
                    case m.ReadSpool():
                        await self._read(message.name, message.offset, address, reply)
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    async def tidy(self, needed: set[str]) -> None:
        """End streams that stand still, and drop whole ones that no `needed` source names any more."""
        now = self._clock.now()
        for stream in list(self._streams.values()):
            quiet = now - stream.grew > m.SPOOL_STALL_SECONDS
            if stream.have < stream.size and quiet:
                await self._end(stream, f"the trainer sent nothing for {m.SPOOL_STALL_SECONDS:g} s")
            elif (quiet or not stream.inherited) and m.SPOOL_SCHEME + stream.name not in needed:
                await self._end(stream, "is no longer needed")

    async def _end(self, stream: _Stream, problem: str) -> None:
        del self._streams[stream.name]
        shutil.rmtree(self._spare, ignore_errors=True)
        with contextlib.suppress(OSError):
            stream.folder.rename(self._spare)
        self._ended[stream.name] = problem
        while len(self._ended) > _MAX_STREAMS:
            self._ended.popitem(last=False)
        for (address, _), reply in stream.readers.items():
            await reply(address, stream.state(problem=problem))

    @property
    def _spare(self) -> Path:
        return self._root() / "spare"

    def _root(self) -> Path:
        if self._configured:
            return Path(self._configured)
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="seer-weights-")
        return Path(self._temporary.name)

    # --- messages ------------------------------------------------------------------------

    def _open(self, message: m.OpenSpool) -> m.SpoolState:
        name, size = message.name, message.size
        try:
            stream = self._streams.get(name) or self._begin(name, size)
        except (OSError, ValueError) as error:
            return m.SpoolState(name=name, size=size, have=0, problem=str(error))
        if size not in (0, stream.size):
            return stream.state(problem=f"has {stream.size} bytes, not {size}")
        self._streams[name] = stream
        return stream.state(resend=True)

    def _inherit(self) -> None:
        """Take over what an earlier life of this buffer left in the configured folder: whole streams."""
        for folder in Path(self._configured).glob("v*") if self._configured else ():
            try:
                notes = json.loads((folder / SPOOL_NOTES).read_bytes())
                size, token = int(notes["size"]), str(notes["token"])
                if notes["whole"]:
                    now = self._clock.now()
                    stream = _Stream(folder.name, size, folder, token, size, now, inherited=True)
                    self._streams[folder.name] = stream
                    continue
            except (OSError, ValueError, LookupError, TypeError) as error:
                _log.warning("a stream of weights cannot be read", folder=str(folder), error=str(error))
            shutil.rmtree(folder, ignore_errors=True)

    def _begin(self, name: str, size: int) -> _Stream:
        if not size:
            raise ValueError(
                self._ended.get(name, "is not in this buffer's spool: update to another version")
            )
        if not _NAME.fullmatch(name):
            raise ValueError("is no name of a stream: give v, letters, digits, dots and dashes")
        if len(self._streams) >= _MAX_STREAMS:
            raise ValueError(f"the buffer holds {_MAX_STREAMS} streams already: wait for an update to end")
        folder = self._root() / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            self._spare.rename(folder)
        folder.mkdir(exist_ok=True)
        file = folder / SPOOL_FILE
        if file.exists() and file.stat().st_size != size:
            file.unlink()
        free = shutil.disk_usage(folder).free
        if not file.exists() and size > free:
            shutil.rmtree(folder)
            raise ValueError(
                f"{size} bytes do not fit into {self._root()} ({free} free): set buffer.spool to a larger one"
            )
        file.touch()
        stream = _Stream(name, size, folder, secrets.token_hex(16), 0, self._clock.now())
        stream.note()
        return stream

    async def _take(self, message: m.SpoolData, address: bytes, reply: Reply) -> None:
        stream = self._streams.get(message.name)
        if stream is None:
            await reply(
                address, m.SpoolState(name=message.name, size=0, have=0, problem="open the stream first")
            )
            return
        fits = 0 < len(message.data) <= stream.size - stream.have
        if message.offset != stream.have or not fits:
            if not stream.asked_again:  # once for all that is under way
                stream.asked_again = True
                await reply(address, stream.state(resend=True))
            return
        try:
            sound = await asyncio.to_thread(_append, stream.folder / SPOOL_FILE, message)
        except OSError as error:
            await reply(address, stream.state(problem=f"cannot be stored: {error}"))
            await self._end(stream, f"cannot be stored: {error}")
            return
        stream.asked_again = not sound
        if sound:
            stream.have += len(message.data)
            stream.grew = self._clock.now()
            if stream.have == stream.size:
                stream.note()
        await reply(address, stream.state(resend=not sound))
        waiting, stream.readers = stream.readers, {}
        for (reader, offset), answer in waiting.items():
            await self._read(stream.name, offset, reader, answer)

    async def _read(self, name: str, offset: int, address: bytes, reply: Reply) -> None:
        stream = self._streams.get(name)
        if stream is None or offset >= stream.size:
            await reply(address, m.SpoolState(name=name, size=0, have=0, problem="has no such bytes"))
            return
        length = min(m.SPOOL_BYTES, stream.size - offset)
        if stream.have < offset + length:
            if len(stream.readers) < _MAX_READERS:
                stream.readers[address, offset] = reply
            return
        try:
            data, checksum = await asyncio.to_thread(_slice, stream.folder / SPOOL_FILE, offset, length)
        except (OSError, ValueError) as error:
            await reply(address, stream.state(problem=f"cannot be read: {error}"))
            return
        await reply(address, m.SpoolData(name=name, offset=offset, checksum=checksum, data=data))


def _append(file: Path, message: m.SpoolData) -> bool:
    """Write data at its place unless its checksum is wrong."""
    opened = os.open(file, os.O_WRONLY)
    try:
        sound = write_part(opened, message)
    finally:
        os.close(opened)
    if not sound:
        _log.warning("damaged weights arrived", stream=message.name, offset=message.offset)
    return sound


def _slice(file: Path, offset: int, length: int) -> tuple[m.Bytes, int]:
    with file.open("rb") as opened:
        data = os.pread(opened.fileno(), length, offset)
    if len(data) < length:
        raise ValueError(f"{file} was cut off")
    part = np.frombuffer(data, dtype=np.uint8)
    return part, checksum(part)
