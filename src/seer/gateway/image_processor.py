"""A model's own Hugging Face image processor: an image file becomes tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from seer.client.image_files import PILImage, decoded, opened
from seer.client.images import split
from seer.common.errors import ConfigError, InvalidField
from seer.common.image_models import ImageModel, image_model
from seer.common.prepared_image import PreparedImage

_PACKAGES = ("transformers", "torchvision", "pillow")

NO_IMAGES = "this model's images cannot be run: docs/images.md says whose can"


def model_of(folder: str) -> ImageModel | None:
    """Return what images the model in a folder takes. Raises `ConfigError` for a folder without a model."""
    try:
        return image_model(json.loads((Path(folder) / "config.json").read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"shared.model = {folder!r}: its config.json is no model's ({error!r})") from error


class ImageProcessor:
    """`model` and `processor` make tensors; without them, `problem` says why there are none."""

    def __init__(self, model: ImageModel | None, processor: Any, problem: str = "") -> None:  # noqa: ANN401 - a Hugging Face processor
        self._model = model
        self._processor = processor
        self._problem = problem

    @classmethod
    def load(cls, folder: str) -> ImageProcessor:
        """Read a model's processor, if the model has images that can be run."""
        model = model_of(folder)
        if model is None:
            return cls(None, None, NO_IMAGES)
        try:
            from transformers import AutoProcessor

            return cls(model, AutoProcessor.from_pretrained(folder))
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            problem = f"the processor cannot be loaded ({error}): docs/images.md says what images need"
            return cls(None, None, problem)

    @property
    def made_by(self) -> dict[str, str]:
        """What makes tensors of images: classes, and versions of packages."""
        kinds = {"processor": self._processor, "image_processor": self._processor.image_processor}
        found = {name: type(each).__name__ for name, each in kinds.items()}
        for name in _PACKAGES:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found

    def pixels(self, files: Iterable[tuple[str, bytes]]) -> int:
        """Return the pixels of images, given with their fields; their heads alone are read.

        Raises `InvalidField`.
        """
        return sum(image.width * image.height for image in (self._opened(*each) for each in files))

    def prepared(self, field: str, data: bytes) -> PreparedImage:
        """Return the image of a file, prepared. Raises `InvalidField` naming `field`."""
        image = self._opened(field, data)
        whole = decoded(image, field)
        try:
            (prepared,) = split(self._processor.image_processor(images=[whole], return_tensors="pt"))
            cast("ImageModel", self._model).check(prepared)
        except (InvalidField, ValueError) as error:  # as for an aspect ratio that the model does not take
            raise InvalidField(field, f"{image.width} x {image.height} pixels", str(error)) from error
        return prepared

    def _opened(self, field: str, data: bytes) -> PILImage:
        if self._model is None:
            raise InvalidField(field, "an image", self._problem)
        return opened(data, field)
