"""The images that lines of `seer rollout` name: which files are read, and what is refused, by line and field."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from seer.common.errors import InvalidField
from seer.rollout.files import read_prompts
from seer.rollout.image_reader import ImageReader
from seer.rollout.rollout_journal import prompts_digest

Image = pytest.importorskip("PIL.Image")

PAD = 9


class Processor:
    """Four pixels are a patch, four patches a token; an image's numbers are its own pixels."""

    image_token_id = PAD
    image_processor = SimpleNamespace(merge_size=2)

    def __call__(self, text, images, return_tensors):
        tokens = [3, *[PAD] * 4] * text[0].count("#")
        grids, rows = [], []
        for image in images:
            pixels = np.asarray(image, np.float32)
            assert pixels.shape == (8, 8, 3)
            grids.append([1, 4, 4])
            rows.append(pixels.reshape(16, 12))
        return {
            "input_ids": np.array([[*tokens, len(text[0])]]),
            "pixel_values": np.concatenate(rows),
            "image_grid_thw": np.array(grids),
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name, value in (("in/a.png", 10), ("in/deep/b.png", 20), ("outside.png", 30)):
        Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(tmp_path / name)
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "outside.png")
    (tmp_path / "in" / "loop.png").symlink_to("loop.png")
    (tmp_path / "in" / "text.png").write_text("no image")
    return tmp_path / "in"


def read(folder, *records, processor=True):
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    reader = ImageReader(folder, None)
    reader._model, reader._processor = folder, Processor() if processor else None
    return read_prompts(path, None, reader)


def test_images_stand_where_their_placeholders_stand(folder):
    (line,) = read(folder, {"id": "a", "prompt": "# and #", "images": ["a.png", "deep/b.png"], "answer": 5})
    prompt = line.prompt
    assert prompt.token_ids.tolist() == [3, PAD, PAD, PAD, PAD, 3, PAD, PAD, PAD, PAD, 7]
    assert [(each.offset, each.length) for each in prompt.images] == [(1, 4), (6, 4)]
    assert [each.image.tensors["pixel_values"][0, 0] for each in prompt.images] == [10, 20]
    assert prompt.metadata == {"answer": 5}


def test_a_run_is_another_one_with_other_images(folder):
    def digest(image):
        return prompts_digest(read(folder, {"id": "a", "prompt": "#", "images": [image]}))

    assert digest("a.png") == digest("deep/../a.png") != digest("deep/b.png")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"images": ["../outside.png"]}, "images[0] = '../outside.png': give a file below the folder"),
        ({"images": ["link.png"]}, "images[0] = 'link.png': give a file below the folder"),
        ({"images": ["/etc/passwd"]}, "images[0] = '/etc/passwd': give a file below the folder"),
        ({"images": ["http://localhost/a.png"]}, "nothing is fetched"),
        ({"images": ["file:///a.png"]}, "nothing is fetched"),
        ({"images": ["a.png", "none.png"]}, "images[1] = 'none.png': cannot be read as an image"),
        ({"images": ["text.png"]}, "images[0] = 'text.png': cannot be read as an image"),
        ({"images": ["loop.png"]}, "images[0] = 'loop.png': give a file below the folder"),
        ({"images": ["a\0.png"]}, "images[0] = 'a\\x00.png': give a file below the folder"),
        ({"images": []}, "images = []: give a list of files"),
        ({"images": "a.png"}, "images = 'a.png': give a list of files"),
        ({"images": [3]}, "images = [3]: give a list of files"),
        ({"prompt": "no place"}, "images: images[0] = ['a.png']: the text has no place for it"),
        ({"prompt": "##"}, "images: text = ['a.png']: has places for more than 1 images"),
        ({"prompt": ""}, "prompt = '': give a text with a placeholder"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids = 'given': give the prompt of images as text"),
    ],
)
def test_refused_lines_name_file_line_and_field(folder, changes, told):
    line = {"id": "a", "prompt": "#", "images": ["a.png"]} | changes
    with pytest.raises(InvalidField) as info:
        read(folder, {"id": "b", "prompt": "#", "images": ["a.png"]}, line)
    assert str(info.value).startswith(f"{folder / 'prompts.jsonl'}:2: ")
    assert told in str(info.value)


def test_images_need_a_model_with_a_processor(folder):
    line = {"id": "a", "prompt": "#", "images": ["a.png"]}
    with pytest.raises(InvalidField, match=r"--model = .*its processor cannot be loaded"):
        read(folder, line, processor=False)
    path = folder / "prompts.jsonl"
    with pytest.raises(InvalidField, match="images need --model DIR"):
        read_prompts(path, None, ImageReader(folder, None))
    with pytest.raises(InvalidField, match="takes prompts of text alone"):
        read_prompts(path, None)
