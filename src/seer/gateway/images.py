"""The images of chats: decoded and processed once, by the model's own Hugging Face processor.

Invariants (tests/unit/test_gateway_images.py):
- a prompt's tensors and tokens are those of `seer.client.images.prepare` for the same pictures and text;
- a prompt has as many placeholders as images, so that none is the client's own text;
- sizes are checked before anything is decoded; one picture at a time is decoded;
- the tensors that this process holds, for requests and for later turns of their conversations, take at most
  `media_bytes`, and those of one picture more; what is not in use goes first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from seer.client import Placed
from seer.client.images import split
from seer.client.picture_files import Picture, decoded, opened
from seer.common.errors import ConfigError, InvalidField
from seer.common.image_models import ImageModel, image_model
from seer.common.media import Medium
from seer.common.types import MAX_MEDIUM_BYTES
from seer.common.wire import Tokens
from seer.gateway.errors import HttpError, bad
from seer.gateway.messages import ImageFile

MAX_NEW_PIXELS = 2**27
"""Bound on the pixels of all new images of a request, 134 million, or 64 screens: seconds of one core."""

_PACKAGES = ("transformers", "torchvision", "pillow")


class Images:
    """`model` and `processor` make prompts with images; without them, `problem` says why there are none."""

    def __init__(self, model: ImageModel | None, processor: Any, most: int, problem: str = "") -> None:  # noqa: ANN401 - a Hugging Face processor
        if most < MAX_MEDIUM_BYTES:
            raise ConfigError(
                f"gateway.media_bytes = {most}: give at least {MAX_MEDIUM_BYTES}, for one image"
            )
        self._model = model
        self._processor = processor
        self._most = most
        self._problem = problem
        self._known: OrderedDict[bytes, Medium] = OrderedDict()
        # All tensors that anybody in this process still holds: the client may hold them for longer than we.
        self._held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    @classmethod
    def load(cls, folder: str, most: int) -> Images:
        """Read a model's processor, if the model has images that can be run."""
        model = image_model(json.loads((Path(folder) / "config.json").read_text()))
        if model is None:
            return cls(None, None, most, "this model's images cannot be run: docs/images.md says whose can")
        try:
            from transformers import AutoProcessor

            return cls(model, AutoProcessor.from_pretrained(folder), most)
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            problem = f"the processor cannot be loaded ({error}): docs/images.md says what images need"
            return cls(None, None, most, problem)

    @property
    def made_by(self) -> dict[str, str]:
        """What makes tensors of pictures: classes, and versions of packages."""
        kinds = {"processor": self._processor, "image_processor": self._processor.image_processor}
        found = {name: type(each).__name__ for name, each in kinds.items()}
        for name in _PACKAGES:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found

    def check_text(self, tokens: Sequence[int], where: str) -> None:
        """Raise `HttpError` if a prompt without images has a placeholder: engines would refuse it later."""
        if self._model is not None and self._model.placeholder in tokens:
            fix = "is the placeholder of an image: give images in /v1/chat/completions"
            raise bad(where, self._model.placeholder, fix)

    def place(self, tokens: Sequence[int], files: Sequence[ImageFile]) -> tuple[list[int], list[Placed]]:
        """Return a prompt with placeholders for its images, and the images; `tokens` has one for each.

        Takes as long as decoding takes. Raises `HttpError`.
        """
        if self._model is None:
            raise bad(files[0].field, "an image", self._problem)
        placeholder = self._model.placeholder
        if (places := list(tokens).count(placeholder)) != len(files):
            fix = f"for {len(files)} images: the chat template writes them, and no text may have any"
            raise bad("messages", f"{places} placeholders", fix)
        try:
            media = iter(self._media(self._model, files))
        except InvalidField as error:
            raise HttpError(400, str(error), error.field) from error
        found: list[int] = []
        placed: list[Placed] = []
        for token in tokens:
            length = 1
            if token == placeholder:
                medium = next(media)
                length = self._model.length(medium)
                placed.append(Placed(medium, len(found), length))
            found += [token] * length
        return found, placed

    def _media(self, model: ImageModel, files: Sequence[ImageFile]) -> list[Medium]:
        names = [hashlib.blake2b(file.data, digest_size=32).digest() for file in files]
        found = {name: self._known[name] for name in names if name in self._known}
        new: dict[bytes, tuple[str, Picture]] = {}
        for name, file in zip(names, files, strict=True):
            if name not in found and name not in new:
                new[name] = file.field, opened(file.data, file.field)
        pixels = sum(picture.width * picture.height for _, picture in new.values())
        if pixels > MAX_NEW_PIXELS:
            raise bad("messages", f"{pixels} pixels", f"give images of at most {MAX_NEW_PIXELS} in all")
        for name, (field, picture) in new.items():
            found[name] = self._processed(model, picture, field)
            self._make_room(sum(medium.size for medium in found.values()))
        for name in names:
            self._known[name] = found[name]
            self._known.move_to_end(name)
        return [found[name] for name in names]

    def _processed(self, model: ImageModel, picture: Picture, field: str) -> Medium:
        whole = decoded(picture, field)
        try:
            (medium,) = split(self._processor.image_processor(images=[whole], return_tensors="pt"))
            model.check(medium)
        except (InvalidField, ValueError) as error:  # as for an aspect ratio that the model does not take
            raise bad(field, f"{picture.width} x {picture.height} pixels", str(error)) from error
        self._held[next(self._numbers)] = medium.data
        return medium

    def _make_room(self, own: int) -> None:
        """Forget what no request needs until all that is held fits; `own`: bytes of this request."""
        if own > self._most:
            raise bad(
                "messages", f"{own} bytes of images", f"give at most {self._most} (gateway.media_bytes)"
            )
        while self._bytes_held() > self._most:
            if not self._known:
                held = f"other requests hold images of {self._most} bytes (gateway.media_bytes)"
                raise HttpError(503, f"{held}: come again")
            self._known.popitem(last=False)

    def _bytes_held(self) -> int:
        return sum(len(data) for data in self._held.values())


def context(tokens: Tokens, media: Sequence[Placed]) -> Tokens:
    """Return tokens that tell images apart: in place of each, numbers from its name."""
    if not media:
        return tokens
    found = np.array(tokens)
    for each in media:
        found[each.offset : each.offset + each.length] = int(each.medium.name[:7], 16)
    return found
