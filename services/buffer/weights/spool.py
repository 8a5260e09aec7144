"""Streams of weights from a trainer to the engines: one file each, written in order.

A trainer sends a stream once. Any number of engines read it while it grows, and later: an engine that joins
when the trainer has gone on with its work still finds the stream here. Engines on the same machine read the
file itself.

Invariants (tests/unit/test_spool.py, tests/cluster/test_weight_streams.py):
- a stream has exactly the bytes whose checksums were sent with them, without gaps;
- it can be resumed after a broken connection; a complete one in a configured folder survives the buffer;
- an incomplete stream that does not grow for `SPOOL_STALL_SECONDS` is removed, and its readers get an error;
- a complete stream stays while an update or the live weights need it. If no update has named it yet, or an
  earlier incarnation of the buffer wrote it, it stays for at least `SPOOL_STALL_SECONDS` after it was opened,
  grew or was found;
- one task handles everything in turn, and puts up to `WRITES` parts aside to be written meanwhile, whose
  checksums were right. What it says to a trainer counts no byte behind one that is not written yet;
- a stream is not removed, nor begun again, while a part of it, or of its delta, is written;
- an error of the disk removes that one stream, its peers get the error, and the spool goes on;
- a stream that is sent in parts, by several ranks of a trainer, has each byte from one part; its first bytes
  are there once the parts that have them are; it and its parts are removed together. So with a delta's parts;
- a stream with a base is made from that and a delta (`spool_delta.py`), with the bytes that it would have if
  it were sent; if that fails, its trainer is asked for all bytes. The base stays until it is made;
- a new stream overwrites the file of a removed one, as allocating new pages costs more than everything else
  here. An engine that still reads that file does so for an outdated `Load`, so its result is ignored, and it
  loads again;
- messages that wait to be handled are bounded in number and bytes, and the event loop never waits for the
  disk.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from msgspec import structs

from seer.common import wire
from seer.common.blobs import WRITES, Blob, Readers, Reply, Turns, is_whole, write_at
from seer.common.clock import Clock
from seer.common.process.log import get_logger
from seer.common.process.threads import until_ended
from seer.common.weights.delta import SUFFIX as DELTA
from seer.common.weights.lora import inner_source
from seer.services.buffer.weights.spool_delta import Making
from seer.services.buffer.weights.spool_folder import SpoolFolder

SpoolRequest = wire.OpenSpool | wire.SpoolData | wire.ReadSpool

P = ParamSpec("P")
T = TypeVar("T")

_NAME = re.compile(r"v[A-Za-z0-9._-]{0,99}")
_MAX_OF_TRAINER = 32
"""Bound on a trainer's streams at once, deltas apart: unneeded ones are removed twice a second, and an
update in place takes 50 ms."""
_MAX_STREAMS = 4 * _MAX_OF_TRAINER
"""Bound on all trainers' streams."""
_MAX_PARTS_OF_STREAM = 4096
"""A rank sends one for each width of types: far more ranks than train one model."""
_MAX_QUEUED = 1024
"""Messages that wait to be handled; more are dropped, and peers send them again."""

_MAX_PARTS = 4 * wire.SPOOL_WINDOW
"""Messages with data among them: 256 MiB."""

_MAX_READERS = 4096
"""Reads that wait for their bytes."""

_log = get_logger()


class _Stream(Blob):
    """A stream that grows in order.

    `named`: an update has named it, so it is removed once no update and no live weights need it.
    `inherited`: an earlier incarnation wrote it, and nothing has needed it since: engines may not have
    registered yet. `base`: the stream that it is made from, or was; `making`: that is under way. `trainer`
    began it. `taken`: bytes that are there or are written now, as `writing` parts; the next one begins there.
    """

    def __init__(self, name: str, size: int, folder: Path, token: str, now: float, trainer: str = "") -> None:
        super().__init__(name, size, folder / name, token)
        self.trainer = trainer
        self.grew_at = now
        self.taken = self.writing = 0
        self.resend_requested = self.named = self.inherited = self.keep = False
        self.base = ""
        self.making: Making | None = None
        self.parts: list[_Part] = []  # by where they begin

    def state(self, *, resend: bool = False, problem: str = "") -> wire.SpoolState:
        """See `Blob.state`."""
        said = super().state(resend=resend, problem=problem)
        return structs.replace(said, base=self.base, keep=self.keep)

    def came(self, offset: int, length: int) -> None:
        """See `Blob.came`."""
        super().came(offset, length)
        self.taken = max(self.taken, self.have)  # of a stream that is made, or sent in parts

    @property
    def all_written(self) -> bool:
        """Whether all bytes are in the file, also if one of the last parts has not counted yet."""
        return self.taken == self.size and not self.writing

    def begin_part(self, message: wire.OpenSpool, now: float) -> _Part:
        """Begin a part of this stream. Raises `ValueError` if it is none."""
        start, end = message.start, message.start + message.size
        beside = [each for each in self.parts if each.start < end and start < each.start + each.size]
        if message.whole_size != self.size or end > self.size or not message.size:
            raise ValueError(f"is no part of {self.size} bytes: it has {start} to {end}")
        if beside or len(self.parts) >= _MAX_PARTS_OF_STREAM:
            raise ValueError(f"cannot be a part of {self.name} beside {[each.name for each in beside][:4]}")
        if not self.parts and self.have < self.size and (self.base or self.have):
            raise ValueError(f"cannot be a part: {self.name} is sent as a whole, or a delta to it")
        part = _Part(message.name, self, message, now)
        self.parts.append(part)
        self.parts.sort(key=lambda each: each.start)
        return part

    def grow(self) -> None:
        """Note the first bytes that its parts have."""
        have = self.have
        for part in self.parts:
            if part.start <= have:
                have = max(have, part.start + part.have)
        self.came(0, have)


class _Part(_Stream):
    """Bytes of the `whole` stream from `start` on, which are sent as a stream of their own."""

    def __init__(self, name: str, whole: _Stream, message: wire.OpenSpool, now: float) -> None:
        super().__init__(name, message.size, whole.folder.parent, "", now, whole.trainer)
        self.whole, self.start = whole, message.start
        self.have = self.taken = self.size if whole.have == whole.size else 0

    def put(self, part: wire.SpoolData) -> None:
        """See `Blob.put`; into the whole stream's file."""
        write_at(self.whole.file, [(self.start + part.offset, len(part.data))], part.data)

    def note(self, *, whole: bool) -> None:
        """See `Blob.note`; of the whole stream, once all its parts are written."""
        written = sum(each.size for each in self.whole.parts if each.all_written)
        if whole and written == self.whole.size:
            self.whole.note(whole=True)

    def came(self, offset: int, length: int) -> None:
        """See `Blob.came`."""
        super().came(offset, length)
        self.whole.grow()


class Spool:
    """The streams of one buffer, below `folder`; empty: in a temporary folder, deleted when `run` ends."""

    def __init__(self, folder: str, clock: Clock) -> None:
        self._folder = SpoolFolder(folder)
        self._log = _log.warning
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._writes: dict[asyncio.Task[None], _Stream] = {}
        self._removed: OrderedDict[str, str] = OrderedDict()  # by name: why it was removed
        self._turns = Turns(_MAX_QUEUED, _MAX_PARTS)
        self._readers = Readers(
            lambda name: self._streams.get(name) or self._why_removed(name) or "has no such bytes",
            _MAX_READERS,
        )

    def start(self) -> None:
        """Lock the configured folder. Raises `ConfigError` if it is not this buffer's."""
        self._folder.claim()

    def put(self, reply: Reply, address: bytes, message: SpoolRequest, trainer: str = "") -> None:
        """Queue a peer's message; it is dropped if too many wait. `trainer`: whose streams it counts to."""
        match message:
            case wire.OpenSpool():
                self._turns.add(lambda: self._open(reply, address, message, trainer))
            case wire.ReadSpool():
                self._turns.add(lambda: self._readers.answer(reply, address, message))
            case wire.SpoolData() if len(message.data) <= wire.SPOOL_BYTES:
                self._turns.add(lambda: self._write(reply, address, message), part=True)

    def name(self, source: str) -> None:
        """Note that an update names a stream: from now on it stays only while it is needed."""
        self._turns.add(lambda: self._name(inner_source(source)))

    def remove_unneeded(self, needed: set[str]) -> None:
        """Queue the removal of stalled streams, and of complete ones that no `needed` source names."""
        streams = frozenset(map(inner_source, needed))
        self._turns.add(lambda: self._remove_unneeded(streams))

    async def run(self) -> None:
        """Handle queued messages until cancelled."""
        try:
            await self._take_over()
            async with asyncio.TaskGroup() as self._writers:
                await self._turns.run()
        finally:
            self._readers.close()
            for stream in self._streams.values():
                await self._stop_making(stream)
            self._folder.release()

    async def _disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await until_ended(work, *args, **kwargs)

    async def _settle(self, stream: _Stream) -> None:
        """Wait until nothing of a stream is written, nor of its delta and parts."""
        whole = self._whole(stream)
        while writes := [task for task, of in self._writes.items() if self._whole(of) is whole]:
            await asyncio.wait(writes)

    async def _name(self, source: str) -> None:
        if (stream := self._streams.get(source.removeprefix(wire.SPOOL_SCHEME))) is not None:
            stream.named = True

    # --- removal -------------------------------------------------------------------------

    async def _remove_unneeded(self, needed: frozenset[str]) -> None:
        now = self._clock.now()
        bases = {stream.base for stream in self._streams.values() if stream.have < stream.size}
        written = [self._whole(of) for of in self._writes.values()]
        for stream in list(self._streams.values()):
            if stream.name not in self._streams or stream.name in bases or stream in written:
                continue
            if self._whole(stream) is not stream:
                continue  # a delta goes with the stream that is made from it, and a part with its stream
            quiet = now - stream.grew_at > wire.SPOOL_STALL_SECONDS
            wanted = wire.SPOOL_SCHEME + stream.name in needed
            stream.named, stream.inherited = stream.named or wanted, stream.inherited and not wanted
            if stream.have < stream.size and quiet:
                await self._remove(stream, wire.SPOOL_STALLED)
            elif not wanted and (quiet or (stream.named and not stream.inherited)):
                await self._remove(stream, "is no longer needed")

    async def _remove(self, stream: _Stream, problem: str, *, broken: bool = False) -> None:
        if isinstance(stream, _Part):
            stream = stream.whole
        await self._settle(stream)
        if (delta := self._streams.get(stream.name + DELTA)) is not None:
            await self._remove(delta, problem, broken=broken)
        for part in stream.parts:
            self._streams.pop(part.name, None)
        await self._stop_making(stream)
        del self._streams[stream.name]
        self._note_removed(stream.name, problem)
        stream.end(problem)
        try:
            if stream.name.endswith(DELTA):
                await self._disk(self._folder.remove, stream.name)
            elif broken:  # the disk may be full: free as much as possible
                await self._disk(self._folder.remove, stream.name)
                await self._disk(self._folder.remove)
            else:
                await self._disk(self._folder.keep_as_spare, stream.name)
        except OSError as error:
            _log.warning("a removed stream's file stays on disk", stream=stream.name, error=str(error))

    def _whole(self, stream: _Stream) -> _Stream:
        """Return the stream that a delta or a part, also of a delta, is for; of others, the stream itself."""
        if isinstance(stream, _Part):
            stream = stream.whole
        return self._streams.get(stream.name.removesuffix(DELTA), stream)

    def _note_removed(self, name: str, problem: str) -> None:
        self._removed[name] = problem
        while len(self._removed) > _MAX_STREAMS:
            self._removed.popitem(last=False)

    def _why_removed(self, name: str) -> str:
        """Return why a stream, or that of a part, was removed; empty: it was not, or long ago."""
        return self._removed.get(name.partition(wire.SPOOL_PART)[0], "")

    # --- messages ------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """Take over the complete streams that an earlier incarnation left in the configured folder."""
        try:
            found = await self._disk(self._folder.inherited)
        except OSError as error:
            _log.warning("streams of an earlier incarnation in the spool cannot be read", error=str(error))
            return
        for name, (size, token) in found.items():
            self._streams[name] = stream = _Stream(name, size, self._folder.root, token, self._clock.now())
            stream.inherited = True
            stream.came(0, size)

    async def _open(self, reply: Reply, address: bytes, message: wire.OpenSpool, trainer: str) -> None:
        name, size = message.name, message.size
        try:
            stream = self._streams.get(name)
            if stream is None and message.whole_size:
                stream = await self._begin_part(message, trainer)
            elif stream is None:
                stream = await self._begin(name, size, trainer)
                stream.keep, stream.base = message.keep, self._usable_base(message)
            if size:  # so that what is sent goes on where the last part that was taken ends
                await self._settle(stream)
            if size not in (0, stream.size):
                raise ValueError(f"has {stream.size} bytes, not {size}")
            if size and stream.base and not message.base:
                await self._make_no_more(stream)
            state = stream.state(resend=True)
        except (OSError, ValueError) as error:
            state = wire.SpoolState(name=name, size=size, have=0, problem=str(error))
        await reply(address, state)

    async def _begin(self, name: str, size: int, trainer: str) -> _Stream:
        if not size:
            raise ValueError(
                self._why_removed(name) or "is not in this buffer's spool: update to another version"
            )
        if not _NAME.fullmatch(name):
            raise ValueError("is not a name of a stream: give v, letters, digits, dots and dashes")
        if name.endswith(DELTA) and not (
            (whole := self._streams.get(name.removesuffix(DELTA))) and whole.base and size <= whole.size
        ):
            raise ValueError("is a delta that cannot be applied here: send the whole stream")
        if not name.endswith(DELTA):
            self._check_room(trainer)
        root = await self._disk(lambda: self._folder.root)
        stream = _Stream(name, size, root, secrets.token_hex(16), self._clock.now(), trainer)
        try:
            await self._disk(self._folder.begin, stream)
        except (OSError, ValueError) as error:
            await self._disk(self._folder.remove, name)
            self._note_removed(name, str(error))
            raise
        self._streams[name] = stream
        return stream

    async def _begin_part(self, message: wire.OpenSpool, trainer: str) -> _Stream:
        name = message.name.rpartition(wire.SPOOL_PART)[0]
        if wire.SPOOL_PART in name:
            raise ValueError("is a part of a part: give one of a stream")
        whole = self._streams.get(name) or await self._begin(name, message.whole_size, trainer)
        part = self._streams[message.name] = whole.begin_part(message, self._clock.now())
        return part

    def _check_room(self, trainer: str) -> None:
        """Raise `ValueError` if a trainer, or all together, have as many streams as they may."""
        whole = [each for each in self._streams.values() if self._whole(each) is each]
        if sum(each.trainer == trainer for each in whole) >= _MAX_OF_TRAINER:
            whose = f"trainer {trainer!r} has {_MAX_OF_TRAINER}"
        elif len(whole) >= _MAX_STREAMS:
            whose = f"the buffer holds {_MAX_STREAMS}"
        else:
            return
        raise ValueError(f"{whose} streams already: wait for an update to end")

    async def _write(self, reply: Reply, address: bytes, message: wire.SpoolData) -> None:
        stream = self._streams.get(message.name)
        if stream is None:
            # Without a problem, `OpenSpool` was lost: the trainer gets no answer and sends it again.
            if problem := self._why_removed(message.name):
                await reply(address, wire.SpoolState(name=message.name, size=0, have=0, problem=problem))
            return
        # A stream that is made takes no bytes: once it were whole, its base could go before its delta comes.
        fits = not stream.base and 0 < len(message.data) <= stream.size - stream.taken
        if message.offset != stream.taken or not fits:
            if not stream.resend_requested:  # once for all parts that are on their way
                stream.resend_requested = True
                await self._send_again(stream, reply, address)
            return
        stream.resend_requested = not await self._disk(is_whole, message)
        if stream.resend_requested:
            # A warning once, then debug: damaged parts of a peer must not fill the log.
            log, self._log = self._log, _log.debug
            log("a damaged part of a stream was received", stream=message.name, offset=message.offset)
            await self._send_again(stream, reply, address)
            return
        while len(self._writes) >= WRITES:
            await asyncio.wait(self._writes, return_when=asyncio.FIRST_COMPLETED)
        stream.taken, stream.writing = stream.taken + len(message.data), stream.writing + 1
        task = self._writers.create_task(self._store(stream, reply, address, message))
        self._writes[task] = stream
        task.add_done_callback(self._writes.pop)

    async def _send_again(self, stream: _Stream, reply: Reply, address: bytes) -> None:
        """Have a trainer send again what is not there."""
        await self._settle(stream)
        await reply(address, stream.state(resend=True))

    async def _store(self, stream: _Stream, reply: Reply, address: bytes, message: wire.SpoolData) -> None:
        """Write the next part of a stream, beside others; not in turn."""
        whole = self._whole(stream)
        try:
            await self._disk(stream.put, message)
            stream.writing -= 1
            if stream.all_written:
                await self._disk(stream.note, whole=True)
        except OSError as error:
            problem = f"cannot be stored: {error}"
            self._turns.add(lambda: self._fail(stream, reply, address, problem), always=True)
            return
        stream.came(message.offset, len(message.data))
        stream.grew_at = whole.grew_at = self._clock.now()
        await reply(address, stream.state())
        sent = stream.whole if isinstance(stream, _Part) else stream
        if sent is not whole and sent.have == sent.size:
            self._make(whole, sent, reply, address)

    async def _fail(self, stream: _Stream, reply: Reply, address: bytes, problem: str) -> None:
        """Remove a stream that cannot be written."""
        if self._streams.get(stream.name) is stream:  # another part of it may have failed, too
            _log.warning("a stream of weights failed", stream=stream.name, why=problem)
            await reply(address, stream.state(problem=problem))
            await self._remove(stream, problem, broken=True)

    # --- streams made from deltas --------------------------------------------------------

    def _usable_base(self, message: wire.OpenSpool) -> str:
        """Return the base of a new stream if the stream can be made from that; else nothing."""
        base = self._streams.get(message.base)
        if base is not None and base.have == base.size == message.size:
            return base.name
        if message.base:
            why = (
                "is not whole in this spool" if base is None or base.have < base.size else "has another size"
            )
            _log.warning("a delta is refused: its base " + why, stream=message.name, base=message.base)
        return ""

    def _make(self, stream: _Stream, delta: _Stream, reply: Reply, address: bytes) -> None:
        """Begin to make a stream from a delta that is whole."""
        if stream.making is not None:
            return
        base = self._streams[stream.base]  # it stays until the stream is whole

        def grew(have: int) -> None:
            stream.came(0, have)
            stream.grew_at = self._clock.now()

        async def ended(problem: str) -> None:
            if problem:
                _log.warning("a delta cannot be applied", stream=stream.name, base=stream.base, why=problem)
                self._turns.add(lambda: self._send_whole(stream, reply, address))
            else:
                await reply(address, stream.state())

        stream.making = Making(base, delta, stream, grew, ended)

    async def _send_whole(self, stream: _Stream, reply: Reply, address: bytes) -> None:
        """Have a trainer send all bytes of a stream."""
        if self._streams.get(stream.name) is stream:
            await self._make_no_more(stream)
            await reply(address, stream.state(resend=True))

    async def _make_no_more(self, stream: _Stream) -> None:
        """Have a stream be sent, unless it is there by now."""
        await self._settle(stream)
        await self._stop_making(stream)
        if stream.have < stream.size:
            stream.base, stream.have, stream.taken, stream.resend_requested = "", 0, 0, False
            if (delta := self._streams.get(stream.name + DELTA)) is not None:
                await self._remove(delta, "cannot be applied here: the whole stream is sent")

    async def _stop_making(self, stream: _Stream) -> None:
        if (making := stream.making) is not None:
            stream.making = None
            await making.stop()
