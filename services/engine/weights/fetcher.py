"""Fetches the weights of an update: returns the folder that holds them, copying a stream if necessary.

A source's scheme, as in `spool:v7`, says how a stream is fetched; without a scheme it is a folder.

Invariants:
- the buffer's own spool folder is used if this machine sees it (it holds the token that the buffer named);
  otherwise the stream is copied, part by part, each with a checksum: from the holders that the buffer names,
  one after the other, and what they did not give from the buffer. Holders suffice if the buffer lacks it;
- a copy is deleted once it is no longer needed, also when copying failed, and is never used for another
  source. Once loaded, it is kept if deltas to its stream may follow, or if other engines can copy it, until
  other weights are loaded. The next copy is made from it and a delta; if there is no room for both, or that
  fails, the next one is whole;
- a stream is not copied if its size shows that it is not this model, an adapter of it or a plan, or if it
  does not fit on the disk;
- a folder lies in `engine.weights_root` if that is set, once links are resolved;
- nothing waits for ever: every source has its own patience;
- every problem is an `InvalidField` that names the source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from seer.common import wire
from seer.common.blobs import FILE, Answer, OneOfSeveral, Question, Source, fetch
from seer.common.errors import ConfigError, InvalidField
from seer.common.process.log import get_logger
from seer.common.process.threads import until_ended
from seer.common.slices import Slices
from seer.common.weights.delta import SUFFIX as DELTA
from seer.common.weights.delta import changed as delta_changes
from seer.common.weights.in_place import is_in_place
from seer.common.weights.lora import inner_source, is_adapter
from seer.common.weights.mooncake import SCHEME as MOONCAKE_SCHEME
from seer.common.weights.safetensors import MAX_HEADER_BYTES
from seer.services.engine.weights.delta_source import DeltaSource
from seer.services.engine.weights.holders import GONE, Buffer, Copy, Holder, Peers
from seer.services.engine.weights.manifest import resolve_beneath
from seer.services.engine.weights.mooncake_reader import TrainerMemory

Send = Callable[[Question], Awaitable[None]]

SOURCES: dict[str, Callable[[str], Source]] = {MOONCAKE_SCHEME: TrainerMemory}
"""By scheme: the source that the rest names. Raises `ValueError`. The spool's is `WeightFetcher`'s own."""


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
        self.uncertain_bytes = 0
        """How many more, or fewer, an update may have: see `Manifest.uncertain_bytes`."""
        self._buffers: list[Buffer] = []
        """Those that are asked at present, for a stream and for a delta."""
        self._whole = True
        self._slices: Slices | None = None
        self._copy: Copy | None = None
        self._copied = ""
        self._keep = False
        self._kept: Copy | None = None
        self._outdated: Copy | None = None
        self._delta: DeltaSource | None = None
        self._delta_file: Path | None = None

    def changed(self) -> tuple[str, set[str]]:
        """Return a source, and the names of all tensors in which the present weights may differ from it.

        The source is empty if that is not known. Blocks.
        """
        delta = self._delta
        file = delta.copy.file if delta is not None and delta.made and delta.copy else self._delta_file
        if file is None:
            return "", set()
        try:
            base, names = delta_changes(file)
        except (OSError, ValueError):
            return "", set()
        return wire.SPOOL_SCHEME + base, names

    async def distrust(self) -> bool:
        """Avoid the engines that sent parts of the present copy, and use no delta for the next one.

        Return whether the copy has parts of such engines, or was made from a delta.
        """
        senders = self._copy.senders if self._copy is not None else []
        for endpoint in senders:
            if self._peers is not None:
                self._peers.avoid(endpoint)
        made = self._delta is not None and self._delta.made
        if made:
            await self._forget()
        return bool(senders) or made

    def loaded(self) -> None:
        """Keep the present copy if deltas to it may follow, or peers take it, in place of the one before."""
        self._outdated, self._kept = self._kept, None
        of_use = self._keep or (self._peers is not None and self._peers.serving)
        if of_use and self._copied.startswith(wire.SPOOL_SCHEME):
            self._kept, self._copy, self._copied = self._copy, None, ""

    async def close(self) -> None:
        """Delete all copies."""
        await self._forget()
        await self.discard()

    async def _forget(self) -> None:
        kept, self._kept = self._kept, None
        await self._delete(kept)

    async def _delete(self, *copies: Copy | None) -> None:
        """Delete copies; cancelling this does not keep them from being deleted."""
        there = [copy for copy in copies if copy is not None]
        for copy in there:
            if self._peers is not None:
                self._peers.withdraw(copy)
            copy.end(GONE)
        if there:
            await until_ended(_delete, there)

    def arrived(self, message: Answer) -> None:
        """Take an answer of the buffer; late and unexpected ones are dropped."""
        for buffer in self._buffers:
            buffer.arrived(message)

    async def folder(
        self,
        source: str,
        holders: Sequence[str] = (),
        spare: Sequence[str] = (),
        slices: Slices | None = None,
    ) -> Path:
        """Return the folder with these weights once all of them are there. Raises `InvalidField`.

        `holders`: endpoints of engines to copy a stream from before the buffer is asked; `spare`: those to
        copy it from if the buffer lacks it. `slices`: the stream is of these alone, of a larger file.
        """
        self._slices = slices
        self._whole = slices is None and not (is_adapter(source) or is_in_place(source))
        source = inner_source(source)
        scheme = source.partition(":")[0] + ":"
        if scheme != wire.SPOOL_SCHEME and scheme not in SOURCES:
            if self._root:
                return await asyncio.to_thread(resolve_beneath, Path(source), Path(self._root))
            return Path(source)
        if source == self._copied and self._copy is not None:
            return self._copy.folder
        name = source.removeprefix(scheme)
        if self._kept is not None and (scheme, name) == (wire.SPOOL_SCHEME, self._kept.name):
            await self.discard()  # its values were dropped, or a load failed
            self._copy, self._copied, self._kept = self._kept, source, None
            return self._copy.folder
        try:
            if scheme == wire.SPOOL_SCHEME:
                return await self._from_the_spool(name, holders, spare)
            return await self._copy_from(SOURCES[scheme](name), name, source)
        except (OSError, ValueError) as error:
            raise InvalidField("source", source, str(error)) from error

    async def discard(self) -> None:
        """Delete the copy, and the one before that is kept; cancelling this does not keep them from that."""
        delta, self._delta, self._delta_file = self._delta, None, None
        copies = self._copy, delta.copy if delta is not None else None, self._outdated
        self._copy, self._copied, self._outdated = None, "", None
        await self._delete(*copies)

    def _check_size(self, size: int) -> None:
        """Raise `ValueError` if a stream cannot be this model: a header, then exactly its tensors.

        An adapter may have fewer of them, and a plan has none.
        """
        most = self.model_bytes + self.uncertain_bytes + 8 + MAX_HEADER_BYTES
        least = self.model_bytes - self.uncertain_bytes + 8 if self._whole else 0
        if self.model_bytes and size and not least <= size <= most:
            fix = "send tensors of the names and types that shared.model has, quantized if they are there"
            raise ValueError(f"has {size} bytes: the model's tensors have {self.model_bytes}; {fix}")

    async def _from_the_spool(self, name: str, endpoints: Sequence[str], spare: Sequence[str]) -> Path:
        buffer = Buffer(name, self._send)
        self._buffers = [buffer]
        try:
            try:
                folder = await buffer.whole_here(self._check_size)
            except ValueError:
                buffer.size = await self._peers.whole_size(name, spare) if self._peers is not None else 0
                if not buffer.size:
                    raise
                folder, endpoints = None, spare
            self._keep = buffer.keep
            if folder is not None:
                if self._peers is not None:
                    self._peers.decline(name)
                delta = folder.with_name(name + DELTA) / FILE
                self._delta_file = delta if buffer.base else None
                return folder
            return await self._copy_from(buffer, name, wire.SPOOL_SCHEME + name, endpoints)
        finally:
            self._buffers = []

    async def _copy_from(self, given: Source, name: str, source: str, endpoints: Sequence[str] = ()) -> Path:
        await self.discard()
        self._check_size(given.size)
        self._copy = copy = Copy(name, given.size, self._slices)
        try:
            await self._begin(copy)
            sources = self._sources(copy, given, endpoints) if isinstance(given, Buffer) else []
            await fetch(copy, sources, given)
        except BaseException:
            await self.discard()
            raise
        self._copied = source
        return copy.folder

    async def _begin(self, copy: Copy) -> None:
        """Create a copy's file, if need be in the room of the one that is kept."""
        fix = "set TMPDIR to a larger disk"
        try:
            await until_ended(copy.begin, fix)
        except ValueError as error:
            if self._kept is None:
                raise
            get_logger().warning("weights are fetched whole: no room for two copies", why=str(error))
            await self._forget()
            await until_ended(copy.begin, fix)

    def _sources(self, copy: Copy, given: Buffer, endpoints: Sequence[str]) -> list[OneOfSeveral]:
        """Return whom to ask before the buffer: engines beside this one, a delta that fits, other engines."""
        holders = self._holders(copy, given, endpoints)
        delta_name = copy.name + DELTA
        if self._kept is None or self._kept.name != given.base:
            if self._peers is not None:
                self._peers.decline(delta_name)
            return [*holders]
        asked = Buffer(delta_name, self._send)
        self._buffers.append(asked)
        peers = self._peers
        far = [each for each in endpoints if peers is not None and not peers.beside(each)]
        source = DeltaSource(self._kept, asked, lambda delta: self._holders(delta, asked, far))
        self._delta = source
        near = [each for each in holders if peers is not None and peers.beside(each.endpoint)]
        return [*near, source, *(each for each in holders if each not in near)]

    def _holders(self, copy: Copy, buffer: Buffer, endpoints: Sequence[str]) -> list[Holder]:
        """Return the engines to ask before the buffer, to which this one gives its copy, too."""
        peers = self._peers
        if peers is None:
            return []
        peers.offer(copy)
        usable = peers.usable(endpoints)
        return [Holder(peers, each, copy, len(usable) - place, buffer) for place, each in enumerate(usable)]


def _delete(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy.delete()
