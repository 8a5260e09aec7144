"""The images of an engine's chunks: asked of the buffer, checked, and kept as long as there is room.

Invariants (tests/unit/test_engine_images.py):
- a chunk gets its images once all of them are here and were checked against their names; until then it waits,
  and nothing else waits for it;
- an image is asked for once, however many chunks need it, and kept for the next ones; those that no chunk
  here needs go when room is needed, the least recently used first;
- images have at most `max_bytes` together. Chunks wait in line for room; when none runs whose end would make
  some, the first in line gets what it needs, so that all of them can go on;
- a chunk fails if a part of its images was asked for in vain for `IMAGE_STALL_SECONDS`, or the buffer cannot
  send it, or sends something else; another attempt may work.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seer.common import wire
from seer.common.clock import Clock
from seer.common.errors import ConfigError, EngineError, InvalidField, SeerError
from seer.common.prepared_image import PreparedImage, read
from seer.common.types import MAX_IMAGE_BYTES

ASK_SECONDS = 5.0
"""A question that is not answered for this long is asked again: the buffer may have lost it."""


@dataclass(slots=True)
class _Kept:
    """An image: the first `have` bytes of `data` are here. No `data`: nothing has come yet.

    `asked`: when the next part was asked for first, if it was; `asks`: how often. `image` is there once it
    was checked.
    """

    data: wire.Bytes | None = None
    have: int = 0
    asked: float | None = None
    asks: int = 0
    image: PreparedImage | None = None

    @property
    def complete(self) -> bool:
        return self.data is not None and self.have == len(self.data)


class EngineImages:
    """See the module's docstring. Chunks have names of the caller's.

    Of each chunk that is held `ready(chunk)` or `failed(chunk, error)` is called once, unless it is released
    before; `ask()` is called when `question` may have one. Raises `ConfigError` for a `max_bytes` that has no
    room for one image.
    """

    def __init__(
        self,
        max_bytes: int,
        clock: Clock,
        ready: Callable[[str], None],
        failed: Callable[[str, SeerError], None],
        ask: Callable[[], None],
    ) -> None:
        if max_bytes < MAX_IMAGE_BYTES:
            fix = f"must have room for one image, {MAX_IMAGE_BYTES} bytes"
            raise ConfigError(f"engine.image_bytes = {max_bytes}: {fix}")
        self._max_bytes = max_bytes
        self._clock = clock
        self._ready, self._failed, self._ask = ready, failed, ask
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the least recently used first
        self._bytes = 0
        self._chunks: dict[str, Sequence[str]] = {}  # names of their images
        self._line: dict[str, None] = {}  # chunks that wait
        self._users: Counter[str] = Counter()  # chunks by image
        self._complete: asyncio.Queue[str] = asyncio.Queue()  # to be checked; at most one entry an image

    # --- chunks --------------------------------------------------------------------------

    def hold(self, chunk: str, names: Sequence[str]) -> None:
        """Keep these images for a chunk until it is released, and call `ready` once all are here."""
        names = self._chunks[chunk] = tuple(dict.fromkeys(names))
        self._line[chunk] = None
        self._users.update(names)
        for name in names:
            self._kept.setdefault(name, _Kept())
            self._kept.move_to_end(name)
        self._check_ready()
        self._ask()

    def release(self, chunk: str) -> None:
        """Forget a chunk that ended; an unknown one is ignored."""
        names = self._chunks.pop(chunk, None)
        self._line.pop(chunk, None)
        if names is not None:
            self._users.subtract(names)
            self._users += Counter()  # without zeros
            self._make_room()
            self._ask()

    def get(self, name: str) -> PreparedImage:
        """Return an image of a chunk that is ready."""
        image = self._kept[name].image
        if image is None:
            raise KeyError(name)
        return image

    def _check_ready(self) -> None:
        for chunk in list(self._line):
            if all(self._kept[name].image is not None for name in self._chunks[chunk]):
                del self._line[chunk]
                self._ready(chunk)

    def _fail(self, image: str, why: str) -> None:
        """Drop an image, and fail the chunks that wait for it."""
        self._drop(image)
        for chunk in [chunk for chunk in self._line if image in self._chunks[chunk]]:
            self.release(chunk)
            self._failed(chunk, EngineError(f"images: {image}: {why}"))

    # --- the buffer ----------------------------------------------------------------------

    def question(self) -> wire.ReadImage | None:
        """Return the next part to ask the buffer for; None: none is needed, or enough are on their way."""
        now, asked = self._clock.now(), [each for each in self._kept.items() if each[1].asked is not None]
        for name, kept in asked:
            if now - (kept.asked or 0.0) > kept.asks * ASK_SECONDS:
                kept.asks += 1
                return wire.ReadImage(name=name, offset=kept.have)
        if len(asked) >= wire.IMAGES_AT_ONCE:
            return None
        alone = len(self._chunks) == len(self._line)  # no chunk runs whose end would make room
        for place, chunk in enumerate(self._line):
            for name in self._chunks[chunk]:
                kept = self._kept[name]
                if kept.asked is None and not kept.complete:
                    if (place or not alone) and kept.data is None and not self._has_room():
                        return None
                    kept.asked, kept.asks = now, 1
                    return wire.ReadImage(name=name, offset=kept.have)
        return None

    def arrived(self, message: wire.ImageData | wire.ImageState) -> None:
        """Take an answer of the buffer; one that was not asked for, or comes twice, changes nothing."""
        kept = self._kept.get(message.name)
        if kept is None or kept.asked is None:
            return
        if isinstance(message, wire.ImageState):
            self._fail(message.name, message.problem or "the buffer has it no longer")
        elif message.offset == kept.have:
            kept.asked = None
            self._add(message, kept)
        self._ask()

    def _add(self, message: wire.ImageData, kept: _Kept) -> None:
        name, length = message.name, len(message.data)
        if kept.data is None:
            kept.data = np.zeros(message.size, np.uint8)
            self._bytes += message.size
            self._make_room()
        if not 0 < length <= len(kept.data) - kept.have:
            self._fail(name, f"a part of {length} bytes does not fit at {kept.have} of {len(kept.data)}")
            return
        kept.data[kept.have : kept.have + length] = message.data
        kept.have += length
        if kept.complete:
            self._complete.put_nowait(name)

    async def run(self) -> None:
        """Check images that are complete, until cancelled; the event loop does not wait for it."""
        while True:
            name = await self._complete.get()
            kept = self._kept.get(name)
            if kept is None or kept.data is None or kept.image is not None or not kept.complete:
                continue  # it was dropped meanwhile
            try:
                kept.image = await asyncio.to_thread(read, name, kept.data)
            except InvalidField as error:
                if self._kept.get(name) is kept:  # else it was dropped meanwhile
                    self._fail(name, error.fix)
                continue
            self._check_ready()
            self._make_room()

    def tick(self) -> None:
        """Give up what does not come, and ask again what may be lost. Call it every second or so."""
        overdue = self._clock.now() - wire.IMAGE_STALL_SECONDS
        for name, kept in list(self._kept.items()):
            if kept.asked is not None and kept.asked < overdue:
                self._fail(name, f"the buffer sent nothing for {wire.IMAGE_STALL_SECONDS:g} s")
        self._ask()

    # --- room ----------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """Return whether one more fits beside those that chunks need; any may be as large as one can be."""
        needed = MAX_IMAGE_BYTES
        for name in self._users:
            kept = self._kept[name]
            if kept.data is not None:
                needed += len(kept.data)
            elif kept.asked is not None:
                needed += MAX_IMAGE_BYTES
        return needed <= self._max_bytes

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name)
        self._bytes -= 0 if kept.data is None else len(kept.data)

    def _make_room(self) -> None:
        """Of images that no chunk needs, ask for no more, and drop empty ones and those that are too many."""
        for name in [name for name in self._kept if name not in self._users]:
            kept = self._kept[name]
            kept.asked = None
            if kept.data is None or self._bytes > self._max_bytes:
                self._drop(name)
