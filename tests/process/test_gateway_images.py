"""Images over HTTP, with replay engines: what is answered, what travels, what is refused, and who goes on."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import vision_chats
from gateway_system import GatewaySystem, ok, refused
from gateway_system import http as http
from vision_chats import data_uri, part, words
from vision_models import IMAGE, pil_image

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs torchvision", allow_module_level=True)

from PIL import Image

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.client.images import prepare
from seer.gateway.group_names import request_hashes

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def system() -> Iterator[GatewaySystem]:
    with GatewaySystem("engine.backend=replay", "engine.replay.vocab_size=200") as running:
        shutil.rmtree(running.model)
        vision_chats.make(running.model)
        running.start("buffer")
        running.start("engine-0")
        running.start_gateways({"gateway": ()})
        yield running


def body(*content: object, **fields: object) -> dict[str, Any]:
    given = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "logprobs": True}
    return {"messages": [{"role": "user", "content": list(content)}], **given, **fields}


def prepared(*content: object) -> Any:
    """What a trainer makes of the same message."""
    processor = vision_chats.processor()
    images = [each for each in content if not isinstance(each, str)]
    parts = [words(each) if isinstance(each, str) else {"type": "image"} for each in content]
    messages = [{"role": "user", "content": parts}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return prepare(processor, text, images)


async def image_bytes(system: GatewaySystem) -> int:
    async with RolloutClient(system.endpoint) as client:
        return (await client.status()).counters["image_received_bytes"]


async def test_an_answer_names_the_tensors_that_a_trainer_makes_itself(
    system: GatewaySystem, http: httpx.AsyncClient
) -> None:
    one, other = pil_image(1), pil_image(2, 24, 40)
    mine = prepared("a", one, "b", other)
    asked = body(words("a"), part(one), words("b"), part(other), seed=3, n=2)
    got = await ok(http.post(CHAT, json=asked))
    names = [each.image.name for each in mine.images]
    assert got["prompt_token_ids"] == mine.token_ids
    assert got["images"] == [
        {"name": each.image.name, "offset": each.offset, "length": each.length} for each in mine.images
    ]
    assert got["processed_by"]["processor"] == "Qwen2VLProcessor"
    assert got["processed_by"]["image_processor"] == "Qwen2VLImageProcessor"
    assert got["processed_by"].keys() >= {"transformers", "torchvision"}
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    name = f"seed-{request_hashes([mine.token_ids], sampling, names)[0]}"
    async with RolloutClient(system.endpoint) as client:
        prompt = Prompt(name, token_ids=mine.token_ids, images=mine.images)
        rollout = await client.submit([prompt], n=2, sampling=sampling, seed=3, rollout_number=0)
        (group,) = await rollout.result()
    ids = [choice["token_ids"] for choice in got["choices"]]
    assert ids == [response.token_ids.tolist() for response in group.responses]
    parts = [
        json.loads(line[6:])
        for line in (await http.post(CHAT, json=asked | {"stream": True})).text.split("\n\n")
        if line and line != "data: [DONE]"
    ]
    assert parts[0]["images"] == got["images"]
    assert not any("images" in each for each in parts[2:]), "the role of each choice comes with it"
    streamed: list[list[int]] = [[], []]
    for choice in (choice for each in parts for choice in each["choices"]):
        streamed[choice["index"]] += choice.get("token_ids") or []
    assert streamed == ids
    tokens = await ok(http.post("/tokenize", json={"messages": asked["messages"]}))
    assert tokens["tokens"] == mine.token_ids


async def test_other_images_are_other_requests(http: httpx.AsyncClient) -> None:
    """Equal text and seed: the tokens of a prompt whose image differs are of other noise."""
    found = [
        (await ok(http.post(CHAT, json=body(part(pil_image(seed)), words("a"), seed=1))))["choices"][0][
            "token_ids"
        ]
        for seed in (1, 2, 1)
    ]
    assert found[0] == found[2] != found[1]


async def test_siblings_and_later_turns_send_an_image_once(
    system: GatewaySystem, http: httpx.AsyncClient
) -> None:
    one = pil_image(11, 16, 16)
    before = await image_bytes(system)
    asked = body(part(one), words("a"), max_tokens=4)
    groups = [{"X-Seer-Group": "images/1", "X-Seer-Index": str(index)} for index in range(3)]
    got = await asyncio.gather(*(ok(http.post(CHAT, json=asked, headers=each)) for each in groups))
    together = await ok(
        http.post(CHAT, json=asked | {"n": 3}, headers=groups[0] | {"X-Seer-Group": "images/1"})
    )
    assert [each["choices"][0]["token_ids"] for each in got] == [
        each["token_ids"] for each in together["choices"]
    ]
    (size,) = (each.image.size for each in prepared(one, "a").images)
    assert await image_bytes(system) == before + size


async def test_a_conversation_goes_on_with_its_own_images_alone(
    system: GatewaySystem, http: httpx.AsyncClient
) -> None:
    """A word a turn, which becomes the same token again; a tool answers with an image."""
    one, other = pil_image(21, 16, 16), pil_image(22, 16, 16)
    before, counts = await image_bytes(system), system.counts("gateway")
    asked = body(part(one), words("a"), max_tokens=1, seed=1)
    history = asked["messages"]

    async def turn(messages: list[Any]) -> dict[str, Any]:
        return await ok(
            http.post(CHAT, json=asked | {"messages": messages}, headers={"X-Session-ID": "shown"})
        )

    for number in range(3):
        answer = await turn(history)
        assert len(answer["images"]) == min(number, 1) + 1
        lengths = sum(each["length"] for each in answer["images"])
        assert answer["prompt_token_ids"].count(IMAGE) == lengths
        said = answer["choices"][0]["message"]["content"]
        follow = {"role": "user", "content": "c"}
        if number == 0:
            follow = {"role": "tool", "content": [words("b"), part(other)]}
        history = [*history, {"role": "assistant", "content": said}, follow]
    (size,) = (each.image.size for each in prepared(one, "a").images)
    assert await image_bytes(system) == before + 2 * size, "both images have one size, and each came once"
    after = system.counts("gateway")
    assert (after["later_turns"], after["segments"]) == (counts["later_turns"] + 2, counts["segments"])
    await turn([{"role": "user", "content": [part(pil_image(23, 16, 16)), words("a")]}, *history[1:]])
    assert system.counts("gateway")["segments"] == counts["segments"] + 1, "equal tokens, another image"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.org/a.png", "nothing is fetched"),
        ("data:image/gif;base64," + base64.b64encode(b"GIF89a").decode(), "give PNG, JPEG, WEBP"),
        ("data:image/png;base64," + base64.b64encode(b"text").decode(), "cannot be read as an image"),
        (data_uri(pil_image(1))[:-3], "is not base64"),
        (data_uri(Image.new("1", (8192, 8192))), "8192 x 8192 pixels"),
        (data_uri(pil_image(1, 2, 800)), "absolute aspect ratio"),
    ],
    ids=range(6),
)
async def test_hostile_images_are_refused_by_name(http: httpx.AsyncClient, url: str, says: str) -> None:
    response = await http.post(CHAT, json=body(words("a"), part(url)))
    assert says in refused(response, 400)
    assert response.json()["error"]["param"] == "messages[0].content[1].image_url.url"


async def test_what_is_not_an_image_of_a_chat_is_refused_by_name(http: httpx.AsyncClient) -> None:
    shown = [part(pil_image(1))] * 65
    for path, given, param in (
        (CHAT, body(*shown), "messages[0].content[64]"),
        (CHAT, body({"type": "video_url", "video_url": {"url": "data:"}}), "messages[0].content[0].type"),
        (CHAT, body({"type": "input_audio"}), "messages[0].content[0].type"),
        (CHAT, body(part(pil_image(1)), mm_processor_kwargs={"max_pixels": 1}), "mm_processor_kwargs"),
        (CHAT, body(part(pil_image(1)), media_io_kwargs={"image": {}}), "media_io_kwargs"),
        (CHAT, body(part(pil_image(1)), words("<|image_pad|>")), "messages"),
        (CHAT, body(words("<|image_pad|>")), "messages"),
        ("/v1/completions", {"prompt": "a <|image_pad|>"}, "prompt[0]"),
        ("/inference/v1/generate", {"token_ids": [5, IMAGE], "sampling_params": {}}, "token_ids"),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {}, "features": {"a": 1}},
            "features",
        ),
    ):
        response = await http.post(path, json=given)
        refused(response, 400)
        assert response.json()["error"]["param"] == param
    await ok(http.get("/v1/models"))


async def test_other_requests_go_on_while_images_are_decoded(http: httpx.AsyncClient) -> None:
    """Large images wait for each other on a thread of their own."""
    large = [part(pil_image(seed, 2048, 2048).convert("1")) for seed in range(3)]
    slow = asyncio.create_task(http.post(CHAT, json=body(*large)))
    answered = 0
    while not slow.done():
        await ok(http.get("/version"))
        answered += 1
    assert answered > 3
    await ok(asyncio.shield(slow))
