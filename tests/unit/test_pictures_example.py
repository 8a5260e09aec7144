"""The example of numbers in pictures: glyphs, pictures, what is read, and that what is shipped belongs together."""

import importlib.util
import json
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

if any(importlib.util.find_spec(name) is None for name in ("PIL", "torchvision", "transformers")):
    pytest.skip("needs the extra images", allow_module_level=True)

EXAMPLE = Path(__file__).parents[2] / "examples" / "countdown_images"
sys.path.append(str(EXAMPLE))

import drawing
import reading
from drawing import CELL, GLYPHS, draw
from PIL import Image
from reading import task

LINES = [json.loads(line) for line in (EXAMPLE / "prompts.jsonl").read_text().splitlines()]
MOST_SHIPPED = 5_000_000
"""Bytes of the model's folder."""


def find(pixels: np.ndarray) -> list[int]:
    """Return the numbers in a picture without noise, by comparing each place with each glyph."""
    rows = pixels.shape[0] // CELL
    found = []
    for row in range(rows):
        band = pixels[row * CELL : (row + 1) * CELL]
        ground = pixels[0, 0] if not found else ground  # noqa: F821 - the first pixel may be ink: see below
        ink = (band != ground).any(axis=2)
        digits = []
        columns = np.flatnonzero(ink.any(axis=0))
        if columns.size:
            top = np.flatnonzero(ink.any(axis=1))[0]
            for number, glyph in enumerate(GLYPHS):
                width = drawing.GLYPH_WIDTH
                for x in range(ink.shape[1] - width + 1):
                    seen = ink[top : top + drawing.GLYPH_HEIGHT, x : x + width]
                    if seen.shape == glyph.shape and (seen == glyph).all():
                        digits.append((x, number))
            found.append(int("".join(str(number) for _, number in sorted(digits))))
    return found


def test_glyphs_are_of_one_size_and_none_is_anothers() -> None:
    assert len(GLYPHS) == 10
    assert {glyph.shape for glyph in GLYPHS} == {(drawing.GLYPH_HEIGHT, drawing.GLYPH_WIDTH)}
    assert len({glyph.tobytes() for glyph in GLYPHS}) == 10
