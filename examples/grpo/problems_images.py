"""As `problems`, with the numbers in an image: the model has to read them first.

Invariants:
- a problem's image follows from the seed, the iteration and the problem; a held-out one's from the problem;
- a prompt is prepared once: its engines and the trainer get the same tensors.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import problems
from problems import reward  # noqa: F401 - it looks at the answer alone
from transformers import AutoProcessor

from seer.client import Prompt, images

EXAMPLE = Path(__file__).parents[1] / "countdown_images"
MODEL = EXAMPLE / "model"
sys.path.append(str(EXAMPLE))
import reading  # noqa: E402 - lies in the neighbouring example, which is no package
from drawing import draw  # noqa: E402


def held_out_prompts(count: int) -> list[Prompt]:
    """Return problems that neither the model of text nor that of images was trained on."""
    return [_drawn(prompt, Random(prompt.id)) for prompt in problems.held_out_prompts(count)]


def training_prompts(seed: int, iteration: int, count: int, held_out: list[Prompt]) -> list[Prompt]:
    """Draw different problems, and their images."""
    drawn = problems.training_prompts(seed, iteration, count, held_out)
    return [_drawn(prompt, Random(f"{seed}/{iteration}/{prompt.id}")) for prompt in drawn]


def _drawn(prompt: Prompt, rng: Random) -> Prompt:
    problem = prompt.metadata["problem"]
    image = draw(rng, problem.numbers).image
    tokens, placed, inputs = images.prepare(_processor(), reading.prompt(problem), [image])
    shown = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    return Prompt(prompt.id, token_ids=tokens, images=placed, metadata={"problem": problem, "images": shown})


@cache
def _processor() -> Any:  # noqa: ANN401 - a Hugging Face processor
    return AutoProcessor.from_pretrained(MODEL)
