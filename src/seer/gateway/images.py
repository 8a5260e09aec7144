"""The images of chats: decoded and processed once, by the model's own Hugging Face processor, in `jobs`.

Invariants (tests/unit/test_gateway_images.py):
- a prompt's tensors and tokens are those of `seer.client.images.prepare` for the same images and text;
- a prompt has as many placeholders as images, so that none is the client's own text;
- sizes are checked before anything is decoded; one image at a time is decoded;
- the tensors that this process holds, for requests and for later turns of their conversations, take at most
  `image_bytes`, and those of one image more; what is not in use goes first.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from seer.client import Placed
from seer.common.errors import ConfigError
from seer.common.image_models import ImageModel
from seer.common.prepared_image import PreparedImage
from seer.common.prepared_image import read as read_image
from seer.common.types import MAX_IMAGE_BYTES
from seer.gateway.errors import HttpError, bad
from seer.gateway.image_processor import NO_IMAGES
from seer.gateway.messages import ImageFile

MAX_NEW_PIXELS = 2**27
"""Bound on the pixels of all new images of a request, 134 million, or 64 screens: seconds of one core."""

Process = Callable[..., Awaitable[Any]]
"""`JobProcesses.run`."""


class Images:
    """`model`: which images can be placed; None: none. `process` makes the images' tensors."""

    def __init__(self, model: ImageModel | None, process: Process, most: int) -> None:
        if most < MAX_IMAGE_BYTES:
            raise ConfigError(f"gateway.image_bytes = {most}: give at least {MAX_IMAGE_BYTES}, for one image")
        self._model = model
        self._process = process
        self._most = most
        self.made_by: dict[str, str] = {}
        """What makes tensors of images: classes, and versions of packages."""
        self._known: OrderedDict[bytes, PreparedImage] = OrderedDict()
        # All tensors that anybody in this process still holds: the client may hold them for longer than we.
        self._held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def check_text(self, tokens: Sequence[int], where: str) -> None:
        """Raise `HttpError` if a prompt without images has a placeholder: engines would refuse it later."""
        if self._model is not None and self._model.placeholder in tokens:
            fix = "is the placeholder of an image: give images in /v1/chat/completions"
            raise bad(where, self._model.placeholder, fix)

    async def place(
        self, tokens: Sequence[int], files: Sequence[ImageFile]
    ) -> tuple[list[int], list[Placed]]:
        """Return a prompt with placeholders for its images, and the images; `tokens` has one for each.

        Takes as long as decoding takes. Raises `HttpError`.
        """
        model = self._model
        if model is None:
            raise bad(files[0].field, "an image", NO_IMAGES)
        if (places := list(tokens).count(model.placeholder)) != len(files):
            fix = f"for {len(files)} images: the chat template writes them, and no text may have any"
            raise bad("messages", f"{places} placeholders", fix)
        images = iter(await self._prepared(files))
        found: list[int] = []
        placed: list[Placed] = []
        for token in tokens:
            length = 1
            if token == model.placeholder:
                image = next(images)
                length = model.length(image)
                placed.append(Placed(image, len(found), length))
            found += [token] * length
        return found, placed

    async def _prepared(self, files: Sequence[ImageFile]) -> list[PreparedImage]:
        names = [hashlib.blake2b(file.data, digest_size=32).digest() for file in files]
        found = {name: self._known[name] for name in names if name in self._known}
        new = {name: file for name, file in zip(names, files, strict=True) if name not in found}
        if new:
            heads = [(file.field, file.data) for file in new.values()]
            pixels = await self._process(heads[0][0], "pixels", heads)
            if pixels > MAX_NEW_PIXELS:
                raise bad("messages", f"{pixels} pixels", f"give images of at most {MAX_NEW_PIXELS} in all")
        for name, file in new.items():
            found[name] = await self._processed(file)
            self._make_room(sum(image.size for image in found.values()))
        for name in names:
            self._known[name] = found[name]
            self._known.move_to_end(name)
        return [found[name] for name in names]

    async def _processed(self, file: ImageFile) -> PreparedImage:
        name, data, self.made_by = await self._process(file.field, "image", file.field, file.data)
        image = read_image(name, np.frombuffer(data, np.uint8))
        self._held[next(self._numbers)] = image.data
        return image

    def _make_room(self, own: int) -> None:
        """Forget what no request needs until all that is held fits; `own`: bytes of this request."""
        if own > self._most:
            raise bad(
                "messages", f"{own} bytes of images", f"give at most {self._most} (gateway.image_bytes)"
            )
        while self._bytes_held() > self._most:
            if not self._known:
                held = f"other requests hold images of {self._most} bytes (gateway.image_bytes)"
                raise HttpError(503, f"{held}: come again")
            self._known.popitem(last=False)

    def _bytes_held(self) -> int:
        return sum(len(data) for data in self._held.values())
