"""Judge whether the trained model of images behaves like an RL workload: as `properties` of the neighbour.

Run as `python examples/countdown_images/properties_images.py [--example DIR]`, a folder with `model` and
`prompts.jsonl`; prints one JSON object and exits with 1 if a required property does not hold. Responses are
sampled by Seer, so they follow from weights and prompts, however busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

import reading
from demo import results, rollout  # of the neighbouring example
from properties import CAP, GROUP, judge, measure

RUN = Path("runs/properties-images")


def main() -> int:
    """Sample, measure, print, judge; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--example", type=Path, default=Path(__file__).parent)
    example: Path = parser.parse_args().example
    code = rollout(example, RUN, responses=GROUP, max_tokens=CAP)
    if code:
        return code
    problems, groups = results(example, RUN)
    lines = (RUN / "responses.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt_token_ids"] for line in lines]
    figures = measure(problems, prompts, [[each["token_ids"] for each in group] for group in groups])
    figures["read_rightly"] = fmean(
        reading.read_rightly(problem, each["text"])
        for problem, group in zip(problems, groups, strict=True)
        for each in group
    )
    return judge(figures)


if __name__ == "__main__":
    sys.exit(main())
