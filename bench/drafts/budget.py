"""Compare ways to choose how many drafted tokens a step verifies; print JSON.

    python bench/drafts/budget.py [--groups 12] [--tokens 1500] [--responses RUN/responses.jsonl]

Drafts, their scores and what of them was right come from group trees over the tokens of
bench/drafts/grouped_tokens.py, or recorded ones (the output of `seer rollout`); each group's last response is
generated with its siblings in the tree. What a step takes is modelled: `COSTS` has four machines. Figures
are tokens per second relative to no drafts, by machine and running requests; the first fifth of each run,
in which all but the oracle learn, is left out.

- `algorithm1`: the paper's: one draft length for all, argmin T(B, gamma) / expected tokens, from acceptance
  by position learned online; a probe of 2 every 100 steps where that is 0;
- `algorithm1_floor`: the same, and tokens whose tree's score is below the price of a row are dropped;
- `tokens`: `common/policy/draft_budget.py`;
- `oracle`: the same choice, but it knows which drafted tokens are right.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grouped_tokens
import numpy as np
from numpy.typing import NDArray

from seer._native import GroupTree
from seer.common.policy.draft_budget import DraftBudget, choose_lengths
from seer.common.policy.draft_costs import SCORE_EDGES, StepCosts

DEPTH = 8
BATCHES = (1, 8, 32)
GRID_BATCHES, GRID_DRAFTS = (1, 2, 4, 8, 16, 32), (0, 1, 2, 3, 4, 6, 8)
Tokens = NDArray[np.int32]
Rows = NDArray[np.float64]

COSTS: dict[str, Callable[[int, float], float]] = {  # (requests, rows) -> milliseconds
    "cpu, short contexts": lambda batch, rows: 3.0 + 0.04 * rows,
    "cpu, long contexts": lambda batch, rows: 3.3 + 0.55 * batch + 0.45 * rows,
    "gpu, bound by memory": lambda batch, rows: 20.0 + 0.05 * rows,
    "gpu, full at 133 rows": lambda batch, rows: max(20.0, 0.15 * rows),
}


class Trace:
    """Drafts at each position of a response: `scores` [n, DEPTH], `lengths` [n], and how many were right."""

    def __init__(self, group: Sequence[Tokens]) -> None:
        *siblings, response = group
        tree, me = GroupTree(), len(group)
        for i, sibling in enumerate(siblings):
            tree.append(i, 0, sibling)
        self.scores = np.zeros((len(response), DEPTH), dtype=np.float32)
        self.lengths = np.zeros(len(response), dtype=np.int32)
        self.right = np.zeros(len(response), dtype=np.int32)
        for at in range(1, len(response)):
            tree.append(me, at - 1, response[at - 1 : at])
            draft = tree.draft(me, DEPTH, 1, SCORE_EDGES[0])
            actual, tokens = response[at : at + len(draft)], draft.token_ids
            self.lengths[at], self.scores[at, : len(draft)] = len(draft), draft.scores
            wrong = [i for i, token in enumerate(actual) if token != tokens[i]]
            self.right[at] = wrong[0] if wrong else len(actual)


class Drafts:
    """The drafts of one step."""

    def __init__(self, rows: Sequence[tuple[Trace, int]], slots: NDArray[np.intp]) -> None:
        self.scores = np.stack([trace.scores[at] for trace, at in rows])
        self.lengths = np.array([trace.lengths[at] for trace, at in rows])
        self.right = np.array([trace.right[at] for trace, at in rows])
        self.slots = slots


class ByLength:
    """Algorithm 1 without priorities, so that its low and high draft lengths are the same."""

    def __init__(self, costs: StepCosts, floor: bool) -> None:
        self._costs, self._floor = costs, floor
        self._tested, self._right = np.zeros(DEPTH), np.zeros(DEPTH)
        self._steps, self._gamma, self._price = 0, 0, 0.0

    def keep(self, drafts: Drafts) -> Tokens:
        """Return how many tokens of each draft to verify."""
        if self._steps % 20 == 0:
            self._plan(len(drafts.lengths))
        self._steps += 1
        gamma = self._gamma or (2 if self._steps % 100 == 0 else 0)
        keep = np.minimum(drafts.lengths, gamma)
        if self._floor and self._gamma:
            keep = np.minimum(keep, (drafts.scores >= self._price).sum(axis=1))
        return keep

    def _plan(self, batch: int) -> None:
        survival, beta = np.zeros(DEPTH), 0.5
        for place in range(DEPTH):  # positions that nobody tried are as good as the one before
            beta = (self._right[place] + 8 * beta) / (self._tested[place] + 8)
            survival[place] = beta * (survival[place - 1] if place else 1.0)
        tokens = batch * (1 + np.concatenate([[0.0], np.cumsum(survival)]))
        seconds = np.array([self._costs.seconds(batch, gamma) for gamma in range(DEPTH + 1)])
        self._gamma = gamma = int((tokens / seconds).argmax())
        row = (seconds[gamma] - seconds[max(gamma - 1, 0)]) / batch
        self._price = min(1.0, row * tokens[gamma] / seconds[gamma])

    def learn(self, keep: Tokens, drafts: Drafts) -> None:
        """Count positions that were tested: all before them were right."""
        at, right = np.arange(DEPTH), np.minimum(drafts.right, keep)
        tested = at < np.minimum(right + 1, keep)[:, None]
        forget = 0.5 ** (1 / 500)
        self._tested = self._tested * forget + tested.sum(axis=0)
        self._right = self._right * forget + (at < right[:, None]).sum(axis=0)


class ByToken:
    """Ours."""

    def __init__(self, costs: StepCosts, groups: int) -> None:
        self._budget = DraftBudget(costs, DEPTH)
        self.slots = [self._budget.slot(f"group {i}") for i in range(groups)]

    def keep(self, drafts: Drafts) -> Tokens:
        """Return how many tokens of each draft to verify."""
        if not self._budget.should_draft():
            self._choice = None
            return np.zeros_like(drafts.lengths)
        slots, batch = drafts.slots, len(drafts.lengths)
        self._choice = self._budget.choose(slots, drafts.scores, drafts.lengths, batch)
        return self._choice.keep

    def learn(self, keep: Tokens, drafts: Drafts) -> None:
        """Tell the budget."""
        if self._choice is not None:
            self._budget.learn(self._choice, np.minimum(drafts.right, keep).astype(np.int32))


class Oracle:
    """Verifies what is right and pays."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    def keep(self, drafts: Drafts) -> Tokens:
        """Return how many tokens of each draft to verify."""
        right = np.arange(DEPTH) < np.minimum(drafts.right, drafts.lengths)[:, None]
        seconds = self._costs.by_rows(len(right), right.size)
        return choose_lengths(right.astype(np.float64), seconds, 0.0)

    def learn(self, keep: Tokens, drafts: Drafts) -> None:
        """There is nothing to learn."""


Chooser = ByLength | ByToken | Oracle


def rate(traces: Sequence[Trace], batch: int, costs: StepCosts, chooser: Chooser, steps: int) -> float:
    """Return tokens per second of `batch` requests, each of any response and at any place in it."""
    rng = np.random.default_rng(0)
    which = rng.integers(len(traces), size=batch)
    at = np.array([rng.integers(1, len(traces[i].lengths)) for i in which])
    tokens = seconds = 0.0
    for step in range(steps):
        drafts = Drafts([(traces[i], place) for i, place in zip(which, at, strict=True)], which)
        keep = chooser.keep(drafts)
        brought = np.minimum(drafts.right, keep) + 1
        chooser.learn(keep, drafts)
        if step >= steps // 5:
            tokens += float(brought.sum())
            seconds += costs.seconds(batch, float(keep.sum()) / batch)
        at += brought
        for row in range(batch):
            if at[row] >= len(traces[which[row]].lengths):
                which[row], at[row] = rng.integers(len(traces)), 1
    return tokens / seconds


def compare(traces: Sequence[Trace]) -> dict[str, dict[str, float]]:
    table = {}
    for machine, milliseconds in COSTS.items():
        grid = tuple(
            tuple(milliseconds(batch, batch * (1 + gamma)) / 1000 for gamma in GRID_DRAFTS)
            for batch in GRID_BATCHES
        )
        costs = StepCosts(batches=GRID_BATCHES, drafts=GRID_DRAFTS, grid=grid)
        for batch in BATCHES:
            choosers = {
                "algorithm1": ByLength(costs, floor=False),
                "algorithm1_floor": ByLength(costs, floor=True),
                "tokens": ByToken(costs, len(traces)),
                "oracle": Oracle(costs),
            }
            off = batch / costs.seconds(batch, 0)
            table[f"{machine}, {batch} requests"] = {
                name: round(rate(traces, batch, costs, chooser, 400 + 4800 // batch) / off, 3)
                for name, chooser in choosers.items()
            }
    return table


def decision_us(batch: int) -> dict[str, float]:
    """Return CPU microseconds of one choice and of learning from it; the least of 20 rounds."""
    costs = StepCosts(batches=(1, 64), drafts=(0, 8), grid=((0.0031, 0.0034), (0.0056, 0.026)))
    budget, rng = DraftBudget(costs, DEPTH), np.random.default_rng(0)
    slots = np.array([budget.slot(f"group {i // 8}") for i in range(batch)])
    scores = np.sort(rng.random((batch, DEPTH), dtype=np.float32), axis=1)[:, ::-1].copy()
    lengths = rng.integers(1, DEPTH + 1, batch).astype(np.int32)
    choice = budget.choose(slots, scores, lengths, batch)
    right = np.minimum(choice.keep, 2).astype(np.int32)
    times = []
    for _ in range(20):
        begun = time.thread_time()
        for _ in range(50):
            budget.choose(slots, scores, lengths, batch)
        chosen = time.thread_time()
        for _ in range(50):
            budget.learn(choice, right)
        times.append((chosen - begun, time.thread_time() - chosen))
    choose, learn = (min(column) / 50 * 1e6 for column in zip(*times, strict=True))
    return {"choose": round(choose, 1), "learn": round(learn, 1)}


def recorded(path: Path) -> list[list[Tokens]]:
    lines = (json.loads(line)["responses"] for line in path.read_text().splitlines())
    return [[np.array(each["token_ids"], dtype=np.int32) for each in responses] for responses in lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--responses", type=Path, help="recorded groups, too")
    options = parser.parse_args()
    language = grouped_tokens.Language()
    groups = [language.group(i, 8, options.tokens) for i in range(options.groups)]
    report: dict[str, object] = {"decision_us": {batch: decision_us(batch) for batch in BATCHES}}
    report["no siblings"] = compare([Trace(group[-1:]) for group in groups])
    report["7 siblings"] = compare([Trace(group) for group in groups])
    if options.responses:
        report["recorded"] = compare([Trace(g) for g in recorded(options.responses) if len(g[-1]) > DEPTH])
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
