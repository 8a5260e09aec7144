"""Prompts with images, made by a model's own Hugging Face processor.

Invariants (tests/unit/test_client_images.py):
- engines get the very tensors that the trainer gets, never a second processing of the same images;
- every placeholder in the tokens belongs to one image, in the order in which they were given; else the prompt
  is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from seer.client.image_uploads import Placed, prepared_image
from seer.common.errors import InvalidField
from seer.common.image_models import TENSORS
from seer.common.prepared_image import PreparedImage

Processor = Any
"""As of `transformers.AutoProcessor.from_pretrained`."""


class Processed(NamedTuple):
    """A prompt's tokens, placeholders expanded, its images, and all that the processor returned.

    The trainer computes its logprobs from `inputs`: they have the tensors that engines get.
    """

    token_ids: list[int]
    images: list[Placed]
    inputs: Mapping[str, Any]


def prepare(processor: Processor, text: str, images: Sequence[Any]) -> Processed:
    """Process a prompt once, for its engines and its trainer: text with a placeholder for each image.

    `text` is what the chat template makes of a conversation; `images` are PIL's. Call it once per
    prompt, not per response. Raises `InvalidField` for what the processor makes of another kind of model.
    """
    inputs = processor(text=[text], images=list(images) or None, return_tensors="pt")
    (tokens,) = np.asarray(inputs["input_ids"]).tolist()
    if not images:
        return Processed(tokens, [], inputs)
    prepared = split(inputs, type(processor).__name__)
    if len(prepared) != len(images):
        raise InvalidField("images", len(images), f"the processor returned {len(prepared)}")
    return Processed(tokens, locate(processor, tokens, prepared), inputs)


def split(inputs: Mapping[str, Any], kind: str = "processor") -> list[PreparedImage]:
    """Return the images in what a processor returned, one by one; `kind` is the processor's class.

    Raises `InvalidField` if it lacks a tensor that engines need.
    """
    missing = [name for name in TENSORS if name not in inputs]
    if missing:
        fix = f"returns no {' and no '.join(missing)}: its images cannot be run"
        raise InvalidField("processor", kind, fix)
    grids, pixels = (np.asarray(inputs[name]) for name in TENSORS)
    images, row = [], 0
    for place, grid in enumerate(grids):
        rows = int(grid.prod())
        images.append(
            prepared_image(
                "image", pixel_values=pixels[row : row + rows], image_grid_thw=grids[place : place + 1]
            )
        )
        row += rows
    return images


def locate(processor: Processor, tokens: Sequence[int], images: Sequence[PreparedImage]) -> list[Placed]:
    """Return images where they stand in a prompt whose placeholders are expanded, in order.

    Raises `InvalidField` if a placeholder or an image is left over.
    """
    placeholder, merged = processor.image_token_id, processor.image_processor.merge_size**2
    tokens = list(tokens)
    placed, end = [], 0
    for place, image in enumerate(images):
        length = int(image.tensors["image_grid_thw"].prod()) // merged
        while end < len(tokens) and tokens[end] != placeholder:
            end += 1
        if tokens[end : end + length] != [placeholder] * length:
            raise InvalidField(f"images[{place}]", f"{length} tokens", "the text has no place for it")
        placed.append(Placed(image, end, length))
        end += length
    if placeholder in tokens[end:]:
        raise InvalidField("text", f"{len(tokens)} tokens", f"has places for more than {len(images)} images")
    return placed
