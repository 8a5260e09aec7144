"""What a run is about: the prompts of each iteration, the held-out ones, the reward. Yours go here.

Invariants:
- an iteration's prompts follow from the seed and its number, so a resumed run draws the same;
- no held-out problem is trained on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from seer.client import Group, Prompt, Response

NUMBERS = 3
"""Of each problem. With four, most searches of the shipped model outgrow what two cores sample in time."""

COUNTDOWN = Path(__file__).parents[1] / "countdown"
MODEL = COUNTDOWN / "model"
sys.path.append(str(COUNTDOWN))
import task  # noqa: E402 - lies in the neighbouring example, which is no package


def held_out_prompts(count: int) -> list[Prompt]:
    """Return problems that the shipped model was never trained on. Raises ValueError if there are too few."""
    rows = map(json.loads, (COUNTDOWN / "prompts_512.jsonl").read_text().splitlines())
    problems = {row["id"]: task.parse_prompt(row["prompt"]) for row in rows if len(row["numbers"]) == NUMBERS}
    if not 1 <= count <= len(problems):
        raise ValueError(f"--held-out {count}: give 1 to {len(problems)}")
    return [_as_prompt(prompt_id, problem) for prompt_id, problem in [*problems.items()][:count]]


def training_prompts(seed: int, iteration: int, count: int, held_out: list[Prompt]) -> list[Prompt]:
    """Draw different problems."""
    exclude = {prompt.metadata["problem"] for prompt in held_out}
    rng = Random(f"{seed}/{iteration}")
    drawn: dict[task.Problem, None] = {}
    while len(drawn) < count:
        problem = task.draw_problem(rng, NUMBERS)
        if problem not in exclude:
            drawn[problem] = None
    return [_as_prompt(f"train-{i:03d}", problem) for i, problem in enumerate(drawn)]


def reward(group: Group, response: Response) -> float:
    """1 for an answer that the task's checker accepts, else 0."""
    return float(task.check(group.metadata["problem"].prompt, response.text or ""))


def _as_prompt(prompt_id: str, problem: task.Problem) -> Prompt:
    return Prompt(prompt_id, text=problem.prompt, metadata={"problem": problem})
