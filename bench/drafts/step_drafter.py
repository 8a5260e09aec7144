"""What the drafts of a step take, step by step.

    python bench/drafts/step_drafter.py [--rounds 5] [--steps 60]

Rows are in groups of 8 siblings, each of which has said 1,000 tokens of bench/drafts/grouped_tokens.py; a
step draws what of its draft was right and one token more. Prints JSON, medians over the rounds:
- `step_us`: a call of `DraftStep.run`, which appends, drafts and cuts;
- `tokens_a_step`: of each row.

`waits`: what steps of 64 rows took and waited, in us, while a thread feeds siblings without a pause, so many
tokens at a time: by `StepDrafter.feed`, or by the trees' own `append`. Who waits for such an append does so
inside a tree, which `waited_us` does not count but `step_us` does. `missed` are steps of 100 that went
without drafts, as they had waited for 100 us.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from typing import Any

import grouped_tokens
import numpy as np
from lib.hardware import machine
from numpy.typing import NDArray

from seer._native import DraftStep, GroupTree, StepDrafter

SIBLINGS, SAID, PROMPT = 8, 1000, 4
ROWS, KS = (1, 64, 256), (2, 8)
FEEDS = (64, 4096)

Tokens = NDArray[np.int32]


def new_trees(responses: Tokens, groups: int) -> list[GroupTree]:
    """Return each group's tree with what all siblings have said, as it came in."""
    trees = []
    for group in range(groups):
        tree = GroupTree(np.zeros(PROMPT, np.int32))
        siblings = responses[group * SIBLINGS : (group + 1) * SIBLINGS]
        for at in range(0, SAID, 64):
            for index, tokens in enumerate(siblings):
                tree.append(index, at, tokens[at : min(at + 64, SAID)])
        trees.append(tree)
    return trees


class Ours:
    """The step drafter; `step` returns counts and drafts."""

    def __init__(self, trees: list[GroupTree], buffer: Tokens, rows: int, k: int) -> None:
        self.drafter, self.rows, self.k = StepDrafter(rows), rows, k
        self.generations = np.array(
            [
                self.drafter.set(
                    row,
                    trees[row // SIBLINGS],
                    row % SIBLINGS,
                    -1,
                    PROMPT,
                    buffer[row, : PROMPT + SAID],
                    2**20,
                    [7],
                )
                for row in range(rows)
            ]
        )
        self.slots = np.arange(rows, dtype=np.int32)

    def step(self, sampled: Tokens, counts: Tokens) -> tuple[float, Tokens, Tokens]:
        """Return seconds, counts and drafts."""
        drafts, scores = np.empty((self.rows, self.k), np.int32), np.empty((self.rows, self.k), np.float32)
        out = np.empty(self.rows, np.int32)
        step = DraftStep(self.drafter, self.slots, self.generations, sampled, counts, drafts, out, scores)
        start = time.perf_counter()
        step.run()
        return time.perf_counter() - start, out, drafts


def confirmed(drafts: Tokens, counts: Tokens, responses: Tokens, at: Tokens) -> Tokens:
    """Return how many tokens of each row's draft are what its response goes on with."""
    columns = np.arange(drafts.shape[1])
    right = drafts == np.take_along_axis(responses, at[:, None] + columns, axis=1)
    right &= columns < counts[:, None]
    return np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)


def one_round(responses: Tokens, rows: int, k: int, steps: int) -> dict[str, float]:
    """Return the medians of one round's steps, in us, and tokens a step."""
    groups = -(-rows // SIBLINGS)
    responses = responses[: groups * SIBLINGS]
    buffer = np.concatenate([np.zeros((len(responses), PROMPT), np.int32), responses], axis=1)[:rows].copy()
    ours = Ours(new_trees(responses, groups), buffer, rows, k)
    at, counts = np.full(rows, SAID, np.int32), np.ones(rows, np.int32)
    times = []
    for _ in range(steps):
        sampled = np.take_along_axis(responses[:rows], at[:, None] + np.arange(k + 1), axis=1)
        at = at + counts
        seconds, made, drafts = ours.step(sampled, counts)
        times.append(seconds * 1e6)
        counts = confirmed(drafts, made, responses[:rows], at) + np.int32(1)
    return {"step_us": statistics.median(times[5:]), "tokens_a_step": float((at - SAID).mean() / steps)}


def waits(responses: Tokens, tokens: int, polite: bool, steps: int) -> dict[str, Any]:
    """Return what steps of 64 rows took and waited while a thread feeds."""
    rows, k = 64, 8
    buffer = np.concatenate([np.zeros((rows, PROMPT), np.int32), responses[:rows]], axis=1)
    trees = new_trees(responses, rows // SIBLINGS)
    ours, over = Ours(trees, buffer, rows, k), threading.Event()

    def feed() -> None:
        rng = np.random.default_rng(0)
        for turn in itertools.count():
            tree, index, fresh = trees[turn % len(trees)], 100 + turn, rng.choice(responses.ravel(), tokens)
            if over.is_set():
                return
            if polite:
                ours.drafter.feed(tree, index, 0, fresh)
            else:
                tree.append(index, 0, fresh)

    feeder = threading.Thread(target=feed)
    feeder.start()
    took, waited = [], []
    sampled, counts = responses[:rows, : k + 1].copy(), np.full(rows, 2, np.int32)
    for _ in range(steps):
        time.sleep(0.005)
        before = ours.drafter.seconds, ours.drafter.waited
        ours.step(sampled, counts)
        took.append(ours.drafter.seconds - before[0])
        waited.append(ours.drafter.waited - before[1])
    over.set()
    feeder.join()
    by = "StepDrafter.feed" if polite else "GroupTree.append"
    return {
        "by": by, "tokens": tokens, "step_us": spread(took), "waited_us": spread(waited),
        "missed": ours.drafter.missed,
    }  # fmt: skip


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 90th percentile and the most, in us."""
    p50, p90 = np.percentile(seconds, [50, 90]) * 1e6
    return {"p50": round(p50, 1), "p90": round(p90, 1), "most": round(max(seconds) * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    language, length = grouped_tokens.Language(), SAID + 9 * (options.steps + 2)
    groups = [language.group(seed, SIBLINGS, length) for seed in range(max(ROWS) // SIBLINGS)]
    responses = np.concatenate([np.stack(group) for group in groups])
    report: dict[str, Any] = {"machine": machine("numpy"), "steps": []}
    for rows, k in itertools.product(ROWS, KS):
        rounds = [one_round(responses, rows, k, options.steps) for _ in range(options.rounds)]
        figures = {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}
        report["steps"].append({"rows": rows, "k": k} | figures)
    report["waits"] = [waits(responses, tokens, polite, 100) for tokens in FEEDS for polite in (True, False)]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
