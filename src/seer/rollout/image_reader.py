"""The images that prompt lines name, processed once by the model's own processor.

Invariants (tests/unit/test_cli_images.py):
- only files below the folder of the prompts are read: no URL, no absolute path, no link that leads outside;
- the processor is loaded when the first line names images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seer.client.image_files import PILImage, decoded, opened
from seer.client.images import Processed, prepare
from seer.common.errors import InvalidField


class ImageReader:
    """`root`: the folder of the prompts; `model`: a Hugging Face model folder, None if there is none."""

    def __init__(self, root: Path, model: Path | None) -> None:
        self._root = root.resolve()
        self._model = model
        self._processor: Any = None

    def prompt(self, text: str, names: object, field: str) -> Processed:
        """Return a text's prompt with the images in these files. Raises `InvalidField` naming `field`."""
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise InvalidField(field, names, "give a list of files, as many as the text has placeholders")
        images = [self._open(name, f"{field}[{place}]") for place, name in enumerate(names)]
        try:
            return prepare(self._loaded(field), text, images)
        except InvalidField as error:
            raise InvalidField(f"{field}: {error.field}", names, error.fix) from error

    def _open(self, name: str, field: str) -> PILImage:
        fix = "give a file below the folder of the prompts; nothing is fetched"
        try:
            path = (self._root / name).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle, characters that no name has
            raise InvalidField(field, name, f"{fix} ({error})") from error
        if "://" in name or not path.is_relative_to(self._root):
            raise InvalidField(field, name, fix)
        return decoded(opened(path, field), field)

    def _loaded(self, field: str) -> Any:  # noqa: ANN401 - a Hugging Face processor
        if self._model is None:
            raise InvalidField(field, "given", "images need --model DIR, whose processor reads them")
        if self._processor is None:
            try:
                from transformers import AutoProcessor

                self._processor = AutoProcessor.from_pretrained(self._model)
            except (ImportError, OSError, ValueError, RuntimeError) as error:
                fix = f"its processor cannot be loaded ({error}): docs/images.md says what images need"
                raise InvalidField("--model", str(self._model), fix) from error
        return self._processor
