"""TRL's trainers and the gateway with images, against real engines: equal tokens, and one processing for all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trl_runs
import vision_chats
from up import Up
from vision_models import pil_image

if any(importlib.util.find_spec(name) is None for name in ("vllm", "torchvision", "trl")):
    pytest.skip("needs the engine extra, torchvision and TRL", allow_module_level=True)

from seer.client import Prompt, RolloutClient, SamplingParams, SyncRolloutClient
from seer.client.images import locate, prepare, split
from seer.integrations.images import Once
from seer.integrations.trl import SeerGRPOTrainer, SeerRLOOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

G = trl_runs.G
ROWS = [("a # b", [pil_image(1)]), ("# c #", [pil_image(2, 24, 40), pil_image(3)])]
SHOWN_BY_TOOLS = pil_image(7, 16, 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_chats.make(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def system(model: Path) -> Iterator[Up]:
    yield from trl_runs.beside_trl(
        model, 1, "engine.max_model_len=256", "engine.kv_blocks=100", "buffer.chunk_size=16"
    )


def look(text: str) -> list[dict[str, Any]]:
    """Look somewhere.

    Args:
        text: Where.
    """
    return [{"type": "image", "image": SHOWN_BY_TOOLS}, {"type": "text", "text": "z"}]


def processor() -> Any:
    found = vision_chats.processor()
    found.tokenizer.response_template = trl_runs.CALLS
    found.tokenizer.padding_side = "left"
    return found


def rows() -> Any:
    """Conversations whose parts say where images stand; the images are a column, as TRL has them."""
    from datasets import Dataset

    found = []
    for words, shown in ROWS:
        parts = [
            {"type": "image"} if each == "#" else {"type": "text", "text": each} for each in words.split()
        ]
        found.append({"prompt": [{"role": "user", "content": parts}], "images": shown})
    return Dataset.from_list(found)


def again(client: SyncRolloutClient, call: trl_runs.Call) -> int:
    """Assert that a client that knows nothing of TRL gets each turn's tokens; return how many images it gave."""
    live = client.update_weights(client.status().weight_version + 1, call.folder)
    assert live.digest == call.live
    mine = vision_chats.processor()
    never = {mine.image_token_id: -100.0, mine.video_token_id: -100.0}
    turns, given = list(call.turns()), []
    for position, turn, prompt, _, _ in turns:
        shown = [*ROWS[position // G][1], *[SHOWN_BY_TOOLS] * turn]
        images = split(mine.image_processor(images=shown, return_tensors="pt"))
        given.append(locate(mine, prompt, images))

    async def ask(client: RolloutClient) -> list[list[int]]:
        rollout = client.open_rollout(repeat=True)
        asked = [
            rollout.submit(
                Prompt(f"{position} {turn}", token_ids=prompt, images=images),
                sampling=SamplingParams(
                    max_tokens=limit, temperature=0.9, stop_token_ids=(2, *trl_runs.LETTERS), logit_bias=never
                ),
                seed=trl_runs.SEED,
                rollout_number=call.step,
                group=trl_runs.group_name(call, position // G, turn),
                first_index=position % G,
            )
            for (position, turn, prompt, limit, _), images in zip(turns, given, strict=True)
        ]
        rollout.close()
        return [(await each.result()).responses[0].token_ids.tolist() for each in asked]

    assert client.run(ask) == [tokens for *_, tokens in turns]
    return sum(map(len, given))


def trained(
    kind: Any, config_class: Any, system: Up, model: Path, folder: Path, **others: Any
) -> list[trl_runs.Call]:
    settings = {"learning_rate": 1e-3, "max_steps": 2} | others.pop("config", {})
    trainer = kind(
        model=str(model),
        reward_funcs=lambda completion_ids, **_: [float(len(ids) % 7) for ids in completion_ids],
        args=config_class(**trl_runs.settings(folder, **settings)),
        train_dataset=rows(),
        processing_class=processor(),
        seer_endpoint=system.endpoint,
        **others,
    )
    calls = trl_runs.record(trainer, folder)
    trainer.train()
    assert len({call.live for call in calls}) == len(calls) == 2
    return calls


def test_grpo_with_images_in_prompts_and_from_tools(system, model, tmp_path, monkeypatch):
    from trl import GRPOConfig

    processed = []
    process = Once._processed

    def counted(self, image, options):
        before = len(self._done)
        found = process(self, image, options)
        processed.append(len(self._done) - before)
        return found

    monkeypatch.setattr(Once, "_processed", counted)
    calls = trained(
        SeerGRPOTrainer, GRPOConfig, system, model, tmp_path, tools=[look],
        config={"max_tool_calling_iterations": 3, "max_completion_length": trl_runs.TOKENS},
    )  # fmt: skip
    assert sum(processed) == 2 * 4, "four images in each of two calls"
    for call in calls:
        assert any(turn for _, turn, *_ in call.turns())
        mask = call.scored["completion_mask"] * call.scored["tool_mask"]
        apart = (call.scored["sampling_per_token_logps"] - call.scored["old_per_token_logps"]) * mask
        # Sums differ by instruction set and shape: 1.0e-4 without AVX-512.
        assert apart.abs().max() < 5e-4, "the forward pass saw what the engines saw"
        assert "pixel_values" in call.scored
    with SyncRolloutClient(system.endpoint) as client:
        before = client.status().counters["image_received_bytes"]
        assert all(again(client, call) > 2 * G * 1.5 for call in calls)
        assert client.status().counters["image_received_bytes"] == before, "the buffer had each image"


@pytest.mark.breadth
def test_rloo_with_images(system, model, tmp_path):
    from trl import RLOOConfig

    calls = trained(SeerRLOOTrainer, RLOOConfig, system, model, tmp_path)
    with SyncRolloutClient(system.endpoint) as client:
        assert [again(client, call) for call in calls] == [G * 3] * 2


@pytest.mark.breadth
def test_the_gateway_gives_the_tokens_of_the_trainer_s_own_prompt(system, model):
    """As chats over HTTP, and as a prompt that `prepare` made: tokens and logprobs of the same group are equal."""
    read, write = os.pipe()
    settings = [
        f"endpoints.trainers={system.endpoint}", f"shared.model={model}", "gateway.data=127.0.0.1:0",
        "gateway.control=127.0.0.1:0",
    ]  # fmt: skip
    sets = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "seer.cli.main", "gateway", *sets, "--ready-fd", str(write)]
    gateway = subprocess.Popen(command, pass_fds=(write,))
    os.close(write)
    try:
        with os.fdopen(read) as pipe:
            url = json.loads(pipe.readline())["endpoints"]["gateway.data"]
        mine = vision_chats.processor()
        parts = [vision_chats.part(each) if not isinstance(each, str) else vision_chats.words(each)
                 for each in ("a", pil_image(5), "b", pil_image(6, 24, 40))]  # fmt: skip
        messages = [
            {
                "role": "user",
                "content": [{"type": "image"} if "image_url" in each else each for each in parts],
            }
        ]
        text = mine.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens, images, _ = prepare(mine, text, [pil_image(5), pil_image(6, 24, 40)])
        asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 24, "ignore_eos": True, "n": 4,
                 "return_token_ids": True, "logprobs": True, "seed": 5}  # fmt: skip
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
        assert answer.status_code == 200, answer.text
        got = answer.json()
        assert got["prompt_token_ids"] == tokens
        assert [each["name"] for each in got["images"]] == [each.image.name for each in images]
        from seer.gateway.group_names import request_hashes

        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        name = f"seed-{request_hashes([tokens], sampling, [each.image.name for each in images])[0]}"
        with SyncRolloutClient(system.endpoint) as client:
            rollout = client.submit(
                [Prompt(name, token_ids=tokens, images=images)],
                n=4,
                sampling=sampling,
                seed=5,
                rollout_number=0,
            )
            (group,) = rollout.result()
        for choice, response in zip(got["choices"], group.responses, strict=True):
            assert choice["token_ids"] == response.token_ids.tolist()
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            assert logprobs == pytest.approx(np.asarray(response.logprobs), abs=1e-4)
        assert len({tuple(choice["token_ids"]) for choice in got["choices"]}) == 4
    finally:
        gateway.terminate()
        gateway.wait(30)
