"""Images of chats in the gateway: the list in `seer.gateway.images`, with real processors."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import vision_models
from vision_models import IMAGE, pil_image

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs torchvision", allow_module_level=True)

from seer.client.images import prepare
from seer.common.errors import ConfigError, InvalidField
from seer.common.image_models import ImageModel
from seer.common.types import MAX_IMAGE_BYTES
from seer.gateway import images as module
from seer.gateway.errors import HttpError
from seer.gateway.image_processor import ImageProcessor, model_of
from seer.gateway.images import Images
from seer.gateway.jobs import Answer, Jobs
from seer.gateway.messages import ImageFile

MODEL = ImageModel(IMAGE, 2, 96)
MOST = MAX_IMAGE_BYTES


def file(shown: Any, kind: str = "PNG", **options: Any) -> ImageFile:
    data = io.BytesIO()
    shown.save(data, kind, **options)
    return ImageFile("f", data.getvalue())


class Here:
    """Jobs in this process; `calls` has the fields whose images were processed."""

    def __init__(self, family: str) -> None:
        self.jobs = Jobs(None, ImageProcessor(MODEL, vision_models.processor_of(family)))
        self.calls: list[str] = []

    async def run(self, field: str, name: str, *arguments: Any) -> Any:
        if name == "image":
            self.calls.append(field)
        request = msgspec.msgpack.encode((field, name, arguments))
        told = msgspec.msgpack.decode(msgspec.msgpack.encode(self.jobs.answer(request)), type=Answer)
        if told.status != 200:
            raise HttpError(told.status, told.error, told.param)
        return told.result


class Gateway(Images):
    """`place` as a call that returns."""

    def placed(self, *given: Any) -> Any:
        return asyncio.run(self.place(*given))


def images(family: str = "qwen2-vl", most: int = MOST) -> Gateway:
    return Gateway(MODEL, Here(family).run, most)


def unexpanded(processor: Any, text: str) -> list[int]:
    ids: list[int] = processor.tokenizer(text)["input_ids"]
    return ids


@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_tokens_and_tensors_are_those_of_prepare_on_the_trainer_s_side(family: str) -> None:
    """After a round trip through PNG: of several sizes, equal ones, and other modes."""
    gateway, processor = images(family), vision_models.processor_of(family)
    shown = [pil_image(1), pil_image(2, 24, 40), pil_image(1), pil_image(3, 301, 217)]
    shown += [pil_image(4).convert(mode) for mode in ("L", "P", "RGBA", "LA", "1")]
    shown[6].putalpha(7)
    text = "a " + " b ".join(["<|vision_start|> <|image_pad|> <|vision_end|>"] * len(shown))
    expected = prepare(processor, text, shown)
    tokens, found = gateway.placed(unexpanded(processor, text), [file(each) for each in shown])
    assert tokens == expected.token_ids
    assert [each.on_wire for each in found] == [each.on_wire for each in expected.images]
    pixels = np.concatenate([each.image.tensors["pixel_values"] for each in found])
    assert pixels.tobytes() == np.asarray(expected.inputs["pixel_values"]).tobytes()
    assert gateway.made_by["image_processor"] == type(processor.image_processor).__name__
    assert {"processor", "image_processor", "transformers", "torchvision"} <= gateway.made_by.keys()


def test_a_known_image_is_not_processed_again() -> None:
    here = Here("qwen2-vl")
    gateway, calls = Gateway(MODEL, here.run, MOST), here.calls
    one, other = file(pil_image(1)), ImageFile("g", file(pil_image(2)).data)
    first = gateway.placed([IMAGE, IMAGE, IMAGE], [one, one, other])[1]
    again = gateway.placed([5, IMAGE, IMAGE], [one, other])[1]
    assert calls == ["f", "g"]
    assert first[0].image is first[1].image is again[0].image
    assert again[1].image is first[2].image


def test_text_alone_must_have_no_placeholder() -> None:
    gateway = images()
    gateway.check_text([1, 2], "prompt[0]")
    with pytest.raises(HttpError, match=rf"prompt\[0\] = {IMAGE}: is the placeholder of an image"):
        gateway.check_text([1, IMAGE], "prompt[0]")
    for tokens, count in (([1], 0), ([IMAGE, 3, IMAGE], 2)):
        with pytest.raises(HttpError, match=f"messages = '{count} placeholders': for 1 images"):
            gateway.placed(tokens, [file(pil_image(1))])


def test_what_cannot_be_run_is_refused_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = images()
    for shown, says in ((pil_image(1, 1, 900), "900 x 1 pixels': absolute aspect ratio"),):
        with pytest.raises(HttpError, match=says) as info:
            gateway.placed([IMAGE], [file(shown)])
        assert (info.value.status, info.value.param) == (400, "f")
    with pytest.raises(HttpError, match="f = '4 bytes': cannot be read as an image") as info:
        gateway.placed([IMAGE], [ImageFile("f", b"text")])
    assert (info.value.status, info.value.param) == (400, "f")
    monkeypatch.setattr(module, "MAX_NEW_PIXELS", 2 * 16 * 24)
    several = [file(pil_image(seed)) for seed in range(3)]
    with pytest.raises(HttpError, match=f"messages = '{3 * 16 * 24} pixels': give images of at most"):
        gateway.placed([IMAGE] * 3, several)
    gateway.placed([IMAGE] * 2, several[:2])
    gateway.placed([IMAGE] * 3, several)  # those that are known cost nothing


def test_memory_is_bounded_and_what_is_not_in_use_goes_first() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.image_bytes = 5: give at least"):
        images(most=5)
    gateway = images()
    files = [file(pil_image(seed)) for seed in range(5)]
    (one,) = gateway.placed([IMAGE], files[:1])[1]
    gateway._most = 3 * one.image.size
    for each in files[1:]:
        gateway.placed([IMAGE], [each])
    assert gateway._bytes_held() == 3 * one.image.size
    kept = gateway.placed([IMAGE] * 2, files[3:])[1]
    with pytest.raises(HttpError, match="other requests hold images") as info:
        gateway.placed([IMAGE], files[2:3])
    assert info.value.status == 503
    del one, kept, info
    gc.collect()
    with pytest.raises(HttpError, match=r"give at most \d+ \(gateway\.image_bytes\)") as info:
        gateway.placed([IMAGE] * 4, files[:4])
    assert info.value.status == 400
    del info
    gc.collect()
    gateway.placed([IMAGE] * 3, files[:3])
    assert gateway._bytes_held() <= gateway._most


def test_models_without_images_say_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    text = Gateway(model_of(str(tmp_path)), Here("qwen2-vl").run, MOST)
    text.check_text([IMAGE], "prompt[0]")
    with pytest.raises(HttpError, match="this model's images cannot be run"):
        text.placed([IMAGE], [file(pil_image(1))])
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2VLForConditionalGeneration"]}')
    processor = ImageProcessor.load(str(tmp_path))
    with pytest.raises(InvalidField, match=r"the processor cannot be loaded .*: docs/images\.md"):
        processor.pixels([("f", file(pil_image(1)).data)])
