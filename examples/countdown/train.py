"""Train the countdown model on written searches and save it with its held-out prompts.

Run as `python examples/countdown/train.py [--out DIR]`.

Invariants:
- data, batch order and weights follow from `SEED` and a step count, never from the clock;
- no held-out problem appears in the training data;
- a prompt's ids are those of its words: the tokenizer adds and strips nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random

import task
import torch
from task import IDS, Problem
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 20251120
THREADS = 2
CONTEXT = 4096
ROUNDS = ((4_500_000, 3e-3), (1_500_000, 1.5e-3))
"""Training tokens and peak learning rate of each round. The second, on fresh problems, mends the
copying of the answer: the first alone leaves the pass rate at 0.23."""
BATCH_TOKENS = 4096
LONGEST = 1900
"""Words a training trace may have; longer searches are dropped."""
LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1344, 1920)
"""Padded lengths of a batch: few shapes keep the memory planner and the kernels' caches warm."""
SHORT_FIRST = (0.12, 192)
"""Share of the steps that come first and see only batches of at most this length."""
FOUR_SHARE_TRAIN = 0.5
"""Chance that a training problem has four numbers and not three."""
UNSOLVABLE_SHARE = 0.08
"""Chance that a three-number training problem has no solution. Without these a model whose slip
has cost it the solution never learnt how to stop, and wanders on to the cap."""
FOUR_SHARE_PROMPTS = 0.5
WARMUP_STEPS = 60
LEAF_WEIGHT = 3.0
"""Loss weight of a leaf's result, target and verdict: a wrong verdict there ends or derails the
search, while most other words are copies."""
ANSWER_WEIGHT = 4.0
"""Loss weight of the words after `ans`, few in number and worth the whole reward."""
PROMPT_FILES = {"prompts.jsonl": 64, "prompts_512.jsonl": 512}

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and the loss weight of each token, both [rows, length]."""

log = logging.getLogger("countdown")


def draw_prompts(rng: Random) -> dict[str, list[Problem]]:
    """Held-out problems by file, all different, the share with four numbers the same in each."""
    drawn: set[Problem] = set()
    files: dict[str, list[Problem]] = {}
    for name, count in PROMPT_FILES.items():
        rows: list[Problem] = []
        while len(rows) < count:
            problem = task.draw_problem(rng, 4 if len(rows) < count * FOUR_SHARE_PROMPTS else 3)
            if problem not in drawn:
                drawn.add(problem)
                rows.append(problem)
        rng.shuffle(rows)
        files[name] = rows
    return files


def write_prompts(path: Path, problems: list[Problem]) -> None:
    """Write one JSON object a line: id, prompt, numbers and target."""
    with path.open("w") as file:
        for i, problem in enumerate(problems):
            row = {"id": f"{path.stem}-{i:03d}", "prompt": problem.prompt, **asdict(problem)}
            file.write(json.dumps(row) + "\n")


def weigh(words: list[str]) -> list[float]:
    """Loss weight of each word of a trace; see `LEAF_WEIGHT` and `ANSWER_WEIGHT`."""
    answer = words.index("ans") + 1
    weights = [1.0] * answer + [ANSWER_WEIGHT] * (len(words) - answer)
    for i, word in enumerate(words):
        if word in "!x":
            weights[i - 2 : i + 1] = [LEAF_WEIGHT] * 3
    return weights


def draw_problem(rng: Random) -> Problem:
    """Draw a training problem; it may be held out."""
    if rng.random() < FOUR_SHARE_TRAIN:
        return task.draw_problem(rng, 4)
    return task.draw_problem(rng, 3, solvable=rng.random() >= UNSOLVABLE_SHARE)


def make_batches(rng: Random, held_out: set[Problem], tokens: int) -> list[Batch]:
    """About `tokens` of traces in batches of like length, the short ones first, then shuffled."""
    buckets: dict[int, list[tuple[list[int], list[float]]]] = defaultdict(list)
    total = 0
    while total < tokens:
        problem = draw_problem(rng)
        words = task.draw_trace(rng, problem)
        if problem in held_out or len(words) > LONGEST:
            continue
        prompt = problem.prompt.split()
        ids = [IDS[word] for word in (*prompt, *words)]
        length = next(n for n in LENGTHS if n >= len(ids))
        buckets[length].append((ids, [0.0] * len(prompt) + weigh(words)))
        total += len(ids)
    batches = [
        _pad(rows[i : i + BATCH_TOKENS // length], length)
        for length, rows in buckets.items()
        for i in range(0, len(rows), BATCH_TOKENS // length)
    ]
    rng.shuffle(batches)
    share, limit = SHORT_FIRST
    short = [i for i, (ids, _) in enumerate(batches) if ids.shape[1] <= limit]
    first = set(short[: round(share * len(batches))])
    order = sorted(range(len(batches)), key=lambda i: i not in first)
    return [batches[i] for i in order]


def _pad(rows: list[tuple[list[int], list[float]]], length: int) -> Batch:
    ids = torch.full((len(rows), length), IDS[task.PAD])
    weights = torch.zeros(len(rows), length)
    for r, (row, weight) in enumerate(rows):
        ids[r, : len(row)] = torch.tensor(row)
        weights[r, : len(row)] = torch.tensor(weight)
    return ids, weights


def build_model() -> Qwen3ForCausalLM:
    """Make a Qwen3 of 0.87 M parameters with fresh float32 weights."""
    config = Qwen3Config(
        vocab_size=len(IDS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=IDS[task.BOS],
        eos_token_id=IDS[task.EOS],
        pad_token_id=IDS[task.PAD],
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    return model


CHAT_TEMPLATE = task.BOS + "{% for message in messages %} {{ message.content }}{% endfor %}"
"""A chat of one message, as `12 10 5 > 17`, is a problem's prompt."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words split at white space, one id each; decoding joins them with single spaces."""
    words = Tokenizer(models.WordLevel(dict(IDS), unk_token=task.UNK))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=task.BOS,
        eos_token=task.EOS,
        pad_token=task.PAD,
        unk_token=task.UNK,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def schedule(steps: int) -> Callable[[int], float]:
    """Share of the peak learning rate at a step: linear warm-up, then a cosine to zero."""

    def share(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        return 0.5 + 0.5 * math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS))

    return share


def losses(model: Qwen3ForCausalLM, batches: list[Batch], peak_lr: float) -> Iterator[float]:
    """Take one optimizer step per batch and yield its loss."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_lr,
        betas=(0.9, 0.97),
    )
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(len(batches)))
    for ids, weights in batches:
        # Padding sits on the right, so a causal mask is all the masking needed.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        each = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:].flatten()
        loss = (each * weight).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        yield loss.item()


def main() -> None:
    """Write the prompts, train, and save the model and its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out: Path = parser.parse_args().out
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    files = draw_prompts(Random(SEED))
    for name, problems in files.items():
        write_prompts(out / name, problems)
    held_out = {problem for problems in files.values() for problem in problems}
    model = build_model()
    started, recent = time.monotonic(), 0.0
    for number, (tokens, peak_lr) in enumerate(ROUNDS, start=1):
        batches = make_batches(Random(SEED + number), held_out, tokens)
        log.info("round %d: %d steps", number, len(batches))
        for step, loss in enumerate(losses(model, batches, peak_lr)):
            recent = loss if step == 0 else 0.98 * recent + 0.02 * loss
            if step % 100 == 0:
                log.info("step %d loss %.4f %.0f s", step, recent, time.monotonic() - started)
    model.save_pretrained(out / "model")
    build_tokenizer().save_pretrained(out / "model", save_jinja_files=False)
    log.info("saved %s: %.4f, %.0f s", out / "model", recent, time.monotonic() - started)


if __name__ == "__main__":
    main()
