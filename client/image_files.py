"""Image files, of users and in requests, opened only if they are what they may be.

Invariants (tests/unit/test_image_files.py):
- an image is PNG, JPEG or WebP, has one frame, 8 bits for each color and at most `MAX_PIXELS`; all others
  are refused by name before any pixel is decoded;
- so is a file that is much work for its pixels: scans that each go over all of them, parts that are read one
  by one, EXIF entries of millions of numbers, which may follow the pixels. What is left takes seconds at
  most, as the most pixels do (bench/services/http_bodies.py);
- it stands as its EXIF orientation says, and is RGB, as `datasets` and transformers' `load_image` have it;
- whatever bytes arrive, the outcome is an image or `InvalidField`.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from seer.common.errors import InvalidField

PILImage = Any
"""An image of PIL."""

FORMATS = ("PNG", "JPEG", "WEBP")

MAX_PIXELS = 2**25
"""Bound on an image's pixels, 33 million, which take 100 MB decoded: a small file may claim any number."""

MAX_SCANNED = 2**30
"""Bound on pixels times scans of a progressive JPEG: 32 scans of the largest image; encoders make ten."""

MAX_PARTS = 2**16
"""Bound on the parts of a file (chunks of a PNG, markers of a JPEG), beside a JPEG's data: PIL reads each in
Python. A part of encoders has 4 KB and more."""

MAX_EXIF = 2**20
"""Bound on an image's EXIF entries, in bytes: PIL makes an object of each number of the orientation."""

_EXIF = ("exif", "Raw profile type exif")
"""Where PIL has them."""

_TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
          7: "TRANSVERSE", 8: "ROTATE_90"}  # fmt: skip
"""What sets an image upright, by its EXIF orientation."""

_ORIENTATION = 0x0112

_SCAN = b"\xff\xda"
"""What a scan of a JPEG begins with; within its data it cannot stand."""

_ALONE = {0x00, 0x01, 0xFF, *range(0xD0, 0xDA)}
"""Second bytes of what is no segment with a length."""

_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}


def opened(source: bytes | Path, field: str) -> PILImage:
    """Return an image of which the head alone is read. Raises `InvalidField` naming `field`."""
    from PIL import Image

    shown = source.name if isinstance(source, Path) else f"{len(source)} bytes"
    try:
        data = source.read_bytes() if isinstance(source, Path) else source
        if _parts(data) > MAX_PARTS:
            raise InvalidField(field, shown, f"has more than {MAX_PARTS} parts: write it anew")
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        frames = getattr(image, "n_frames", 1)
    except InvalidField:
        raise
    except Exception as error:  # a decoder says no in its own ways
        fix = f"cannot be read as an image: give {', '.join(FORMATS)} ({error})"
        raise InvalidField(field, shown, fix) from error
    if frames != 1:
        raise InvalidField(field, f"{frames} frames", "give an image of one frame: nothing that moves")
    if image.mode not in _MODES:
        raise InvalidField(field, f"mode {image.mode}", "give 8 bits for each color")
    width, height = image.size
    if width * height > MAX_PIXELS:
        fix = f"give at most {MAX_PIXELS} pixels, or make it smaller first"
        raise InvalidField(field, f"{width} x {height} pixels", fix)
    scans = data.count(_SCAN) if image.format == "JPEG" else 1
    if scans * width * height > MAX_SCANNED:
        most = MAX_SCANNED // (width * height)
        fix = f"give a JPEG of at most {most}, or one that is not progressive"
        raise InvalidField(field, f"{scans} scans", fix)
    return image


def _parts(data: bytes) -> int:
    """Return how many parts of a file PIL reads one by one, as far as `MAX_PARTS` and one more."""
    place, parts, end = 8, 0, len(data)
    if data.startswith(b"\x89PNG"):
        while place < end and parts <= MAX_PARTS:
            place += 12 + int.from_bytes(data[place : place + 4], "big")
            parts += 1
    elif data.startswith(b"\xff\xd8"):
        place = 2
        while place < end and parts <= MAX_PARTS and not data.startswith(_SCAN, place):
            segment = data[place] == 0xFF and place + 1 < end and data[place + 1] not in _ALONE
            place += 2 + int.from_bytes(data[place + 2 : place + 4], "big") if segment else 1
            parts += 1
    return parts


def decoded(image: PILImage, field: str) -> PILImage:
    """Return an opened image with its pixels, upright, in RGB. Raises `InvalidField` naming `field`.

    `ImageOps.exif_transpose` does the same, and writes the file's other EXIF entries anew: hours of work.
    """
    from PIL import Image

    try:
        image.load()  # entries may follow the pixels
        exif = max(len(image.info.get(name, "")) for name in _EXIF)
        if exif > MAX_EXIF:
            raise InvalidField(field, f"{exif} bytes of EXIF", f"give at most {MAX_EXIF}, or none")
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
        upright = image.transpose(Image.Transpose[turn]) if turn else image
        return upright.convert("RGB")
    except InvalidField:
        raise
    except Exception as error:
        raise InvalidField(field, "damaged", f"cannot be read as an image: {error}") from error
