"""`make demo-images`: as `make demo`, with numbers that stand in images; then what was read in some."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from pathlib import Path

import reading
from demo import Group, print_summary, results, rollout  # of the neighbouring example
from task import Problem, check

HERE = Path(__file__).parent
RUN = Path("runs/demo-images")
TOLD = 6
"""Images that are told of."""


def main() -> int:
    """Run the rollout, print its summary and some images in words; returns the exit code."""
    code = rollout(HERE, RUN)
    if code == 0:
        problems, groups = results(HERE, RUN)
        right = statistics.mean(
            reading.read_rightly(problem, response["text"])
            for problem, group in zip(problems, groups, strict=True)
            for response in group
        )
        print_summary("countdown in images", HERE, RUN, {"images read rightly": f"{right:.2f}"})
        for number, pair in enumerate(zip(problems[:TOLD], groups, strict=False)):
            print(in_words(number, *pair))
    return code


def in_words(number: int, problem: Problem, group: Group) -> str:
    """Return what stands in an image, what was read there, and how many answers were right."""
    texts = [response["text"] for response in group]
    reads = Counter(map(reading.read, texts)).most_common(3)
    told = ", ".join(f"{read} ({count} times)" for read, count in reads)
    right = sum(check(problem.prompt, text) for text in texts)
    shown = " ".join(map(str, problem.numbers))
    reached = f"{right} of {len(group)} reached {problem.target}"
    return f"pictures/{number:02d}.png shows {shown}, was read as {told}; {reached}"


if __name__ == "__main__":
    sys.exit(main())
