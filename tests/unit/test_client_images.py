"""What `images.prepare` makes of a processor's answer: places found, tensors split, and nothing left over."""

from types import SimpleNamespace

import numpy as np
import pytest

from seer.client.images import prepare
from seer.common.errors import InvalidField

PAD = 9
NUMBERS = 8


class Processor:
    """As those of Qwen's models: a placeholder for each 2 by 2 patches, in place of each `<image>`."""

    image_token_id = PAD
    image_processor = SimpleNamespace(merge_size=2)

    def __init__(self, **changes):
        self.changes = changes
        self.calls = 0

    def __call__(self, text, images, return_tensors):
        assert return_tensors == "pt"
        self.calls += 1
        tokens, left = [], list(images or ())
        for word in text[0].split():
            if word == "<image>" and left:
                _, height, width = left.pop(0)
                tokens += [1] + [PAD] * (height * width // 4) + [2]
            else:
                tokens.append(PAD if word == "<image>" else len(word))
        grids = np.array(images or np.zeros((0, 3)), np.int64)
        rows = int(grids.prod(-1).sum())
        pixels = np.arange(rows * NUMBERS, dtype=np.float32).reshape(rows, NUMBERS)
        found = {"input_ids": np.array([tokens]), "pixel_values": pixels, "image_grid_thw": grids}
        return {name: each for name, each in (found | self.changes).items() if each is not None}


SMALL, LARGE = (1, 2, 2), (1, 4, 6)


def test_each_image_gets_its_tokens_and_its_part_of_the_tensors():
    processor = Processor()
    tokens, images, inputs = prepare(processor, "what <image> and <image> then", [LARGE, SMALL])
    assert tokens == [4, 1, *[PAD] * 6, 2, 3, 1, PAD, 2, 4]
    assert [(each.offset, each.length) for each in images] == [(2, 6), (11, 1)]
    pixels = [each.image.tensors["pixel_values"] for each in images]
    assert np.concatenate(pixels).tolist() == inputs["pixel_values"].tolist(), (
        "the trainer's tensors, all of them"
    )
    assert [each.image.tensors["image_grid_thw"].tolist() for each in images] == [
        [list(LARGE)],
        [list(SMALL)],
    ]
    assert processor.calls == 1


def test_images_side_by_side_are_told_apart():
    changes = {"input_ids": np.array([[PAD] * 7])}
    _, images, _ = prepare(Processor(**changes), "x", [LARGE, SMALL])
    assert [(each.offset, each.length) for each in images] == [(0, 6), (6, 1)]


def test_text_alone_has_no_images():
    tokens, images, _ = prepare(Processor(), "what then", [])
    assert (tokens, images) == ([4, 4], [])


@pytest.mark.parametrize(
    ("text", "images", "changes", "says"),
    [
        ("what", [SMALL], {}, r"images\[0\] = '1 tokens': the text has no place for it"),
        ("<image> <image>", [SMALL], {}, "has places for more than 1 images"),
        ("<image>", [SMALL], {"pixel_values": None}, "returns no pixel_values"),
        ("<image>", [SMALL], {"image_grid_thw": None}, "returns no image_grid_thw"),
        (
            "<image>",
            [SMALL],
            {"image_grid_thw": np.array([SMALL, SMALL])},
            "images = 1: the processor returned 2",
        ),
        ("<image>", [SMALL], {"pixel_values": np.zeros((4, 8))}, "float64"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(text, images, changes, says):
    with pytest.raises(InvalidField, match=says):
        prepare(Processor(**changes), text, images)
