"""Pictures in files and in requests, opened only if they are what they may be.

Invariants (tests/unit/test_picture_files.py):
- a picture is PNG, JPEG or WebP, has one frame, 8 bits for each color and at most `MAX_PIXELS`; all others
  are refused by name before any pixel is decoded;
- it stands as its EXIF orientation says, and is RGB, as `datasets` and transformers' `load_image` have it;
- whatever bytes arrive, the outcome is a picture or `InvalidField`.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from seer.common.errors import InvalidField

Picture = Any
"""A PIL picture."""

FORMATS = ("PNG", "JPEG", "WEBP")

MAX_PIXELS = 2**25
"""Bound on a picture's pixels, 33 million, which take 100 MB decoded: a small file may claim any number."""

_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}


def opened(source: bytes | Path, field: str) -> Picture:
    """Return a picture of which the head alone is read. Raises `InvalidField` naming `field`."""
    from PIL import Image

    shown = source.name if isinstance(source, Path) else f"{len(source)} bytes"
    try:
        file = io.BytesIO(source.read_bytes() if isinstance(source, Path) else source)
        picture = Image.open(file, formats=FORMATS)
        frames = getattr(picture, "n_frames", 1)
    except Exception as error:  # a decoder says no in its own ways
        fix = f"cannot be read as a picture: give {', '.join(FORMATS)} ({error})"
        raise InvalidField(field, shown, fix) from error
    if frames != 1:
        raise InvalidField(field, f"{frames} frames", "give a picture of one frame: nothing that moves")
    if picture.mode not in _MODES:
        raise InvalidField(field, f"mode {picture.mode}", "give 8 bits for each color")
    width, height = picture.size
    if width * height > MAX_PIXELS:
        fix = f"give at most {MAX_PIXELS} pixels, or make it smaller first"
        raise InvalidField(field, f"{width} x {height} pixels", fix)
    return picture


def decoded(picture: Picture, field: str) -> Picture:
    """Return an opened picture with its pixels, upright, in RGB. Raises `InvalidField` naming `field`."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:
        raise InvalidField(field, "damaged", f"cannot be read as a picture: {error}") from error
