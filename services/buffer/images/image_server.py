"""The buffer's images: a file each, sent by trainers, read by engines.

Invariants (tests/unit/test_image_server.py, tests/cluster/test_images.py):
- an image is given out only if its bytes were checked against its name, in this incarnation of the buffer;
  what was damaged since is noticed with the last part, and lost: whoever submits it again sends it again;
- one task handles everything in turn, so no file is deleted while it is written or read;
- an error of the disk removes that one image, its peer gets the error, and all others go on;
- images in a configured folder survive the buffer, and count again once somebody has submitted them again;
- messages that wait to be handled are bounded in number and bytes, and the event loop never waits for the
  disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from seer.common import wire
from seer.common.blobs import Turns
from seer.common.clock import Clock
from seer.common.errors import ConfigError, InvalidField
from seer.common.process.log import get_logger
from seer.common.process.threads import until_ended
from seer.common.types import MAX_IMAGE_BYTES
from seer.services.buffer.images.image_folder import ImageFolder
from seer.services.buffer.images.image_machine import ImageMachine, Kept

Reply = Callable[[bytes, wire.ImageState | wire.ImageData], Awaitable[None]]
"""Sends an answer to a peer's address; the answer is lost if the peer does not read."""

ImageRequest = wire.OpenImage | wire.ImageData | wire.ReadImage

_MAX_QUEUED = 4096
"""Messages that wait to be handled; more are dropped, and peers send them again."""

_MAX_PARTS = 4 * wire.IMAGES_AT_ONCE
"""Messages with data among them: 64 MiB."""

STALLED = f"nothing of its trainer's images has come for {wire.IMAGE_STALL_SECONDS:g} s: submit it again"


class ImageServer:
    """The images below `folder`; empty: in a temporary folder, deleted when `run` ends.

    `counters` has totals since the start. `arrived(name)` is called for each image that is there from now
    on, `stalled(groups, why)` for groups whose images do not come. Raises `ConfigError` if `max_bytes` has no
    room for one.
    """

    def __init__(
        self,
        folder: str,
        max_bytes: int,
        clock: Clock,
        arrived: Callable[[str], None],
        stalled: Callable[[list[str], str], None],
    ) -> None:
        if max_bytes < MAX_IMAGE_BYTES:
            fix = f"must have room for one image, {MAX_IMAGE_BYTES} bytes"
            raise ConfigError(f"buffer.image_bytes = {max_bytes}: {fix}")
        self.machine = ImageMachine(max_bytes)
        self.counters = {"image_received_bytes": 0, "image_sent_bytes": 0}
        self._folder = ImageFolder(folder)
        self._clock = clock
        self._arrived, self._stalled = arrived, stalled
        self._turns = Turns(_MAX_QUEUED, _MAX_PARTS)
        self._log = get_logger()

    def start(self) -> None:
        """Lock the configured folder. Raises `ConfigError` if it is not this buffer's."""
        self._folder.claim()

    def put(self, reply: Reply, address: bytes, message: ImageRequest, trainer: str = "") -> None:
        """Queue a peer's message; it is dropped if too many wait. `trainer`: its sender, if a trainer."""
        part = isinstance(message, wire.ImageData)
        self._turns.add(lambda: self._answer(reply, address, message, trainer), part=part)

    def tick(self) -> None:
        """Check deadlines."""
        if groups := self.machine.stalled(self._clock.now()):
            self._stalled(groups, STALLED)
        self._turns.add(self._lose_abandoned)

    async def run(self) -> None:
        """Handle queued messages until cancelled."""
        try:
            await self._take_over()
            await self._turns.run()
        finally:
            self._folder.release()

    async def _take_over(self) -> None:
        """Take over the images that an earlier incarnation left in the configured folder."""
        try:
            found = await until_ended(self._folder.inherited)
            for name in self.machine.found(found, self._clock.now()):
                await until_ended(self._folder.remove, name)
        except OSError as error:
            self._log.warning("images of an earlier incarnation cannot be read", error=str(error))

    # --- messages ------------------------------------------------------------------------

    async def _answer(self, reply: Reply, address: bytes, message: ImageRequest, trainer: str) -> None:
        state: wire.ImageState | wire.ImageData
        match message:
            case wire.ReadImage(name=name, offset=offset):
                came, state = False, await self._read(name, offset)
            case wire.OpenImage(name=name, size=size):
                state = await self._open(name, size)
                came = state.have == size
            case wire.ImageData():
                known = self.machine.get(message.name)
                before = known.have if known is not None else 0
                state = await self._write(message)
                came = state.have > before
        if came:
            self.machine.heard(trainer, self._clock.now())
        await reply(address, state)

    async def _open(self, name: str, size: int) -> wire.ImageState:
        try:
            kept = await self._kept(name, size)
        except (OSError, ValueError) as error:
            return wire.ImageState(name=name, have=0, problem=str(error))
        if kept.have == kept.size and not kept.checked:  # of an earlier incarnation
            await self._finish(name, kept, log=True)
            if not kept.checked:
                return await self._open(name, size)  # its file is damaged, and removed: from the beginning
        if size != kept.size:
            return wire.ImageState(name=name, have=0, problem=f"has {kept.size} bytes, not {size}")
        return wire.ImageState(name=name, have=kept.have)

    async def _kept(self, name: str, size: int) -> Kept:
        """Return an image, which is begun if it is not kept. Raises `ValueError` or `OSError`."""
        now = self._clock.now()
        if self.machine.get(name) is None:
            for other in self.machine.begin(name, size, now):
                await until_ended(self._folder.remove, other)
        return self.machine.use(name, now)

    async def _write(self, message: wire.ImageData) -> wire.ImageState:
        name, length = message.name, len(message.data)
        state = await self._open(name, message.size)
        kept = self.machine.get(name)
        if state.problem or kept is None or message.offset != kept.have:
            return state  # it is sent again from where the answer says
        if not 0 < length <= min(wire.IMAGE_PART_BYTES, kept.size - kept.have):
            return state
        try:
            await until_ended(self._folder.append, name, kept.have, message.data)
        except OSError as error:
            return await self._lose(name, f"cannot be stored: {error}")
        kept.have += length
        self.counters["image_received_bytes"] += length
        if kept.have == kept.size and (problem := await self._finish(name, kept, log=False)):
            return wire.ImageState(name=name, have=0, problem=problem)
        return wire.ImageState(name=name, have=kept.have)

    async def _finish(self, name: str, kept: Kept, *, log: bool) -> str:
        """Check an image that is complete; return what is wrong with the image, which is lost then.

        `log`: log also that the image has other bytes, which its sender is told.
        """
        try:
            await until_ended(self._folder.check, name)
        except (InvalidField, OSError) as error:
            return (await self._lose(name, str(error), log=log or isinstance(error, OSError))).problem
        kept.checked = True
        self._arrived(name)
        return ""

    async def _read(self, name: str, offset: int) -> wire.ImageState | wire.ImageData:
        known = self.machine.get(name)
        if known is None or not known.checked:
            return wire.ImageState(name=name, have=0, problem="is not in this buffer: submit it again")
        kept = self.machine.use(name, self._clock.now())
        if offset >= kept.size:
            return wire.ImageState(name=name, have=kept.have, problem=f"has {kept.size} bytes")
        length = min(wire.IMAGE_PART_BYTES, kept.size - offset)
        try:
            # With the last part: engines refuse what was damaged, and trainers send nothing that is here.
            if offset + length == kept.size:
                await until_ended(self._folder.check, name)
            data = await until_ended(self._folder.read, name, offset, length)
        except (InvalidField, OSError) as error:
            why = f"cannot be read: {error}" if isinstance(error, OSError) else str(error)
            return await self._lose(name, why)
        self.counters["image_sent_bytes"] += length
        return wire.ImageData(name=name, size=kept.size, offset=offset, data=data)

    async def _lose_abandoned(self) -> None:
        for name in self.machine.abandoned(self._clock.now()):
            await self._lose(name, "")

    async def _lose(self, name: str, problem: str, *, log: bool = True) -> wire.ImageState:
        """Drop an image and its file; return the answer that says why."""
        self.machine.drop(name)
        if problem and log:
            self._log.warning("an image is lost", image=name, why=problem)
        try:
            await until_ended(self._folder.remove, name)
        except OSError as error:
            self._log.warning("an image's file stays on disk", image=name, error=str(error))
        return wire.ImageState(name=name, have=0, problem=problem)
