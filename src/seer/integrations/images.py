"""Images of a trainer's prompts, each processed once: for the engines and for the trainer's forward pass.

Trainers have a processor make tokens of prompts and, later, tensors for their forward pass. A stand-in for
its image processor gives both, and the engines, one processing.

Invariants (tests/unit/test_verl_images.py, tests/unit/test_trl_images.py):
- what engines get and what the forward pass gets are the same tensors, to the last bit;
- an image is processed once, however many samples show it, for as long as it is known: images are told
  apart by their pixels;
- at most `most` bytes are known; what was used longest ago is forgotten first.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seer.client import Placed
from seer.client.images import locate, split
from seer.common.errors import InvalidField
from seer.common.prepared_image import PreparedImage

PLACEHOLDERS = ("image_token_id", "video_token_id")
"""Attributes of processors."""

NEVER = -100.0
"""The least bias that there is: a token with it is not sampled."""


class Once:
    """Stands in for an image processor; the first answer for an image is the answer ever after."""

    def __init__(self, image_processor: Any, most: int | None = None) -> None:  # noqa: ANN401 - Hugging Face's
        self._own = image_processor
        self._most = most
        self._bytes = 0
        self._done: OrderedDict[bytes, tuple[Mapping[str, Any], PreparedImage]] = OrderedDict()
        self._lock = threading.Lock()  # trainers process on threads

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever it is
        return getattr(self._own, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - Hugging Face's
        """Return a copy of what it stands in for: so is a processor saved that has it."""
        return copy.deepcopy(self._own, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._own,)

    def __call__(self, images: Any, *, return_tensors: Any = None, **options: Any) -> Any:  # noqa: ANN401
        """Return what the image processor returns for a batch, put together from its images' parts."""
        import torch
        from transformers import BatchFeature

        found = [self._processed(image, options)[0] for image in _flat(images)]
        data = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        return BatchFeature(data, tensor_type=return_tensors)

    def prepared(self, image: Any) -> PreparedImage:  # noqa: ANN401 - PIL's
        """Return an image as engines get it."""
        return self._processed(image, {})[1]

    def located(self, processor: Any, tokens: Sequence[int], images: Sequence[Any] | None) -> list[Placed]:  # noqa: ANN401
        """Return images where they stand in tokens. Raises `InvalidField` for others than stand there."""
        return locate(processor, tokens, [self.prepared(each) for each in images or ()])

    def _processed(self, image: Any, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], PreparedImage]:  # noqa: ANN401
        key = image_digest(image)
        with self._lock:
            if key in self._done:
                self._done.move_to_end(key)
                return self._done[key]
            made = self._own(images=[image], return_tensors="pt", **options)
            (prepared,) = split(made, type(self._own).__name__)
            self._done[key] = made, prepared
            self._bytes += prepared.size
            while self._most is not None and self._bytes > self._most:
                _, (_, old) = self._done.popitem(last=False)
                self._bytes -= old.size
            return made, prepared


def placeholder_biases(processor: Any) -> dict[int, float]:  # noqa: ANN401 - Hugging Face's, or a tokenizer
    """Return biases with which no placeholder is sampled: it would stand for no image in the forward pass."""
    tokens = [getattr(processor, name, None) for name in PLACEHOLDERS]
    return {token: NEVER for token in tokens if isinstance(token, int)}


def image_digest(image: Any) -> bytes:  # noqa: ANN401 - PIL's
    """Return what tells an image from others. Raises `InvalidField` for what is none of PIL's."""
    from PIL.Image import Image

    if not isinstance(image, Image):
        fix = "give images as PIL has them, as `datasets.Image()` decodes them"
        raise InvalidField("images", type(image).__name__, fix)
    head = repr((image.mode, image.size, image.getpalette(), image.info.get("transparency")))
    return hashlib.blake2b(head.encode() + b"\0" + image.tobytes(), digest_size=32).digest()


def _flat(images: Any) -> Iterable[Any]:  # noqa: ANN401 - images, in lists of lists
    if isinstance(images, (list, tuple)):
        for each in images:
            yield from _flat(each)
    elif images is not None:
        yield images
