"""The table of vision-language models: what an image must be, and how many tokens it takes."""

import numpy as np
import pytest

from seer.common.errors import InvalidField
from seer.common.image_models import PATCH_SIZES, ImageModel, image_model
from seer.common.prepared_image import make

MODEL = ImageModel(placeholder=9, merge=2, patch_numbers=24)
"""Patches of 2 by 2 pixels."""


def image(grid=(1, 4, 6), shape=None, **changes):
    shape = shape or (grid[1] * grid[2], MODEL.patch_numbers)
    tensors = {"image_grid_thw": np.array([grid]), "pixel_values": np.ones(shape, np.float32)}
    return make("image", {name: each for name, each in (tensors | changes).items() if each is not None})


@pytest.mark.parametrize(("grid", "tokens"), [((1, 4, 6), 6), ((1, 2, 2), 1), ((1, 2, 8), 4)])
def test_an_image_takes_a_token_for_each_square_of_patches(grid, tokens):
    assert MODEL.check(image(grid)) == tokens


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (make("video", {"pixel_values": np.zeros(1, np.float32)}), "modality"),
        (image(pixel_values=None), "image"),
        (image(image_embeds=np.zeros((6, 8), np.float32)), "image"),
        (image((2, 4, 6), (48, 24)), "image_grid_thw"),
        (image((0, 4, 6)), "image_grid_thw"),
        (image((1, 3, 6)), "image_grid_thw"),
        (image((1, 4, 0), (0, 24)), "image_grid_thw"),
        (image((1, -4, -6), (24, 24)), "image_grid_thw"),
        (image(image_grid_thw=np.array([1, 4, 6])), "image_grid_thw"),
        (image(image_grid_thw=np.array([[1, 4, 6], [1, 4, 6]])), "image_grid_thw"),
        (image(image_grid_thw=np.ones((1, 3), np.float32)), "image_grid_thw"),
        (image(shape=(23, 24)), "pixel_values"),
        (image(shape=(24, 23)), "pixel_values"),
        (image(shape=(24 * 24,)), "pixel_values"),
        (image(pixel_values=np.ones((24, 24), np.int64)), "pixel_values"),
        (image(pixel_values=np.full((24, 24), np.nan, np.float32)), "pixel_values"),
        (image(pixel_values=np.full((24, 24), np.inf, np.float32)), "pixel_values"),
    ],
)
def test_what_the_model_cannot_read_is_refused_by_field(wrong, field):
    with pytest.raises(InvalidField) as refused:
        MODEL.check(wrong)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen3VLMoeForConditionalGeneration", "Qwen2ForCausalLM"]
)
def test_architectures_that_were_not_proved_take_no_images(name):
    assert image_model({"architectures": [name], "vision_config": {}, "image_token_id": 5}) is None


def test_the_model_s_own_configuration_counts():
    vision = {"patch_size": 4, "spatial_merge_size": 3, "temporal_patch_size": 1, "in_channels": 1}
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "vision_config": vision,
        "image_token_id": 5,
    }
    assert image_model(config) == ImageModel(5, 3, 16)


@pytest.mark.parametrize("name", PATCH_SIZES)
def test_what_a_configuration_leaves_out_is_as_in_transformers(name):
    transformers = pytest.importorskip("transformers")
    kind = {"Qwen2VL": "Qwen2VLConfig", "Qwen2_5_VL": "Qwen2_5_VLConfig", "Qwen3VL": "Qwen3VLConfig"}
    config = getattr(transformers, kind[name.removesuffix("ForConditionalGeneration")])()
    full = config.to_dict() | {"architectures": [name]}
    assert image_model({"architectures": [name]}) == image_model(full)
    assert image_model(full).placeholder == config.image_token_id
