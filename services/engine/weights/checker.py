"""Reads new weights byte by byte before they are loaded.

Invariants (tests/unit/test_engine_orders.py, tests/unit/test_nodes.py):
- weights without a source are the model that the engine was started with;
- files that changed since they were checked are read again before they are loaded, on every node;
- bytes that came from other engines, or of a delta, and have a wrong digest are fetched again: from the
  buffer or, if it lacks them, from engines that sent none of them;
- all nodes of an engine have weights of the same digest, or slices of them with the leader's bytes, or they
  are refused;
- a digest that is named is computed by its own tag, another one by that of the live weights' digest;
- tensors that a delta leaves as they are were hashed, and found finite, when its base was checked: they are
  not read again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seer.common.errors import EngineError, InvalidField
from seer.common.process.log import get_logger
from seer.common.weights.digest import BLAKE3, tag_of
from seer.common.weights.in_place import is_in_place
from seer.common.weights.lora import base_of, is_adapter
from seer.common.weights.safetensors import stamps
from seer.services.engine.weights.adapter import read_adapter
from seer.services.engine.weights.adapter import stamps as adapter_stamps
from seer.services.engine.weights.fetcher import WeightFetcher
from seer.services.engine.weights.manifest import (
    Manifest,
    differences,
    optional_tensors,
    read_manifest,
    read_planned,
)

if TYPE_CHECKING:
    from seer.services.engine.nodes.leader import Leader

Stamps = tuple[object, ...]
"""The state of files; equal stamps mean that nobody has written to them."""


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """What was read last: a source, the digest of its tensors, and the state of its files then."""

    source: str = ""
    digest: str = ""
    stamps: Stamps = ()


class WeightChecker:
    """Call `start` first if the engine has a model folder, `base`. `in_place`: take plans of such updates.

    `nodes`: those that have further ranks of this engine, and read weights for them. `finite`: refuse weights
    with values that are not; those in a plan are their trainer's to check.
    """

    def __init__(
        self,
        fetcher: WeightFetcher,
        in_place: bool = False,
        nodes: Leader | None = None,
        *,
        finite: bool = True,
    ) -> None:
        self.checked = CheckedWeights()
        self.model: Manifest | None = None
        self.base = Path()
        self._fetcher = fetcher
        self._in_place = in_place
        self._nodes = nodes
        self._finite = finite
        self.tag = BLAKE3
        """That of digests that nobody names."""
        self._hashes: tuple[str, dict[str, bytes]] = "", {}
        self._live_hashes = self._hashes
        """Source and tensors' hashes of what was checked last, and of what was loaded last."""

    async def start(self, base: Path, head: str = "") -> Manifest:
        """Read the model that the engine was started with, and its head, a folder. Raises `SeerError`."""
        self.base = base
        read = await asyncio.to_thread(
            functools.partial(read_manifest, base, finite=self._finite, tag=self.tag)
        )
        optional = await asyncio.to_thread(optional_tensors, base, read.tensors, head)
        self.model = dataclasses.replace(read, optional=optional)
        self._fetcher.model_bytes, self._fetcher.uncertain_bytes = read.size, self.model.uncertain_bytes
        await self._note("", self.model, base)
        return self.model

    async def check(self, source: str, holders: Sequence[str], digest: str) -> Manifest:
        """Read weights, byte by byte. Raises `SeerError`. `digest`: what they must have, if that is known."""
        found, folder = await self._check(source, holders, digest)
        await self._note(source, found, folder)
        return found

    async def _note(self, source: str, found: Manifest, folder: Path) -> None:
        """Note what was read here, once all nodes have read the same."""
        others = await self._nodes.check(source, found.digest, folder) if self._nodes is not None else ()
        self.checked = CheckedWeights(source, found.digest, (*found.stamps, *others))
        self._hashes = source, found.hashes

    def loaded(self) -> None:
        """Note that what was checked last is live: a delta to it may follow."""
        self._live_hashes, self.tag = self._hashes, tag_of(self.checked.digest)
        self._fetcher.loaded()

    async def close(self) -> None:
        """Delete everything that was copied."""
        await self.discard()
        await self._fetcher.close()

    async def checked_folder(self, source: str, digest: str, holders: Sequence[str] = ()) -> Path:
        """Return the folder, once it was checked to hold exactly these weights. Raises `SeerError`."""
        folder = await self.folder(source, holders)
        if (self.checked.source, self.checked.digest) != (source, digest) or await self.changed(folder):
            # It was never prepared here, or files changed since.
            await self.check(source, holders, digest)
            folder = await self.folder(source)
        if self.checked.digest != digest:
            raise EngineError(f"{source or folder} now has digest {self.checked.digest}, not {digest}")
        return folder

    async def changed(self, folder: Path) -> bool:
        """Return whether a file of what was checked last has changed since, here or on another node."""
        own = await self.present(folder)
        others = await self._nodes.stamps(self.checked.source) if self._nodes is not None else ()
        return (*own, *others) != self.checked.stamps

    async def present(self, folder: Path) -> Stamps:
        """Return the present stamps of what was checked last, as this node has it."""
        of_adapter = is_adapter(self.checked.source)
        read = functools.partial(adapter_stamps, base=self.base) if of_adapter else stamps
        return await asyncio.to_thread(read, folder)

    def differences(self, source: str, found: Manifest) -> str:
        """Return why this is not the live model with other values; empty: it is, or an adapter of it."""
        return "" if self.model is None or is_adapter(source) else differences(self.model, found)

    async def discard(self) -> None:
        """Forget what was checked, and delete what was copied for it."""
        self.checked = CheckedWeights()
        await self._fetcher.discard()
        if self._nodes is not None:
            await self._nodes.discard()

    async def _check(self, source: str, holders: Sequence[str], digest: str) -> tuple[Manifest, Path]:
        if is_in_place(source) and not self._in_place:
            fix = "this engine takes no weights in place: set engine.in_place_updates = true, or send them"
            raise InvalidField("source", source, fix)
        first, named = holders, digest or (base_of(source) if is_adapter(source) else "")
        tag = tag_of(named or self.tag)
        while True:  # each time without the engines that sent parts the time before
            try:
                folder = await self.folder(source, first, holders)
                found = await self._read_stoppably(source, folder, tag)
            except InvalidField as error:
                if not await self._fetcher.distrust():
                    raise
                problem = str(error)
            else:
                if digest in ("", found.digest) or not await self._fetcher.distrust():
                    return found, folder
                problem = f"they have digest {found.digest}, not {digest}"
            get_logger().warning("weights from other engines, or of a delta, are fetched again", why=problem)
            await self._fetcher.discard()
            first = ()

    async def folder(self, source: str, holders: Sequence[str] = (), spare: Sequence[str] = ()) -> Path:
        """See `WeightFetcher.folder`; without a source: the model that the engine was started with."""
        if source:
            return await self._fetcher.folder(source, holders, spare or holders)
        if self.model is None:
            fix = "this engine was started without a model folder: set shared.model, or update its weights"
            raise InvalidField("source", source, fix)
        return self.base

    async def _read_stoppably(self, source: str, folder: Path, tag: str) -> Manifest:
        stop = threading.Event()
        try:
            return await asyncio.to_thread(self._read, source, folder, tag, stop.is_set)
        finally:
            stop.set()  # a thread cannot be cancelled

    def _read(self, source: str, folder: Path, tag: str, stop: Callable[[], bool]) -> Manifest:
        if not is_adapter(source) and not is_in_place(source):
            base, changed = self._fetcher.changed()
            live, hashes = self._live_hashes
            known = {name: each for name, each in hashes.items() if name not in changed and base == live}
            return read_manifest(folder, stop, finite=self._finite, known=known if base else {}, tag=tag)
        if self.model is None:
            fix = "this engine has no model to merge into, or to compare with: start it with shared.model"
            raise InvalidField("source", source, fix)
        if is_in_place(source):
            return read_planned(folder, self.model, tag)
        if tag != tag_of(self.model.digest):
            read = read_manifest(self.base, stop, tag=tag)
            if read.stamps == self.model.stamps:
                self.model = dataclasses.replace(self.model, digest=read.digest)
        return read_adapter(source, folder, self.base, self.model, stop)
