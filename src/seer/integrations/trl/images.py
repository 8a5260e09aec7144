"""The images of a trainer's prompts: each is processed once for a call of the trainer.

Invariants (tests/unit/test_trl_images.py):
- the tokens of prompts, the engines and TRL's own forward pass have one processing of each image;
- afterwards the processor has its own image processor again, and nothing is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from seer.common.errors import InvalidField
from seer.common.prepared_image import PreparedImage
from seer.integrations.images import Once
from seer.integrations.trl.turns import Context


class Images:
    """Those of a trainer whose `processing_class` is `processor`; of a tokenizer, there are none."""

    def __init__(self, processor: Any) -> None:  # noqa: ANN401 - Hugging Face's
        self._processor = processor
        self._once: Once | None = None

    @contextlib.contextmanager
    def processed_once(self) -> Iterator[None]:
        """Have each image processed once until the end of the context."""
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
    ) -> tuple[list[Context], dict[str, PreparedImage]]:
        """Return token ids, placeholders expanded, with their samples' images, and all images by name.

        Raises `InvalidField` if a sample's images are not what stands in its tokens.
        """
        if images is None:
            return [Context(tuple(ids)) for ids in prompts], {}
        if self._once is None:
            raise InvalidField(
                "images", f"of {len(prompts)} prompts", "give them to a trainer with a processor"
            )
        found, prepared = [], {}
        for ids, shown in zip(prompts, images, strict=True):
            placed = self._once.located(self._processor, ids, shown)
            found.append(Context(tuple(ids), tuple(each.on_wire for each in placed)))
            prepared.update({each.image.name: each.image for each in placed})
        return found, prepared
