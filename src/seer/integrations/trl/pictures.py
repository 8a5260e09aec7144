"""The pictures of a trainer's prompts: each is processed once for a call of the trainer.

TRL has its processor make tokens of prompts and, later, tensors for its own forward pass. Both calls, and the
engines, get one processing: a stand-in takes the place of the image processor for as long as the call runs.

Invariants (tests/unit/test_trl_pictures.py):
- what engines get and what the forward pass gets are the same tensors, to the last bit;
- a picture is processed once, however many samples show it: pictures are told apart by their pixels;
- afterwards the processor has its own image processor again, and nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from seer.client.images import locate, split
from seer.common.errors import InvalidField
from seer.common.media import Medium
from seer.integrations.trl.turns import Context


class Once:
    """Stands in for an image processor; what it was first asked for a picture is the answer ever after."""

    def __init__(self, image_processor: Any) -> None:  # noqa: ANN401 - Hugging Face's
        self._own = image_processor
        self._done: dict[bytes, Mapping[str, Any]] = {}
        self._media: dict[bytes, Medium] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever it is
        return getattr(self._own, name)

    def __call__(self, images: Any, *, return_tensors: Any = None, **options: Any) -> Any:  # noqa: ANN401
        """Return what the image processor returns for a batch, put together from its pictures' parts."""
        import torch
        from transformers import BatchFeature

        found = [self._processed(picture, options) for picture in _flat(images)]
        data = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        return BatchFeature(data, tensor_type=return_tensors)

    def medium(self, picture: Any) -> Medium:  # noqa: ANN401 - PIL's
        """Return a picture as engines get it."""
        key = _digest(picture)
        if key not in self._media:
            (self._media[key],) = split(self._processed(picture, {}), type(self._own).__name__)
        return self._media[key]

    def _processed(self, picture: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ANN401
        key = _digest(picture)
        if key not in self._done:
            self._done[key] = self._own(images=[picture], return_tensors="pt", **options)
        return self._done[key]


class Pictures:
    """Those of a trainer whose `processing_class` is `processor`; of a tokenizer, there are none."""

    def __init__(self, processor: Any) -> None:  # noqa: ANN401 - Hugging Face's
        self._processor = processor
        self._once: Once | None = None

    @contextlib.contextmanager
    def processed_once(self) -> Iterator[None]:
        """Have each picture processed once until the end of the context."""
        own = getattr(self._processor, "image_processor", None)
        if own is None:
            yield
            return
        self._processor.image_processor = self._once = Once(own)
        try:
            yield
        finally:
            self._processor.image_processor, self._once = own, None

    def contexts(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[Any] | None] | None
    ) -> tuple[list[Context], dict[str, Medium]]:
        """Return token ids, placeholders expanded, with their samples' images, and all images by name.

        Raises `InvalidField` if a sample's images are not what stands in its tokens.
        """
        if images is None:
            return [Context(tuple(ids)) for ids in prompts], {}
        if self._once is None:
            raise InvalidField(
                "images", f"of {len(prompts)} prompts", "give them to a trainer with a processor"
            )
        found, media = [], {}
        for ids, shown in zip(prompts, images, strict=True):
            placed = locate(self._processor, ids, [self._once.medium(each) for each in shown or ()])
            found.append(Context(tuple(ids), tuple(each.on_wire for each in placed)))
            media.update({each.medium.name: each.medium for each in placed})
        return found, media


def _flat(images: Any) -> Iterable[Any]:  # noqa: ANN401 - pictures, in lists of lists
    if isinstance(images, (list, tuple)):
        for each in images:
            yield from _flat(each)
    elif images is not None:
        yield images


def _digest(picture: Any) -> bytes:  # noqa: ANN401 - PIL's
    """Return what tells a picture from others. Raises `InvalidField` for what is none of PIL's."""
    from PIL.Image import Image

    if not isinstance(picture, Image):
        fix = "give pictures as PIL has them, as `datasets.Image()` decodes them"
        raise InvalidField("images", type(picture).__name__, fix)
    head = repr((picture.mode, picture.size, picture.getpalette(), picture.info.get("transparency")))
    return hashlib.blake2b(head.encode() + b"\0" + picture.tobytes(), digest_size=32).digest()
