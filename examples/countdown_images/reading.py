"""Countdown with numbers that stand in an image: the prompt, and what a response has to write.

A response reads the numbers out, from the largest down, and goes on as one to a prompt of text does:

    <bos> <|vision_start|> <|image_pad|> <|vision_end|> > 17
    12 10 5 > 17 S3 12 10 5 : 10 - 5 = 5 S2 12 5 : 12 + 5 = 17 17 ! ans 10 - 5 = 5 , 12 + 5 = 17 <eos>

Invariants:
- the words of `task` keep their ids, so the model of text is the beginning of that of images;
- `task.check` judges a response, as it looks at the words after `ans` alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

COUNTDOWN = Path(__file__).parents[1] / "countdown"
sys.path.append(str(COUNTDOWN))
import task  # noqa: E402 - lies in the neighbouring example, which is no package

START, END, IMAGE, VIDEO = SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SEED = 20261123
"""Of training, and of the shipped images."""

VOCAB = (*task.VOCAB, *SPECIAL)
IDS = {word: i for i, word in enumerate(VOCAB)}


def prompt(problem: task.Problem) -> str:
    """Return the text given to the model's processor, together with the image."""
    return f"{task.BOS} {START} {IMAGE} {END} > {problem.target}"


def draw_response(rng: Random, problem: task.Problem, *, search: bool = True) -> list[str]:
    """Return the words of a response that reads rightly; `search`: and searches well."""
    read = problem.prompt.split()[1:]
    return [*read, *(task.draw_trace(rng, problem) if search else task.first_state(problem))]


def read(response: str) -> str:
    """Return the numbers that a response reads out."""
    return response.partition(" > ")[0]


def read_rightly(problem: task.Problem, response: str) -> bool:
    """Whether a response begins with the numbers in the image, all and no others."""
    return read(response) == " ".join(map(str, problem.numbers))
