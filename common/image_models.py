"""The vision-language models whose images Seer runs: a table by architecture.

A model sees an image as `image_grid_thw`, its patches in time, height and width, and `pixel_values`, a row of
numbers for each patch. In the prompt stands one placeholder token for each square of `merge` by `merge`
patches. An architecture is in the table once its images were proved to give the same tokens whatever the
schedule.

Invariants (tests/unit/test_image_models.py):
- an image that `check` accepts can be run: its tensors have exactly the types and shapes that the model
  reads, and all numbers are finite. A bad one would fail a step of all requests, or spoil their logits;
- other architectures, and all that is no image, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from seer.common.errors import InvalidField
from seer.common.prepared_image import PreparedImage

PATCH_SIZES = {
    "Qwen2VLForConditionalGeneration": 14,
    "Qwen2_5_VLForConditionalGeneration": 14,
    "Qwen3VLForConditionalGeneration": 16,
}
"""The table: architectures whose images run, and the side of a patch that their configurations may leave out.
Pixels."""

TENSORS = ("image_grid_thw", "pixel_values")
"""The tensors of an image: int64 [1, 3] and float32 [patches, numbers per patch]."""


@dataclass(frozen=True, slots=True)
class ImageModel:
    """What images of a model are made of.

    `placeholder`: the token id that stands for them in prompts. `merge`: patches on each side of the square
    that one token stands for. `patch_numbers`: numbers in a row of `pixel_values`.
    """

    placeholder: int
    merge: int
    patch_numbers: int

    def check(self, image: PreparedImage) -> int:
        """Return how many tokens an image takes. Raises `InvalidField` for what the model cannot read."""
        if image.modality != "image":
            raise InvalidField("modality", image.modality, "give images: nothing else can be run")
        if tuple(sorted(image.tensors)) != TENSORS:
            raise InvalidField("image", sorted(image.tensors), f"give {' and '.join(TENSORS)}")
        grid, pixels = (image.tensors[name] for name in TENSORS)
        if grid.shape != (1, 3) or grid.dtype != np.int64:
            raise InvalidField("image_grid_thw", f"{grid.dtype} {grid.shape}", "give int64 [1, 3]: one image")
        frames, height, width = (int(count) for count in grid[0])
        if frames != 1 or min(height, width) < 1 or height % self.merge or width % self.merge:
            fix = f"give 1, and a height and a width that {self.merge} divides"
            raise InvalidField("image_grid_thw", [frames, height, width], fix)
        if pixels.shape != (height * width, self.patch_numbers) or pixels.dtype != np.float32:
            fix = f"give float32 [{height * width}, {self.patch_numbers}]"
            raise InvalidField("pixel_values", f"{pixels.dtype} {pixels.shape}", fix)
        if not np.isfinite(pixels).all():
            raise InvalidField("pixel_values", "infinite, or not a number", "give finite numbers")
        return self.length(image)

    def length(self, image: PreparedImage) -> int:
        """Return how many tokens an image takes that was checked."""
        return int(image.tensors["image_grid_thw"].prod()) // self.merge**2


def image_model(config: Mapping[str, Any]) -> ImageModel | None:
    """Return what images a model with this config.json takes; None: it is not in the table."""
    patch_size = next((PATCH_SIZES[name] for name in config["architectures"] if name in PATCH_SIZES), None)
    if patch_size is None:
        return None
    vision = config.get("vision_config") or {}
    side = vision.get("patch_size", patch_size)
    numbers = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * side**2
    return ImageModel(config.get("image_token_id", 151_655), vision.get("spatial_merge_size", 2), numbers)
