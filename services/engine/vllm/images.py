"""Images of chunks as vLLM takes them: features of a request, each with its place and its name.

vLLM tells images apart by their names, and finds them by their places. It says nothing if one is left out, or
if a name stands for other pixels: the tokens are wrong from there on. So it gets all images of every chunk,
under names that were checked, or the chunk is refused.

Invariants (tests/e2e/test_images.py):
- an image reaches vLLM only if the model can read its tensors, if its place is as long as the model makes it,
  and if the model's placeholder stands there; a prompt with placeholders that no image stands for is refused;
- equal names are one object for vLLM as long as a request has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from seer.common.errors import InvalidField
from seer.common.image_models import ImageModel
from seer.common.prepared_image import PreparedImage
from seer.common.types import Placed
from seer.services.engine.backend import Chunk

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem


class Images:
    """`model`: what its images are; None: it has none. `most`: tokens that an image may take."""

    def __init__(self, model: ImageModel | None, most: int) -> None:
        self._model = model
        self._most = most
        self._items: WeakValueDictionary[str, MultiModalKwargsItem] = WeakValueDictionary()

    def features(self, chunk: Chunk) -> list[MultiModalFeatureSpec] | None:
        """Return a chunk's images in their order; None: it has none. Raises `InvalidField`."""
        model = self._model
        if model is None:
            if chunk.images:
                fix = "this engine's model has no images, or none that were proved to keep the same tokens"
                raise InvalidField("images", len(chunk.images), fix)
            return None
        found = [
            self._feature(model, chunk, place, image, f"images[{number}]")
            for number, (place, image) in enumerate(chunk.images)
        ]
        # Behind the prompt the model may have sampled placeholders, which are text.
        shown = sum(place.length for place, _ in chunk.images if place.offset < chunk.prompt_len)
        placeholders = chunk.tokens[: chunk.prompt_len].count(model.placeholder)
        if placeholders != shown:
            fix = f"images stand for {shown} of them: vLLM would read the others as text"
            raise InvalidField("tokens", f"{placeholders} placeholders of images", fix)
        return found or None

    def _feature(
        self, model: ImageModel, chunk: Chunk, place: Placed, image: PreparedImage, field: str
    ) -> MultiModalFeatureSpec:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        item = self._items.get(image.name)
        if item is None:
            model.check(image)
            item = self._items[image.name] = _item(model, image)
        length = model.length(image)
        if place.length != length:
            raise InvalidField(f"{field}.length", place.length, f"this image takes {length} tokens")
        if length > self._most:
            fix = f"vLLM's encoder takes images of at most {self._most} tokens: give a smaller one"
            raise InvalidField(f"{field}.length", length, fix)
        if set(chunk.tokens[place.offset : place.offset + length]) != {model.placeholder}:
            fix = f"the model's placeholder, token {model.placeholder}, must stand there"
            raise InvalidField(f"{field}.offset", place.offset, fix)
        return MultiModalFeatureSpec(
            data=item, modality="image", identifier=image.name, mm_hash=image.name,
            mm_position=PlaceholderRange(offset=place.offset, length=length),
        )  # fmt: skip


def _item(model: ImageModel, image: PreparedImage) -> MultiModalKwargsItem:
    """Return an image's tensors as the models in the table take them: all have the same fields."""
    import torch
    from transformers import BatchFeature
    from vllm.model_executor.models.qwen2_vl import _create_qwen2vl_field_factory
    from vllm.multimodal.inputs import MultiModalKwargsItems

    # Copies, as torch tensors can be written, and those of an image cannot.
    tensors = {name: torch.from_numpy(np.array(tensor)) for name, tensor in image.tensors.items()}
    fields = _create_qwen2vl_field_factory(model.merge)(tensors)
    (item,) = MultiModalKwargsItems.from_hf_inputs(BatchFeature(tensors), fields)["image"]
    return item
