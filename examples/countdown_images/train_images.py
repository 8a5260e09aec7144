"""Teach the countdown model to read numbers from images, and save it with its prompts.

Run as `python examples/countdown_images/train_images.py [--out DIR]`. The model is a Qwen3-VL. Its language
part begins as the shipped model of text, a Qwen3, and computes the same of text. Then come three rounds: the
vision encoder learns which number begins in a cell of an image, the whole model to read numbers out, and to
search.

Invariants:
- data, batch order and weights follow from `SEED` and a step count, never from the clock;
- no held-out problem of the model of text appears in the training data;
- images and prompts become tensors by the processor that is saved with the model, and in no other way.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import reading
import task
import torch
import train as text  # of the neighbouring example
from drawing import CELL, Drawn, draw
from reading import COUNTDOWN, IDS, SEED
from task import Problem
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    BatchFeature,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

THREADS = 2
MERGE = 2
PATCH = CELL // MERGE
"""Pixels on a side; `MERGE` by `MERGE` patches are a token."""
MOST_CELLS = 64
VISION = {
    "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 128,
    "patch_size": PATCH, "spatial_merge_size": MERGE, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
TEXT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""What the language part has of the model of text."""
CELLS = (250, 64, 3e-3)
"""Steps, images a step and peak learning rate of the first round."""
SHARPNESS = 100.0
"""Of the first round's softmax: tokens of images then become about as long as the embeddings of words."""
READS = (800_000, 1.5e-3)
SEARCHES = (1_600_000, 1e-3)
"""Tokens and peak learning rate of the second and third round."""
READ_WEIGHT = 4.0
"""Loss weight of the numbers that are read: few words, which all others follow from."""
FOUR_SHARE = 0.5

log = logging.getLogger("countdown_images")


class Document(NamedTuple):
    """A problem, its image, and the words of a response."""

    problem: Problem
    drawn: Drawn
    words: list[str]

    @property
    def tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(reading.prompt(self.problem).split()) - 1 + len(self.drawn.cells) + len(self.words)


def draw_numbers(rng: Random) -> tuple[int, ...]:
    """Draw three or four numbers, the largest first."""
    count = 4 if rng.random() < FOUR_SHARE else 3
    return tuple(sorted((rng.randint(1, task.LARGEST_GIVEN) for _ in range(count)), reverse=True))


def reads(rng: Random) -> Iterator[Document]:
    """Draw responses that end where the search would begin."""
    while True:
        problem = Problem(draw_numbers(rng), rng.randint(1, task.LARGEST))
        words = reading.draw_response(rng, problem, search=False)
        yield Document(problem, draw(rng, problem.numbers), words)


def searches(rng: Random) -> Iterator[Document]:
    """Draw whole responses, but for those that are too long to train on."""
    while True:
        problem = text.draw_problem(rng)
        words = reading.draw_response(rng, problem)
        if len(words) <= text.LONGEST:
            yield Document(problem, draw(rng, problem.numbers), words)


def batches(
    rng: Random, documents: Iterable[Document], held_out: set[Problem], tokens: int
) -> list[list[Document]]:
    """Return about `tokens` of documents that are not held out, in batches of like length, shuffled."""
    buckets: dict[int, list[Document]] = defaultdict(list)
    for document in documents:
        if document.problem in held_out:
            continue
        buckets[next(n for n in text.LENGTHS if n >= document.tokens)].append(document)
        tokens -= document.tokens
        if tokens <= 0:
            break
    rows = {length: text.BATCH_TOKENS // length for length in buckets}
    made = [some[i : i + rows[n]] for n, some in buckets.items() for i in range(0, len(some), rows[n])]
    rng.shuffle(made)
    return made


def tensors(processor: Qwen3VLProcessor, batch: list[Document]) -> tuple[BatchFeature, torch.Tensor]:
    """Return what the model takes, and the loss weight of each token, both padded on the right."""
    given = processor(
        text=[" ".join((reading.prompt(each.problem), *each.words)) for each in batch],
        images=[each.drawn.image for each in batch],
        padding=True,
        return_tensors="pt",
    )
    weights = torch.zeros(given["input_ids"].shape)
    for row, each in enumerate(batch):
        weights[row, each.tokens - len(each.words) : each.tokens] = torch.tensor(weigh(each))
    return given, weights


def weigh(document: Document) -> list[float]:
    """Return the loss weight of each word of a response."""
    words = document.words
    weights = text.weigh(words) if "ans" in words else [1.0] * len(words)
    numbers = len(document.problem.numbers)
    return [READ_WEIGHT] * numbers + weights[numbers:]


def build_processor() -> Qwen3VLProcessor:
    """Words as of the model of text, with those that stand around images; images are never resized."""
    words = Tokenizer(models.WordLevel(dict(IDS), unk_token=task.UNK))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([task.PAD, task.BOS, task.EOS, *reading.SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=task.BOS,
        eos_token=task.EOS,
        pad_token=task.PAD,
        unk_token=task.UNK,
        padding_side="right",
        model_max_length=text.CONTEXT,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={
            "image_token": reading.IMAGE,
            "video_token": reading.VIDEO,
            "vision_bos_token": reading.START,
            "vision_eos_token": reading.END,
        },
    )
    size = {"shortest_edge": CELL**2, "longest_edge": MOST_CELLS * CELL**2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, size=size),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=PATCH, merge_size=MERGE),
    )


def build_model() -> Qwen3VLForConditionalGeneration:
    """Make a Qwen3-VL with a fresh vision encoder around the weights of the model of text."""
    read = AutoModelForCausalLM.from_pretrained(COUNTDOWN / "model", dtype=torch.float32)
    told = read.config.to_dict()
    rope = told["rope_parameters"] | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    own = {"vocab_size": len(IDS), "rope_parameters": rope, "dtype": "float32"}
    config = Qwen3VLConfig(
        text_config={name: told[name] for name in TEXT} | own,
        vision_config=VISION | {"dtype": "float32"},
        image_token_id=IDS[reading.IMAGE],
        video_token_id=IDS[reading.VIDEO],
        vision_start_token_id=IDS[reading.START],
        vision_end_token_id=IDS[reading.END],
        dtype="float32",
    )
    model = Qwen3VLForConditionalGeneration(config)
    ours = model.state_dict()
    for name, weights in read.state_dict().items():
        ours[name.replace("model.", "model.language_model.")][: len(weights)].copy_(weights)
    model.generation_config = GenerationConfig.from_pretrained(COUNTDOWN / "model")
    return model


class Steps:
    """Optimizer steps of one round."""

    def __init__(self, part: torch.nn.Module, steps: int, peak_lr: float) -> None:
        self._part = part
        self._optimizer = torch.optim.AdamW(
            part.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01
        )
        self._decay = torch.optim.lr_scheduler.LambdaLR(self._optimizer, text.schedule(steps))
        self._started, self._taken, self._steps = time.monotonic(), 0, steps

    def take(self, loss: torch.Tensor, right: float) -> None:
        """Take a step; say every 25 how it goes. `right`: share of the round's numbers that are right."""
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._part.parameters(), 1.0)
        self._optimizer.step()
        self._decay.step()
        self._taken += 1
        if self._taken % 25 == 0:
            seconds = time.monotonic() - self._started
            log.info(
                "step %d of %d: loss %.3f, right %.2f, %.0f s",
                self._taken,
                self._steps,
                loss.item(),
                right,
                seconds,
            )


def learn_cells(model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, rng: Random) -> None:
    """Teach the vision encoder to give each cell the embedding of the number that begins there, or of `:`."""
    count, rows, peak_lr = CELLS
    steps = Steps(model.model.visual, count, peak_lr)
    words = model.get_input_embeddings().weight.detach()
    for _ in range(count):
        drawn = [draw(rng, draw_numbers(rng)) for _ in range(rows)]
        seen = processor.image_processor(images=[each.image for each in drawn], return_tensors="pt")
        tokens = model.model.visual(seen["pixel_values"], seen["image_grid_thw"]).pooler_output
        logits = SHARPNESS * tokens @ words.T
        expected = torch.tensor([IDS[str(n) if n else ":"] for each in drawn for n in each.cells])
        right = (logits.argmax(-1) == expected)[expected != IDS[":"]].float().mean().item()
        steps.take(cross_entropy(logits, expected), right)


def learn_words(
    model: Qwen3VLForConditionalGeneration,
    processor: Qwen3VLProcessor,
    made: list[list[Document]],
    peak_lr: float,
) -> None:
    """Teach the whole model to respond to prompts with images."""
    steps = Steps(model, len(made), peak_lr)
    for batch in made:
        given, weights = tensors(processor, batch)
        logits, expected, weight = (
            model(**given, use_cache=False).logits[:, :-1],
            given["input_ids"][:, 1:],
            weights[:, 1:],
        )
        each = cross_entropy(logits.flatten(0, 1), expected.flatten(), reduction="none").view_as(weight)
        right = (logits.argmax(-1) == expected)[weight == READ_WEIGHT].float().mean().item()
        steps.take((each * weight).sum() / weight.sum(), right)


def write_prompts(out: Path) -> set[Problem]:
    """Draw the prompts of the model of text; return all problems that are held out from both."""
    problems = {
        name: [json.loads(line) for line in (COUNTDOWN / name).read_text().splitlines()]
        for name in text.PROMPT_FILES
    }
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    with (out / "prompts.jsonl").open("w") as file:
        for number, row in enumerate(problems["prompts.jsonl"]):
            problem = task.parse_prompt(row["prompt"])
            name = f"pictures/{number:02d}.png"
            draw(Random(f"{SEED}/{number}"), problem.numbers).image.save(out / name)
            line = {"id": f"pictures-{number:02d}", "prompt": reading.prompt(problem), "images": [name]}
            file.write(json.dumps(line | {"numbers": problem.numbers, "target": problem.target}) + "\n")
    return {task.parse_prompt(row["prompt"]) for rows in problems.values() for row in rows}


def main() -> None:
    """Write the prompts, train, and save model and processor."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--threads", type=int, default=THREADS)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(given.threads)
    torch.manual_seed(SEED)
    held_out = write_prompts(given.out)
    model, processor = build_model(), build_processor()
    learn_cells(model, processor, Random(SEED))
    for number, (documents, (tokens, peak_lr)) in enumerate(((reads, READS), (searches, SEARCHES)), start=1):
        rng = Random(SEED + number)
        learn_words(model, processor, batches(rng, documents(rng), held_out, tokens), peak_lr)
    model.save_pretrained(given.out / "model")
    processor.save_pretrained(given.out / "model")
    log.info("saved %s", given.out / "model")


if __name__ == "__main__":
    main()
