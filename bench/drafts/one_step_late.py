"""What drafts lose that are made before the last step's tokens are known; print JSON.

    python bench/drafts/one_step_late.py [--responses RUN/responses.jsonl] [--tokens 4000]

Drafts on time follow a response's last token. Late ones are a tree of continuations, made from what was known
a step earlier: the tokens of the last step lead into it, and what lies behind them is the draft. A step takes
the longest path that the response follows, and one token more. Acceptance is simulated on tokens of
bench/drafts/grouped_tokens.py, or on recorded ones; each group's last response is drafted, after its
siblings' whole responses. Figures are tokens per step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import grouped_tokens
import numpy as np
from lib.machine import machine
from numpy.typing import NDArray

from seer._native import GroupTree

DEPTH = 8
SIBLINGS = (0, 5, 15)
TREES = {"one path": (1, 18), "4 paths": (4, 48), "16 paths": (16, 128)}
"""Paths and tokens of a late tree, which is as deep as two drafts and the tokens between."""

Tokens = NDArray[np.int32]
Tree = tuple[Sequence[int], Sequence[int]]
"""Tokens of drafted branches, and where each one's parent is, -1 at the beginning; the best come first."""


def walk(tree: Tree, tokens: Sequence[int]) -> int | None:
    """Return the place where these tokens lead in a tree, -1 for none of them; None: beyond it."""
    place = -1
    for token in tokens:
        children = (i for i, parent in enumerate(tree[1]) if parent == place and tree[0][i] == token)
        found = next(children, None)
        if found is None:
            return None
        place = found
    return place


def best_path(tree: Tree, place: int) -> list[int]:
    """Return the best branch behind a place, `DEPTH` tokens at most."""
    path: list[int] = []
    while len(path) < DEPTH:
        child = next((i for i, parent in enumerate(tree[1]) if parent == place), None)
        if child is None:
            break
        path.append(tree[0][child])
        place = child
    return path


def tokens_per_step(group: list[Tokens], siblings: int, late: tuple[int, int] | None) -> float:
    """Simulate a group's last response; `late`: paths and tokens of the tree, None: drafts on time."""
    tree, response, me = GroupTree(), group[-1], len(group)
    for index, sibling in enumerate(group[:siblings]):
        tree.append(index, 0, sibling)
    tree.append(me, 0, response[:1])
    at, steps, last, earlier = 1, 0, 1, ([], [])
    while at < len(response):
        paths, most = late or (1, DEPTH)
        made = tree.draft(me, most, paths, 0.0, 2 * DEPTH + 2 if late else DEPTH)
        known: Tree = (list(made.token_ids), list(made.parents))
        if late:
            place = walk(earlier, response[last:at].tolist())
            draft = best_path(earlier, place) if place is not None else []
        else:
            draft = best_path(known, -1)
        follows = (np.array(draft[: len(response) - at]) == response[at : at + len(draft)]).tolist()
        accepted = [*follows, False].index(False)
        end = min(len(response), at + accepted + 1)
        tree.append(me, at, response[at:end])
        last, earlier, at, steps = at, known, end, steps + 1
    return (len(response) - 1) / max(1, steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=Path)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--groups", type=int, default=3)
    options = parser.parse_args()
    if options.responses:
        lines = options.responses.read_text().splitlines()
        groups = [
            [np.array(one["token_ids"], np.int32) for one in json.loads(line)["responses"]] for line in lines
        ]
    else:
        language = grouped_tokens.Language()
        groups = [language.group(seed, max(SIBLINGS) + 1, options.tokens) for seed in range(options.groups)]
    report: dict[str, object] = {"machine": machine("numpy"), "unit": "tokens per step"}
    for siblings in SIBLINGS:
        ways: dict[str, tuple[int, int] | None] = {"on time": None} | TREES
        report[f"{siblings} siblings"] = {
            name: round(float(np.mean([tokens_per_step(group, siblings, late) for group in groups])), 2)
            for name, late in ways.items()
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
