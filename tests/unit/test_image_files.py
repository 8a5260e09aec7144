"""Image files: the list in `seer.client.image_files`."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seer.client.image_files import MAX_EXIF, MAX_PIXELS, decoded, opened
from seer.common.errors import InvalidField

Image = pytest.importorskip("PIL.Image")


def saved(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(height: int = 6, width: int = 4, seed: int = 0) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(width: int, height: int, rows: int) -> bytes:
    """A PNG whose head claims a size, and that has so many rows of it, eight gray pixels to a byte."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    lines = zlib.compress((b"\0" + bytes((width + 7) // 8)) * rows)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", lines) + part(b"IEND", b"")


def read(source: bytes | Path) -> Any:
    return decoded(opened(source, "field"), "field")


def test_pixels_come_back_from_files_and_bytes(tmp_path: Path) -> None:
    image = noise()
    (tmp_path / "a.png").write_bytes(saved(image))
    for source in (saved(image), tmp_path / "a.png", saved(image, "WEBP", lossless=True)):
        found = read(source)
        assert found.mode == "RGB"
        assert np.array_equal(found, image)
    assert read(saved(image, "JPEG")).size == image.size


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_other_modes_become_rgb_as_pil_does_it(mode: str) -> None:
    image = noise().convert(mode)
    if mode == "RGBA":
        image.putalpha(0)  # what shows through is kept
    assert np.array_equal(read(saved(image)), image.convert("RGB"))


def moving(kind: str) -> bytes:
    return saved(noise(), kind, save_all=True, append_images=[noise(seed=1)])


WHOLE = saved(noise(64, 64))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cannot be read as an image: give PNG, JPEG, WEBP"),
        (b"hello, world\n" * 100, "cannot be read as an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read as an image"),
        (saved(noise(), "GIF"), "give PNG, JPEG, WEBP"),
        (moving("GIF"), "give PNG, JPEG, WEBP"),
        (saved(noise(), "TIFF"), "give PNG, JPEG, WEBP"),
        (moving("PNG"), "2 frames: give an image of one frame"),
        (moving("WEBP"), "2 frames: give an image of one frame"),
        (saved(Image.fromarray(np.zeros((2, 2), np.uint16))), "mode I;16: give 8 bits"),
        (png(8192, 8192, 1), f"8192 x 8192 pixels: give at most {MAX_PIXELS}"),
        (png(8192, 8192, 8192), f"8192 x 8192 pixels: give at most {MAX_PIXELS}"),
        (png(2**20, 2**20, 1), "cannot be read as an image"),  # PIL's own bound
        (WHOLE[: len(WHOLE) // 2], "damaged: cannot be read"),
        (saved(noise(64, 64), "JPEG")[:-500], "damaged: cannot be read"),
    ],
    ids=range(14),
)
def test_others_are_refused_by_name(data: bytes, says: str) -> None:
    with pytest.raises(InvalidField) as info:
        read(data)
    assert info.value.field == "field"
    assert says.replace("'", "") in str(info.value).replace("'", "")


def test_no_pixel_is_decoded_before_the_size_was_checked() -> None:
    """A head that claims more or less than the file has is believed, as PIL does: what is missing is black."""
    assert read(png(8, 8, 4000)).size == (8, 8)
    assert not np.any(read(png(100, 100, 1)))
    image = opened(png(4096, 4096, 1), "field")
    assert image._im is None if hasattr(image, "_im") else image.im is None


def test_whatever_bytes_arrive_the_outcome_is_an_image_or_invalid_field() -> None:
    random = np.random.default_rng(5)
    files = [saved(noise(32, 32), kind) for kind in ("PNG", "JPEG", "WEBP")]
    read_well = 0
    for number in range(600):
        data = bytearray(files[number % 3])
        for place in random.integers(0, len(data), random.integers(1, 8)):
            data[place] = random.integers(0, 256)
        try:
            read(bytes(data))
            read_well += 1
        except InvalidField:
            pass
    assert 0 < read_well < 600


def progressive(side: int, scans: int) -> bytes:
    """A JPEG whose last scan comes again and again, with nothing new."""
    data = saved(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * scans + b"\xff\xd9"


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


PNG, JPEG = saved(noise()), saved(noise(), "JPEG")
MANY = 70_000


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (progressive(2896, 500), "510 scans: give a JPEG of at most 128, or one that is not progressive"),
        (PNG[:33] + chunk(b"abCd") * MANY + PNG[33:], "has more than 65536 parts: write it anew"),
        (PNG[:33] + chunk(b"IDAT") * MANY + PNG[33:], "has more than 65536 parts"),
        (JPEG[:2] + b"\xff" * MANY + JPEG[2:], "has more than 65536 parts"),
        (JPEG[:2] + b"\xff\xe5\0\2" * MANY + JPEG[2:], "has more than 65536 parts"),
        (JPEG[:2] + (b"\xff\xdb\0\x43\0" + b"\1" * 64) * MANY + JPEG[2:], "has more than 65536 parts"),
    ],
    ids=["scans", "chunks", "data chunks", "fill", "segments", "tables"],
)
def test_what_is_much_work_for_its_pixels_is_refused_before_any_of_it(data: bytes, says: str) -> None:
    with pytest.raises(InvalidField) as info:
        opened(data, "field")
    assert says in str(info.value).replace("'", "")


def exif(numbers: int) -> bytes:
    """EXIF entries of one orientation, which has so many fractions."""
    entry = struct.pack(">HHIII", 0x0112, 5, numbers, 26, 0)
    return b"MM\0*\0\0\0\x08\0\1" + entry + bytes(8 * numbers)


@pytest.mark.parametrize("place", [33, -12], ids=["before the pixels", "after them"])
def test_an_orientation_of_very_many_numbers_is_refused(place: int) -> None:
    long = chunk(b"eXIf", exif(MAX_EXIF // 8))
    with pytest.raises(InvalidField, match=f"bytes of EXIF.*: give at most {MAX_EXIF}, or none"):
        read(PNG[:place] + long + PNG[place:])
    assert read(PNG[:place] + chunk(b"eXIf", exif(1000)) + PNG[place:]).size == (4, 6)


def test_what_encoders_write_is_much_less_work() -> None:
    """The largest image, in ten scans; chunks of 512 bytes, of which 32 MiB have as many as may be."""
    assert read(progressive(56, 2000)).size == (56, 56)
    data = saved(Image.new("L", (5792, 5792)), "JPEG", progressive=True)
    assert opened(data, "field").size == (5792, 5792)
    parts = PNG[:33] + chunk(b"abCd", bytes(500)) * 60_000 + PNG[33:]
    assert opened(parts, "field").size == (4, 6)


@pytest.mark.parametrize("orientation", range(1, 10))
def test_every_orientation_is_that_of_pil(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(noise(), exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(read(data), expected)
