"""Trainers of TRL with tools that a tiny model calls, what they generated, and what the same keys give again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from up import Up

from seer.client import Prompt, RolloutClient, SamplingParams, SyncRolloutClient

SEED = 11
G = 4
TOKENS = 40
LETTERS = list(range(3, 29))
"""Tokens at which a turn ends, so that several turns have room."""

SAMPLING = SamplingParams(max_tokens=TOKENS, temperature=0.9, stop_token_ids=(2, *LETTERS))

CHAT = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<bos>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<eos>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bos>{% endif %}"
)
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bos>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\A(?=[a-d])",
            "close_pattern": "$",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "look", "arguments": {"text": "{content}"}},
            },
        },
        "content": {"close_pattern": "$", "content": "text"},
    },
}
"""A response that begins with one of four letters, as half of them do, calls the tool."""


def look(text: str) -> str:
    """Look something up.

    Args:
        text: What.
    """
    return text[:2]


def beside_trl(model: Path, instances: int, *settings: str) -> Iterator[Up]:
    """Run a system; what of TRL takes as long as engines is imported while they start."""
    started = Up(model, instances, *settings)
    try:
        import torch
        import trl  # noqa: F401 - so that the tests need not wait for it

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # threads that wait for each other are slow beside engines
        started.wait()
        yield started
        torch.set_num_threads(threads)
    finally:
        started.stop()


class Room:
    """An environment whose first sight depends on the instance: half of a group sees another than the rest."""

    made = 0

    def __init__(self) -> None:
        self.sight = "nnoo"[Room.made % G]
        Room.made += 1
        self.looks = 0

    def reset(self, **_: object) -> str:
        self.looks = 0
        return self.sight

    def look(self, text: str) -> str:
        """Look around.

        Args:
            text: Where.
        """
        self.looks += 1
        return self.sight + text[:1]

    def get_reward(self) -> float:
        return float(self.looks)


def tokenizer(model: Path) -> Any:
    """The tiny model's, letter by letter, with a chat template that has tools."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(model)
    found.backend_tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    found.chat_template = CHAT
    found.response_template = CALLS
    return found


def settings(folder: Path, **others: object) -> dict[str, Any]:
    """What GRPOConfig and RLOOConfig are given: steps of two groups."""
    return {
        "output_dir": str(folder / "out"), "num_generations": G, "per_device_train_batch_size": 2 * G,
        "per_device_eval_batch_size": G, "max_steps": 2, "max_completion_length": TOKENS, "seed": SEED,
        "temperature": 0.9, "learning_rate": 1e-2, "shuffle_dataset": False, "save_strategy": "no",
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "generation_kwargs": {"stop_token_ids": LETTERS},
    } | others  # fmt: skip


def rows(*prompts: str) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts])


@dataclass
class Call:
    """What a trainer generated at a time. `live`: the digest of the engines' weights; `folder`: the trainer's.

    `adapter`: engines were sent an adapter alone, so the digest of the whole weights is another.
    """

    step: int
    mode: str
    number: int
    folder: Path
    live: str
    prompts: list[list[int]]
    completions: list[list[int]]
    masks: list[list[int]]
    scored: dict[str, Any]
    adapter: bool = False

    def turns(self) -> Iterator[tuple[int, int, list[int], int, list[int]]]:
        """Yield each turn's position, number, prompt, limit and tokens."""
        for position, (prompt, tokens, mask) in enumerate(
            zip(self.prompts, self.completions, self.masks, strict=True)
        ):
            runs = [(bit, list(run)) for bit, run in groupby(range(len(mask)), mask.__getitem__)]
            for turn, run in enumerate(run for bit, run in runs if bit):
                start, stop = run[0], run[-1] + 1
                yield position, turn, prompt + tokens[:start], TOKENS - start, tokens[start:stop]


def record(trainer: Any, folder: Path) -> list[Call]:
    """Return a list that grows with each call of the trainer."""
    calls: list[Call] = []
    generate, score = trainer._generate, trainer._generate_and_score_completions

    def generated(prompts: list[Any]) -> Any:
        weights = folder / f"weights-{len(calls)}"
        save(trainer, weights)
        out = generate(prompts)
        step, mode = trainer.state.global_step, "train" if trainer.model.training else "eval"
        number = sum((call.step, call.mode) == (step, mode) for call in calls)
        masks = (out[2] if len(out) > 3 else None) or [[1] * len(ids) for ids in out[1]]
        alone = trainer._seer._merged == ""
        calls.append(Call(step, mode, number, weights, trainer._seer.live.digest, *out[:2], masks, {}, alone))
        return out

    def scored(inputs: list[Any]) -> Any:
        found = score(inputs)
        calls[-1].scored = found
        return found

    trainer._generate, trainer._generate_and_score_completions = generated, scored
    return calls


def save(trainer: Any, folder: Path) -> None:
    """Save the weights as PEFT itself would merge them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    else:
        trainer.save_model(str(folder))


def again(client: SyncRolloutClient, call: Call) -> None:
    """Assert that a client that knows nothing of TRL gets each turn's tokens for the same weights and keys."""
    live = client.update_weights(client.status().weight_version + 1, call.folder)
    assert (live.digest == call.live) is not call.adapter
    turns = list(call.turns())

    async def ask(asyncio_client: RolloutClient) -> list[list[int]]:
        rollout = asyncio_client.open_rollout(repeat=True)
        asked = [
            rollout.submit(
                Prompt(f"{position} {turn}", token_ids=prompt),
                sampling=replace(SAMPLING, max_tokens=limit),
                seed=SEED,
                rollout_number=call.step,
                group=group_name(call, position // G, turn),
                first_index=position % G,
            )
            for position, turn, prompt, limit, _ in turns
        ]
        rollout.close()
        return [(await each.result()).responses[0].token_ids.tolist() for each in asked]

    assert client.run(ask) == [tokens for *_, tokens in turns]


def group_name(call: Call, group: int, turn: int) -> str:
    name = f"{call.mode}-{call.number}-{group}"
    return name if turn == 0 else f"/trl-{call.step}-{name}-{turn}"
