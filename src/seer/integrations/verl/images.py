"""The images of a worker's prompts, as engines get them. No veRL.

Invariant (tests/unit/test_verl_images.py): `multi_modal_inputs`, which veRL makes of a sample's images
for its trainer, has the tensors that engines got.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from seer.client import Placed
from seer.integrations.images import Once, placeholder_biases

MOST_BYTES = 2**30
"""Bound on what a worker knows: an image is asked for by each session of its prompt, and after it has ended.
One that was forgotten meanwhile is processed anew, by the same processor."""


class Images:
    """Makes a processor process each image once. With `biases` no placeholder is sampled."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._once = Once(processor.image_processor, MOST_BYTES)
        processor.image_processor = self._once
        self.biases = placeholder_biases(processor)

    @classmethod
    def of(cls, processor: Any) -> Self | None:
        """Return the images of a processor; None: the processor has none."""
        return None if getattr(processor, "image_processor", None) is None else cls(processor)

    def located(self, tokens: Sequence[int], images: Sequence[object] | None) -> list[Placed]:
        """Return images where they stand in tokens. Raises `InvalidField` for others."""
        return self._once.located(self._processor, tokens, images)
