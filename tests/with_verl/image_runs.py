"""`make verl-test`: veRL's own trainer with Seer on CPUs, on prompts with images.

The engines' probabilities are those that veRL's actor computes from its own `multi_modal_inputs`, and another
client gets the same tokens for the same images.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import vision_chats
from transformers import AutoTokenizer
from up import Up
from vision_models import pil_image
from with_verl.trainer import PYTHON, WHOLE, Run, train

from seer.client import Prompt, SamplingParams, SyncRolloutClient
from seer.client.images import prepare
from seer.integrations.verl.groups import GroupKey, prompt_id

pytestmark = pytest.mark.timeout(900)

SEED, N, TOKENS, STEPS = 42, 4, 24, 2
ROWS = [("a <image> b", [1]), ("<image> c <image>", [2, 1]), ("d e <image>", [3]), ("f <image>", [4])]
"""Texts, and the seeds of their images."""


def make_model(folder: Path) -> Path:
    """A tiny vision-language model, with Qwen's two separators as tokens in place of two others."""
    vision_chats.make(folder)
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text())
    vocabulary = made["model"]["vocab"]
    words = {token: word for word, token in vocabulary.items()}
    for token, word, special in ((194, "\n", False), (195, "<|im_end|>", True)):
        del vocabulary[words[token]]
        vocabulary[word] = token
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        made["added_tokens"].append({"id": token, "content": word, "special": special, **plain})
    made["added_tokens"].sort(key=lambda each: each["id"])
    file.write_text(json.dumps(made))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vision") / "model")


def test_the_trainer_s_inputs_are_the_tensors_of_the_engines(model, tmp_path):
    """By veRL's own code, and equal to what another release of transformers makes of the same files."""
    shown = [pil_image(1), pil_image(2, 24, 40), pil_image(1)]
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for each, file in zip(shown, files, strict=True):
        each.save(file)
    command = [PYTHON, Path(__file__).with_name("image_inputs.py"), model, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engines"] == found["trainer"]
    assert found["grids"][0] == found["grids"][1]
    processor = vision_chats.processor()
    text = "a" + " <|vision_start|> <|image_pad|> <|vision_end|>" * 3 + " <bos>"
    tokens, images, _ = prepare(processor, text, shown)
    assert found["tokens"] == tokens
    places = [[each.image.name, each.offset, each.length] for each in images]
    assert found["places"] == places, "the same tensors, to the last bit"
    assert found["bias"] == {str(processor.image_token_id): -100.0, str(processor.video_token_id): -100.0}


@contextmanager
def started(model: Path) -> Iterator[Up]:
    up = Up(model, 1, "engine.max_model_len=128", "engine.kv_blocks=400", "buffer.chunk_size=16")
    try:
        up.wait()
        yield up
    finally:
        up.stop()


@pytest.fixture(scope="module")
def system(model: Path) -> Iterator[Up]:
    with started(model) as up:
        yield up


@pytest.fixture(scope="module")
def run(system: Up, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("verl")
    rows = []
    for index, (text, seeds) in enumerate(ROWS):
        for seed in seeds:
            pil_image(seed).save(folder / f"{seed}.png")
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "images": [str(folder / f"{seed}.png") for seed in seeds],
                "data_source": "images",
                "reward_model": {"style": "rule", "ground_truth": text},
                "extra_info": {"index": index},
            }
        )
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = WHOLE | {
        "actor_rollout_ref.model.path": model,
        "data.train_files": folder / "data.jsonl",
        "data.val_files": folder / "data.jsonl",
        "data.train_batch_size": len(ROWS),
        "data.val_batch_size": len(ROWS),
        "data.max_prompt_length": 64,
        "data.max_response_length": TOKENS,
        "actor_rollout_ref.actor.ppo_mini_batch_size": len(ROWS),
        "actor_rollout_ref.rollout.n": N,
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32}",
        "reward.custom_reward_function.path": Path(__file__).with_name("images_reward.py"),
        "trainer.total_training_steps": STEPS,
        "trainer.val_before_train": False,
    }
    found = train(folder / "run", system.endpoint, changes)
    assert found.status == 0, found.said[-5000:]
    return found


def test_the_actor_sees_what_the_engines_saw(run):
    # From the second step on with weights that it trained, the vision encoder's too.
    for step in range(1, STEPS + 1):
        metrics = run.metrics(step)
        assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.99999
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
    assert run.submitted == [f"{len(ROWS)} whole groups; weights of step {step}" for step in range(STEPS)]


def test_another_client_gets_the_same_tokens(run, system, model):
    """Of the images that it processes itself, by another release of transformers, under the first weights."""
    processor = vision_chats.processor()
    given = []
    for index, (text, seeds) in enumerate(ROWS):
        shown = text.replace("<image>", "<|vision_start|> <|image_pad|> <|vision_end|>") + " <bos>"
        tokens, images, _ = prepare(processor, shown, [pil_image(seed) for seed in seeds])
        name = prompt_id(GroupKey(1, False, str(index), 0), tuple(tokens))
        given.append(Prompt(name, token_ids=tokens, images=images))
    never = {processor.image_token_id: -100.0, processor.video_token_id: -100.0}
    sampling = SamplingParams(max_tokens=TOKENS, logit_bias=never)
    with SyncRolloutClient(system.endpoint) as client:
        before = client.status().counters["image_received_bytes"]
        client.submit(given, sampling=SamplingParams(max_tokens=1)).result()
        assert client.status().counters["image_received_bytes"] == before, "the same tensors, to the last bit"
    with started(model) as other, SyncRolloutClient(other.endpoint) as client:
        groups = client.submit(given, n=N, sampling=sampling, seed=SEED, rollout_number=1).result()
        assert len(groups) == len(ROWS)
    decode = AutoTokenizer.from_pretrained(model).decode
    again = Counter(
        decode(response.token_ids.tolist(), skip_special_tokens=True)
        for group in groups
        for response in group.responses
    )
    assert Counter(text for _, text in run.responses(1).elements()) == again
