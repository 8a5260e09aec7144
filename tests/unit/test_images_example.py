"""The example of numbers in images: glyphs, images, what is read, and that what is shipped belongs together."""

import importlib.util
import json
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from seer.client.images import prepare

if any(importlib.util.find_spec(name) is None for name in ("PIL", "torchvision", "transformers")):
    pytest.skip("needs the extra images", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "examples" / "countdown_images"))

import drawing
import reading
from drawing import CELL, GLYPH_HEIGHT, GLYPH_WIDTH, GLYPHS, draw
from PIL import Image
from reading import IDS, task

EXAMPLE = Path(drawing.__file__).parent
LINES = [json.loads(line) for line in (EXAMPLE / "prompts.jsonl").read_text().splitlines()]
MOST_SHIPPED = 5_000_000
"""Bytes of the model's folder."""


@pytest.fixture(scope="module")
def processor():
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(EXAMPLE / "model")


def digits(ink: np.ndarray) -> str:
    """Return the digits in a row of cells, from the left, by comparing each place with each glyph."""
    found = ""
    for x in range(ink.shape[1] - GLYPH_WIDTH + 1):
        for y in range(CELL - GLYPH_HEIGHT + 1):
            here = ink[y : y + GLYPH_HEIGHT, x : x + GLYPH_WIDTH]
            found += "".join(str(digit) for digit, glyph in enumerate(GLYPHS) if (here == glyph).all())
    return found


def test_no_glyph_is_anothers():
    assert len({glyph.tobytes() for glyph in GLYPHS}) == 10
    assert {glyph.shape for glyph in GLYPHS} == {(GLYPH_HEIGHT, GLYPH_WIDTH)}


def test_an_image_shows_its_numbers_whole_and_no_others(monkeypatch):
    monkeypatch.setattr(drawing, "NOISE", 0)
    sizes = set()
    for seed in range(200):
        rng = Random(seed)
        numbers = [rng.randint(1, 12) for _ in range(3 + seed % 2)]
        image, cells = draw(rng, numbers)
        pixels = np.asarray(image)
        sizes.add(image.size)
        colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
        rows = (pixels != colours[counts.argmax()]).any(axis=2).reshape(-1, CELL, image.width)
        assert sorted(int(number) for number in map(digits, rows) if number) == sorted(numbers), seed
        begins = np.reshape(cells, (len(rows), -1))
        assert [row.max() for row in begins] == [int(digits(row) or 0) for row in rows], seed
        for row, ink in zip(begins, rows, strict=True):
            for column in np.flatnonzero(row):
                assert ink[:, : column * CELL].sum() == 0, "nothing stands before the cell where it begins"
                assert ink[:, column * CELL : (column + 1) * CELL].any()
    assert len(sizes) == 9


def test_an_image_follows_from_the_seed_and_has_noise_of_its_own():
    one, again, other = (np.asarray(draw(Random(seed), [3, 4, 5]).image) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert one.shape != other.shape or not np.array_equal(one, other)
    assert len(np.unique(one.reshape(-1, 3), axis=0)) > 100


def test_a_response_that_reads_rightly_and_searches_well_is_accepted():
    for seed in range(50):
        rng = Random(seed)
        problem = task.draw_problem(rng, 3)
        words = reading.draw_response(rng, problem)
        response = " ".join(words)
        assert reading.read_rightly(problem, response)
        assert task.check(problem.prompt, response)
        assert words[: words.index(":") + 1] == reading.draw_response(rng, problem, search=False)
        wrong = task.Problem((problem.numbers[0] % 12 + 1, *problem.numbers[1:]), problem.target)
        assert not reading.read_rightly(wrong, response)


def test_a_longer_or_shorter_list_of_numbers_is_not_read_rightly():
    problem = task.Problem((12, 10, 5), 17)
    assert reading.read_rightly(problem, "12 10 5 > 17 S3")
    for text in ("12 10 > 17", "12 10 5 5 > 17", "2 10 5 > 17", "", "> 17"):
        assert not reading.read_rightly(problem, text)


def test_shipped_images_are_those_that_the_script_draws_and_fit_the_problems():
    assert len(LINES) == 64
    for number, line in enumerate(LINES):
        problem = task.Problem(tuple(line["numbers"]), line["target"])
        assert line["prompt"] == reading.prompt(problem)
        (name,) = line["images"]
        again = draw(Random(f"{reading.SEED}/{number}"), problem.numbers).image
        assert np.array_equal(np.asarray(Image.open(EXAMPLE / name)), np.asarray(again))
    held_out = [json.loads(line) for line in (reading.COUNTDOWN / "prompts.jsonl").read_text().splitlines()]
    assert [(line["numbers"], line["target"]) for line in LINES] == [
        (line["numbers"], line["target"]) for line in held_out
    ]


def test_the_shipped_processor_gives_each_cell_a_token_and_resizes_nothing(processor):
    for line in LINES:
        with Image.open(EXAMPLE / line["images"][0]) as image:
            width, height = image.size
            tokens, (placed,), inputs = prepare(processor, line["prompt"], [image.convert("RGB")])
        cells = width // CELL * (height // CELL)
        assert tokens == [
            IDS[word]
            for word in (
                task.BOS,
                reading.START,
                *[reading.IMAGE] * cells,
                reading.END,
                ">",
                str(line["target"]),
            )
        ]
        assert (placed.offset, placed.length) == (2, cells)
        assert inputs["image_grid_thw"].tolist() == [[1, 2 * height // CELL, 2 * width // CELL]]


def test_the_vocabulary_begins_with_that_of_the_model_of_text(processor):
    assert processor.tokenizer.get_vocab() == IDS
    assert reading.VOCAB[: len(task.VOCAB)] == task.VOCAB


def test_the_shipped_model_is_small():
    sizes = {file.name: file.stat().st_size for file in (EXAMPLE / "model").iterdir()}
    assert sum(sizes.values()) < MOST_SHIPPED
    assert sum(file.stat().st_size for file in (EXAMPLE / "pictures").iterdir()) < 400_000
