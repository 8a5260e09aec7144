"""Numbers drawn in a small image: glyphs in the cells of a grid, in chance colours, places and noise.

Every number has a row of its own, its digits side by side. A cell is 8 by 8 pixels, so that a model with
patches of 4 pixels, merged two by two, has a token for each.

Invariants:
- an image is a function of the numbers and of the `random.Random` passed in;
- whatever the image, its digits stand whole inside it, and numbers never share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CELL = 8
"""Pixels on a side."""
GLYPH_HEIGHT, GLYPH_WIDTH = 7, 5
_ROWS = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""
GLYPHS: tuple[NDArray[np.bool_], ...] = tuple(
    np.array([[pixel == "#" for pixel in glyph] for glyph in digit])
    for digit in zip(*(row.split() for row in _ROWS.split("\n") if row), strict=True)
)
"""Of the digits 0 to 9."""

MORE_ROWS = 1
"""Rows of cells that an image may have beyond one for each number."""
COLUMNS = (3, 5)
"""Fewest and most columns of cells."""
DARK, LIGHT = (0, 90), (150, 255)
"""Colours of the ground and of the ink, per channel; in half of the images the other way round."""
NOISE = 80
"""Most that is added to, or taken from, each channel of each pixel."""


class Drawn(NamedTuple):
    """An RGB image; `cells`: of each cell, row by row, the number that begins there, or 0."""

    image: Image.Image
    cells: list[int]


def draw(rng: Random, numbers: Sequence[int]) -> Drawn:
    """Draw these numbers, in an order of its own."""
    rows = len(numbers) + rng.randint(0, MORE_ROWS)
    columns = rng.randint(*COLUMNS)
    ground, ink = (DARK, LIGHT) if rng.random() < 0.5 else (LIGHT, DARK)
    pixels = np.empty((rows * CELL, columns * CELL, 3))
    pixels[:] = _colour(rng, ground)
    cells = [0] * rows * columns
    for row, number in zip(
        rng.sample(range(rows), len(numbers)), rng.sample(numbers, len(numbers)), strict=True
    ):
        digits = [int(digit) for digit in str(number)]
        column = rng.randint(0, columns - len(digits))
        cells[row * columns + column] = number
        y = row * CELL + rng.randint(0, CELL - GLYPH_HEIGHT)
        x = column * CELL + rng.randint(0, CELL - GLYPH_WIDTH)
        colour = _colour(rng, ink)
        for place, digit in enumerate(digits):
            left = x + place * CELL
            pixels[y : y + GLYPH_HEIGHT, left : left + GLYPH_WIDTH][GLYPHS[digit]] = colour
    noise = np.frombuffer(rng.randbytes(pixels.size), np.uint8).reshape(pixels.shape) / 127.5 - 1
    return Drawn(Image.fromarray((pixels + NOISE * noise).clip(0, 255).astype(np.uint8)), cells)


def _colour(rng: Random, bounds: tuple[int, int]) -> list[int]:
    return [rng.randint(*bounds) for _ in range(3)]
