"""Whether receipts tell the truth on this machine: responses again, and forged ones found; prints JSON.

Responses of the shipped model, whose chunks move between two engines with drafts from siblings, in the ways
of `WAYS`. All are recomputed; then `--forged` of them once more, each with one change of
`tests/forged_receipts.py`, every other one with a chain that fits the change. A change of
parameters that gives the same response is none that could be found: `equal_all_the_same` counts them.

    python bench/correctness/receipts.py --prompts 11 -n 32 --forged 200
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from lib.hardware import machine
from lib.paths import TESTS

sys.path.insert(0, str(TESTS))

from forged_receipts import FORGED
from shared_engines import EXAMPLE, MODEL

from seer.common.receipt import sealed
from seer.verify.recompute import read

WAYS = {
    "temperature 1": [],
    "truncated": ["--temperature", "1.3", "--top-p", "0.95", "--top-k", "40", "--min-p", "0.01"],
    "stop strings": ["--temperature", "1.2", "--stop", "= 1", "--stop", "! 2"],
}
LONG_ENOUGH = 12
"""Tokens of a response that is forged: some changes are about its tenth token."""


def seer(*words: object) -> str:
    """Run a command; return what it printed."""
    command = [sys.executable, "-m", "seer.cli.main", *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


def recomputed(file: Path) -> list[tuple[int, str]]:
    """Return the verdict of each receipt of a file, with why, and the number of its line from 0 on."""
    lines = seer("recompute", file, "--model", MODEL).removeprefix(f"{file}:").split(f"\n{file}:")
    parts = [line.partition(" ") for line in lines]
    return [(int(number) - 1, rest.split(": ", 1)[1]) for number, _, rest in parts]


def _outcome(verdict: str) -> str:
    return verdict.partition(":")[0].strip()


def rolled(folder: Path, way: str, args: argparse.Namespace) -> bytes:
    """Return the lines of a rollout's responses, with their receipts."""
    prompts, out = folder / "prompts.jsonl", folder / f"{len(way)}.jsonl"
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[: args.prompts]))
    seer(
        "rollout", prompts, "--model", MODEL, "--out", out, "-n", args.n, "--max-tokens", args.max_tokens,
        "--seed", args.seed, "--chunk-size", 16, "--policy", "migrate", "--instances", 2, "--kv-pool", "none",
        "--receipts", *WAYS[way],
    )  # fmt: skip
    return out.read_bytes()


def main() -> int:
    """Recompute, forge, recompute; 1 if a receipt is different, or a forged one last-bit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--prompts", type=int, default=11)
    parser.add_argument("-n", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--forged", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        whole, forged = Path(scratch, "whole.jsonl"), Path(scratch, "forged.jsonl")
        whole.write_bytes(b"".join(rolled(Path(scratch), way, args) for way in args.ways))
        receipts = [each.receipt for each in read(whole)]
        verdicts = recomputed(whole)
        found["receipts"] = len(receipts)
        found["tokens"] = sum(len(each.token_ids) for each in receipts)
        found["chunks"] = sum(len(each.chunks) for each in receipts)
        found["moved"] = sum(len({chunk.engine for chunk in each.chunks}) > 1 for each in receipts)
        found["accepted_drafts"] = sum(chunk.accepted for each in receipts for chunk in each.chunks)
        found["verdicts"] = Counter(_outcome(each) for _, each in verdicts)
        long = [each for each in receipts if len(each.token_ids) >= LONG_ENOUGH]
        chosen = random.Random(args.seed).choices(long, k=args.forged)
        names = [list(FORGED)[place // 2 % len(FORGED)] for place in range(args.forged)]
        made = [FORGED[name][0](each) for name, each in zip(names, chosen, strict=True)]
        made = [sealed(each) if place % 2 else each for place, each in enumerate(made)]
        forged.write_bytes(b"\n".join(map(msgspec.json.encode, made)))
        verdicts = recomputed(forged)
        found["forged"] = len(made)
        found["forged_verdicts"] = Counter(_outcome(each) for _, each in verdicts)
        found["by_chain_alone"] = sum("changed after it was made" in each for _, each in verdicts)
        found["equal_all_the_same"] = Counter(names[at] for at, each in verdicts if _outcome(each) == "equal")
    print(json.dumps({"machine": machine(), **found}, indent=2))
    return int(bool(found["verdicts"]["different"] or found["forged_verdicts"]["last-bit"]))


if __name__ == "__main__":
    sys.exit(main())
