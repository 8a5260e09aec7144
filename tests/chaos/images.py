"""The images of the campaign: some smaller than a part, most of several, and many prompts show the same."""

from __future__ import annotations

import functools

from prepared_images import prepared

from seer.client.image_uploads import Placed
from seer.common.prepared_image import PreparedImage

IMAGES = 12

PLACEHOLDER = 997
"""The token in whose place images stand."""

LARGEST_BYTES = 4096
"""Bound on one, in place of the real one: what is kept of images is bounded by few of them."""


def image(number: int, offset: int) -> Placed:
    """Return one of the images in a place of one token."""
    return Placed(_prepared(number % IMAGES), offset, 1)


@functools.cache
def _prepared(number: int) -> PreparedImage:
    return prepared(number, 10 + 80 * number)
