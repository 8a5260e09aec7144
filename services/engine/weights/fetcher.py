"""Fetches the weights of an update: returns the folder that holds them, copying a stream if necessary.

A source's scheme, as in `spool:v7`, says how a stream is fetched; without a scheme it is a folder.

Invariants:
- the buffer's own spool folder is used if this machine sees it (it holds the token that the buffer named);
  otherwise the stream is copied, part by part, each with a checksum;
- a copy is deleted once it is loaded or no longer needed, also when copying failed, and is never used for
  another source;
- a stream is not copied if its size shows that it is not this model, or an adapter of it, or if it does not
  fit on the disk;
- a folder lies in `engine.weights_root` if that is set, once links are resolved;
- nothing waits for ever: a stream that sends nothing for `WAIT_SECONDS` is an error;
- every problem is an `InvalidField` that names the source.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from seer.common import wire
from seer.common.errors import InvalidField, Unreachable
from seer.common.weights.digest import SPOOL_FILE, SPOOL_NOTES, write_part
from seer.common.weights.lora import inner_source, is_adapter
from seer.common.weights.mooncake import SCHEME as MOONCAKE_SCHEME
from seer.common.weights.safetensors import MAX_HEADER_BYTES
from seer.services.engine.weights import mooncake_reader
from seer.services.engine.weights.manifest import resolve_beneath

WAIT_SECONDS = 2 * wire.SPOOL_STALL_SECONDS
"""Longest wait for the buffer; longer than its own for the trainer, whose error says more."""

ASK_SECONDS = 5.0
"""Wait for an answer before missing parts are requested again: messages can be lost."""

POLL_SECONDS = 0.05
"""Pause between two questions about a stream that still grows on this machine."""

Send = Callable[[wire.OpenSpool | wire.ReadSpool], Awaitable[None]]

FETCH: dict[str, Callable[[str, Path], Awaitable[None]]] = {MOONCAKE_SCHEME: mooncake_reader.fetch}
"""By scheme: copies the stream that the rest of a source names into a file, within its own deadlines.

Raises `OSError` or `ValueError` saying what failed. The spool's scheme is `WeightFetcher`'s own.
"""

SIZE: dict[str, Callable[[str], int]] = {MOONCAKE_SCHEME: mooncake_reader.size_of}
"""By scheme: returns the size of a stream before it is fetched. Raises `ValueError`."""


class WeightFetcher:
    """See the module's docstring. `send` reaches the buffer; give its answers to `arrived`."""

    def __init__(self, send: Send, root: str = "") -> None:
        self._send = send
        self._root = root
        self.model_bytes = 0
        """Bytes of all tensors of the live model; 0: unknown."""
        # Bounded by what is asked for: a window of data and a state.
        self._answers: asyncio.Queue[wire.SpoolState | wire.SpoolData] = asyncio.Queue(4 * wire.SPOOL_WINDOW)
        self._expected = ""
        self._whole = True
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._copied = ""

    def arrived(self, message: wire.SpoolState | wire.SpoolData) -> None:
        """Take an answer of the buffer; late and unexpected ones are dropped."""
        if message.name == self._expected:
            with contextlib.suppress(asyncio.QueueFull):
                self._answers.put_nowait(message)

    async def folder(self, source: str) -> Path:
        """Return the folder with these weights once all of them are there. Raises `InvalidField`."""
        self._whole, source = not is_adapter(source), inner_source(source)
        scheme = source.partition(":")[0] + ":"
        if scheme != wire.SPOOL_SCHEME and scheme not in FETCH:
            if self._root:
                return await asyncio.to_thread(resolve_beneath, Path(source), Path(self._root))
            return Path(source)
        if source == self._copied and self._copy is not None:
            return Path(self._copy.name)
        name = source.removeprefix(scheme)
        try:
            if scheme == wire.SPOOL_SCHEME:
                return await self._receive(name)
            fetch = functools.partial(FETCH[scheme], name)
            return await self._copy_by(fetch, source, SIZE[scheme](name) if scheme in SIZE else 0)
        except (OSError, ValueError) as error:
            raise InvalidField("source", source, str(error)) from error

    async def discard(self) -> None:
        """Delete the copy, if there is one; cancelling this does not keep it from being deleted."""
        copy, self._copy, self._copied = self._copy, None, ""
        if copy is not None:
            await asyncio.to_thread(copy.cleanup)

    async def _copy_by(self, fetch: Callable[[Path], Awaitable[None]], source: str, size: int) -> Path:
        await self.discard()
        self._check_size(size)
        self._copy = copy = tempfile.TemporaryDirectory(prefix="seer-weights-", ignore_cleanup_errors=True)
        try:
            if size > (free := shutil.disk_usage(copy.name).free):
                raise ValueError(
                    f"{size} bytes do not fit into {copy.name} ({free} free): set TMPDIR to a larger disk"
                )
            await fetch(Path(copy.name) / SPOOL_FILE)
        except BaseException:
            await self.discard()
            raise
        self._copied = source
        return Path(copy.name)

    def _check_size(self, size: int) -> None:
        """Raise `ValueError` if a stream cannot be this model: a header, then exactly its tensors.

        An adapter may have fewer of them.
        """
        most = self.model_bytes + 8 + MAX_HEADER_BYTES
        least = self.model_bytes + 8 if self._whole else 0
        if self.model_bytes and size and not least <= size <= most:
            raise ValueError(f"has {size} bytes: the model's tensors have {self.model_bytes}")

    async def _receive(self, name: str) -> Path:
        self._expected = name
        try:
            return await self._received(name)
        finally:
            self._expected = ""
            while not self._answers.empty():
                self._answers.get_nowait()

    async def _received(self, name: str) -> Path:
        state = await self._state(name)
        self._check_size(state.size)
        if await asyncio.to_thread(_on_this_machine, state):
            while state.have < state.size:
                await asyncio.sleep(POLL_SECONDS)
                state = await self._state(name)
            return Path(state.folder)
        fetch = functools.partial(self._fetch, name, state.size)
        return await self._copy_by(fetch, wire.SPOOL_SCHEME + name, state.size)

    async def _state(self, name: str) -> wire.SpoolState:
        question = wire.OpenSpool(name=name)
        await self._ask(question)
        while not isinstance(answer := await self._next([question]), wire.SpoolState):
            pass
        return answer

    async def _fetch(self, name: str, size: int, file: Path) -> None:
        """Copy a stream part by part, with `SPOOL_WINDOW` parts requested ahead."""
        asked, missing = 0, dict[int, wire.ReadSpool]()
        await asyncio.to_thread(file.touch, 0o600)
        while asked < size or missing:
            while asked < size and len(missing) < wire.SPOOL_WINDOW:
                missing[asked] = wire.ReadSpool(name=name, offset=asked)
                await self._ask(missing[asked])
                asked += wire.SPOOL_BYTES
            part = await self._next(list(missing.values()))
            if not isinstance(part, wire.SpoolData) or part.offset not in missing:
                continue
            whole = len(part.data) == min(wire.SPOOL_BYTES, size - part.offset)
            if whole and await asyncio.to_thread(write_part, file, part):
                del missing[part.offset]
            else:
                await self._ask(missing[part.offset])

    async def _ask(self, question: wire.OpenSpool | wire.ReadSpool) -> None:
        """Ask the buffer. If it cannot be reached it may only be stopped: it is asked again later."""
        with contextlib.suppress(Unreachable):
            await self._send(question)

    async def _next(
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
                    await self._ask(question)
                continue
            if isinstance(answer, wire.SpoolState) and answer.problem:
                raise ValueError(answer.problem)
            return answer
        raise ValueError(f"the buffer sent nothing of it for {WAIT_SECONDS:g} s")


def _on_this_machine(state: wire.SpoolState) -> bool:
    """Whether the buffer's spool folder is readable here: it holds the token that the buffer named."""
    try:
        return state.token in (Path(state.folder) / SPOOL_NOTES).read_text()
    except (OSError, ValueError):
        return False
