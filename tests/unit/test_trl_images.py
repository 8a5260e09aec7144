"""Images of TRL's prompts: the list in `seer.integrations.trl.images`, with real processors."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import prepared_images
import pytest
import vision_chats
from vision_models import pil_image

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs torchvision", allow_module_level=True)

from transformers import AutoProcessor

from seer.common.errors import InvalidField
from seer.integrations.trl.images import Images
from seer.integrations.trl.settings import check_supported, sampling_params

HERE = Path(__file__).parent
FAMILIES = ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"]


def messages(*shown: object) -> list[dict[str, object]]:
    parts = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each}
             for each in shown]  # fmt: skip
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_and_the_forward_pass_get_one_processing(family, monkeypatch):
    """As TRL calls a processor: for the prompts' tokens, then for its forward pass, with copies of images."""
    processor = vision_chats.processor(family)
    own = processor.image_processor
    calls = []
    process = type(own).__call__
    monkeypatch.setattr(
        type(own), "__call__", lambda self, *a, **k: calls.append(1) or process(self, *a, **k)
    )
    shown = [
        [pil_image(1)],
        [pil_image(1)],
        [pil_image(2, 24, 40), pil_image(1)],
        [pil_image(3).convert("L")],
    ]
    prompts = [messages("a", *each, "b") for each in shown]
    shared = Images(processor)
    with shared.processed_once():
        ids = processor.apply_chat_template(
            conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        contexts, prepared = shared.contexts(ids, shown)
        texts = processor.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        copies = [[each.copy() for each in some] for some in shown]
        forward = processor(images=copies, text=texts, padding=True, return_tensors="pt")
        tools = processor.image_processor(
            images=[each for some in copies for each in some], return_tensors="pt"
        )
    assert processor.image_processor is own
    assert len(calls) == len(prepared) == 3
    names = [each.name for context in contexts for each in context.images]
    assert names[0] == names[1] == names[3]
    for inputs in (forward, tools):
        pixels = np.asarray(inputs["pixel_values"])
        assert (
            np.concatenate([prepared[name].tensors["pixel_values"] for name in names]).tobytes()
            == pixels.tobytes()
        )
        grids = np.asarray(inputs["image_grid_thw"]).tolist()
        assert [prepared[name].tensors["image_grid_thw"].tolist()[0] for name in names] == grids
    assert contexts[0] == contexts[1]
    assert contexts[0].tokens == tuple(ids[0])
    plain = vision_chats.processor(family)(images=shown, text=texts, padding=True, return_tensors="pt")
    assert np.array_equal(plain["pixel_values"], forward["pixel_values"]), "what TRL would have without Seer"
    assert plain["input_ids"].tolist() == forward["input_ids"].tolist()


def test_palettes_and_transparency_tell_images_apart():
    processor = vision_chats.processor()
    one, other = pil_image(1).convert("P"), pil_image(1).convert("P")
    other.putpalette([255 - value for value in other.getpalette()])
    shared = Images(processor)
    with shared.processed_once():
        once = processor.image_processor
        assert once.prepared(one).name != once.prepared(other).name
        assert once.prepared(one) is once.prepared(one.copy())
        assert once.merge_size == 2


def test_what_does_not_fit_is_refused_by_name():
    processor = vision_chats.processor()
    shared = Images(processor)
    assert shared.contexts([[1, 2]], None) == ([((1, 2), ())], {})
    with pytest.raises(InvalidField, match="give them to a trainer with a processor"):
        shared.contexts([[1, 2]], [[pil_image(1)]])
    with shared.processed_once():
        with pytest.raises(InvalidField, match=r"images\[0\] = '6 tokens': the text has no place for it"):
            shared.contexts([[1, 2]], [[pil_image(1)]])
        with pytest.raises(InvalidField, match=r"images = 'str': give images as PIL has them"):
            shared.contexts([[1, 2]], [["https://example.org/a.png"]])
        with pytest.raises(InvalidField, match="places for more than 0 images"):
            shared.contexts([[1, processor.image_token_id]], [None])
    with Images(SimpleNamespace()).processed_once():
        pass


def test_an_error_gives_the_processor_its_own_image_processor_back():
    processor = vision_chats.processor()
    own = processor.image_processor
    with pytest.raises(ZeroDivisionError), Images(processor).processed_once():
        raise ZeroDivisionError
    assert processor.image_processor is own


def test_a_processor_is_saved_with_its_own_image_processor(tmp_path):
    """As a checkpoint is that a trainer writes while it generates."""
    processor = vision_chats.processor()
    own = processor.image_processor
    with Images(processor).processed_once():
        processor.save_pretrained(tmp_path)
        for found in (copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
            assert type(found.image_processor) is type(own)
            assert found.image_processor is not own
    assert type(AutoProcessor.from_pretrained(tmp_path).image_processor) is type(own)


def test_processors_that_trl_or_engines_would_not_understand_are_refused():
    args = SimpleNamespace(
        use_vllm=False, use_transformers_continuous_batching=False, vllm_structured_outputs_regex=None,
        loss_type="dapo",
    )  # fmt: skip
    config = SimpleNamespace(architectures=["Qwen2VLForConditionalGeneration"])
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, state=SimpleNamespace())
    trainer = SimpleNamespace(
        args=args, model=SimpleNamespace(config=config), accelerator=accelerator,
        processing_class=vision_chats.processor(),
    )  # fmt: skip
    trainer.processing_class.tokenizer.padding_side = "left"
    check_supported(trainer, images=True)
    with pytest.raises(InvalidField, match="processing_class = 'Qwen2VLProcessor': use SeerGRPOTrainer"):
        check_supported(trainer, images=False)
    trainer.processing_class.tokenizer.padding_side = "right"
    with pytest.raises(InvalidField, match="padding_side = 'right': TRL pads prompts on the left"):
        check_supported(trainer, images=True)
    config.architectures = ["LlavaForConditionalGeneration"]
    with pytest.raises(InvalidField, match="Seer runs images of Qwen2VLForConditionalGeneration, "):
        check_supported(trainer, images=True)


def test_placeholders_are_never_sampled():
    processor = vision_chats.processor()
    args = SimpleNamespace(
        generation_kwargs={"logit_bias": {5: 1.0}}, max_completion_length=9, temperature=1.0, top_p=1.0, top_k=0,
        min_p=None, repetition_penalty=1.0, vllm_structured_outputs_regex=None,
    )  # fmt: skip
    trainer = SimpleNamespace(args=args, processing_class=processor, eos_token_ids=[2])
    biases = {processor.image_token_id: -100.0, processor.video_token_id: -100.0, 5: 1.0}
    assert sampling_params(trainer).logit_bias == biases


def test_images_of_all_processes_come_together_in_the_main_one_alone(tmp_path):
    """Two real processes, which have one image in common."""
    command = [sys.executable, str(HERE.parent / "trl_gather.py")]
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE.parent)}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environ)
        for rank in range(2)
    ]
    first, second = (json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks)
    made = [prepared_images.prepared(seed) for seed in range(3)]
    assert first == {each.name: each.data.tobytes().hex() for each in made}
    assert second == {made[at].name: made[at].data.tobytes().hex() for at in (0, 2)}
