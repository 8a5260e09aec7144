"""Images for tests that need no model: whatever tensors, of few bytes or many."""

import numpy as np

from seer.client import Placed, prepared_image
from seer.common.prepared_image import PreparedImage


def prepared(seed: int, values: int = 6) -> PreparedImage:
    """Return an image of its own for each seed; `values`: float32 numbers in it."""
    pixels = np.full((1, values), seed, np.float32)
    return prepared_image("image", pixel_values=pixels, image_grid_thw=np.array([[1, 2, 2]]))


def placed(seed: int, offset: int, length: int = 1, values: int = 6) -> Placed:
    return Placed(prepared(seed, values), offset, length)
