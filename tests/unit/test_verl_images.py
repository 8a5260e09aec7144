"""Images of veRL's agent loops, without veRL: requests, names, and tensors that its trainer gets."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import vision_chats
from vision_models import pil_image

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs torchvision", allow_module_level=True)

from seer.common.errors import InvalidField
from seer.common.types import SamplingParams
from seer.integrations.images import Once
from seer.integrations.verl.groups import GroupKey, GroupMachine, Place, Request, Submission
from seer.integrations.verl.images import Images


def request(images: Images, ids: list[int], *shown: object) -> Request:
    placed = images.located(ids, shown)
    places, prepared = tuple(e.on_wire for e in placed), tuple(e.image for e in placed)
    return Request(tuple(ids), SamplingParams(), places, prepared)


def test_the_trainer_s_inputs_have_the_tensors_of_the_engines():
    """As veRL calls its processor: for the prompt, and with its text again for each sample."""
    processor = vision_chats.processor()
    images = Images.of(processor)
    assert isinstance(processor.image_processor, Once)
    shown = [pil_image(1), pil_image(2, 24, 40)]
    text = "a <|vision_start|> <|image_pad|> <|vision_end|> b <|vision_start|> <|image_pad|> <|vision_end|>"
    ids = processor(text=[text], images=shown, return_tensors="pt")["input_ids"][0].tolist()
    asked = request(images, ids, *shown)
    inputs = processor(text=["a b"], images=[each.copy() for each in shown], videos=None, return_tensors="pt")
    pixels = np.concatenate([each.image.tensors["pixel_values"] for each in asked.placed])
    assert pixels.tobytes() == np.asarray(inputs["pixel_values"]).tobytes()
    assert [each.on_wire for each in asked.placed] == list(asked.places)
    assert images.biases == {processor.image_token_id: -100.0, processor.video_token_id: -100.0}
    assert Images.of(None) is None
    with pytest.raises(InvalidField, match="the text has no place for it"):
        request(images, [1, 2], *shown)


def test_siblings_that_see_other_images_are_not_of_their_group():
    """Their tokens are equal. Images that are processed again are equal, though, whatever object they are."""
    found = []
    for seeds in ((1, 1), (1, 2)):
        machine = GroupMachine(GroupKey(1, False, "7", 0), 2)
        for session, seed in enumerate(seeds):
            images = Images.of(processor := vision_chats.processor())
            ids = [5, *[processor.image_token_id] * 6, 6]
            decided = machine.asked(session, request(images, ids, pil_image(seed)), 0.0)
        found.append([each for each in decided if isinstance(each, Submission)])
        assert len([each for each in decided if isinstance(each, Place)]) == 2
    assert [[(each.n, each.kind) for each in some] for some in found] == [
        [(2, "whole")], [(1, "apart"), (1, "apart")]
    ]  # fmt: skip
    first, second = found[1]
    assert first.prompt_id != second.prompt_id
    assert first.request.placed[0].image.name != second.request.placed[0].image.name


def test_what_was_used_longest_ago_is_forgotten_first():
    processor = vision_chats.processor()
    once = Once(processor.image_processor)
    size = once.prepared(pil_image(1)).size
    once._most = 2 * size
    first, second = once.prepared(pil_image(1)), once.prepared(pil_image(2))
    assert once.prepared(pil_image(1)) is first
    once.prepared(pil_image(3))
    assert once.prepared(pil_image(1)) is first
    again = once.prepared(pil_image(2))
    assert again is not second
    assert again.name == second.name
    assert once._bytes == 2 * size == sum(each.size for _, each in once._done.values())
