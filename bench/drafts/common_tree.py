"""What a tree of all groups adds to each group's own: tokens a step confirms, on recorded rollouts.

Replays the responses of a rollout's OUT file, in order, with so many running at once; each step takes
the draft of which more is expected to be right, as the engine does, with a fixed floor for scores.

    seer rollout examples/countdown/prompts.jsonl --model examples/countdown/model --out out.jsonl -n 8
    python bench/drafts/common_tree.py out.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from seer._native import GroupTree

MAX_DRAFT = 8
RUNNING = (1, 4, 32)
MIN_SCORES = (0.2, 0.5)
KINDS = {"group": (True, False), "all groups": (False, True), "both": (True, True)}


def replay(groups: list[dict[str, Any]], kind: str, running: int, min_score: float) -> dict[str, Any]:
    """Return tokens per step and request, and tokens drafted per step."""
    use_own, use_common = KINDS[kind]
    common, trees = GroupTree(), [GroupTree(group["prompt_token_ids"]) for group in groups]
    waiting = [
        (number, index, response["token_ids"])
        for number, group in enumerate(groups)
        for index, response in enumerate(group["responses"])
    ][::-1]
    steps = tokens = drafted = 0
    now: list[tuple[int, int, list[int], int]] = []
    while waiting or now:
        while waiting and len(now) < running:
            now.append((*waiting.pop(), 0))
        after = []
        for number, index, text, at in now:
            name = number * 4096 + index
            drafts = []
            if at and use_own:
                drafts.append(trees[number].draft(index, MAX_DRAFT, 1, min_score))
            if at and use_common:
                drafts.append(common.draft(name, MAX_DRAFT, 1, min_score))
            best = max(drafts, key=lambda draft: sum(draft.scores), default=None)
            guess = [] if best is None else best.token_ids
            pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(guess, text[at:], strict=False))
            end = min(at + sum(1 for _ in pairs) + 1, len(text))
            trees[number].append(index, at, text[at:end])
            common.append(name, at, text[at:end])
            steps, tokens, drafted = steps + 1, tokens + end - at, drafted + len(guess)
            if end < len(text):
                after.append((number, index, text, end))
        now = after
    return {
        "kind": kind, "running": running, "min_score": min_score,
        "tokens_per_step": round(tokens / steps, 2), "drafted_per_step": round(drafted / steps, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="OUT of a rollout")
    groups = [json.loads(line) for line in parser.parse_args().out.read_text().splitlines()]
    cases = itertools.product(KINDS, RUNNING, MIN_SCORES)
    print(json.dumps([replay(groups, *case) for case in cases], indent=1))


if __name__ == "__main__":
    main()
