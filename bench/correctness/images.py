"""Whether images keep the promise on this machine: `seer verify` of tiny vision models; prints JSON.

Each family's model is made anew from its class in transformers (`tests/vision_models.py`). Its prompts show
images of noise: one, several, the same in two prompts, none. docs/images.md has what was found.

    python bench/correctness/images.py --families qwen2.5-vl --matrix drafts,pool-migrate
    python bench/correctness/images.py --turns
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.hardware import machine
from lib.paths import TESTS

sys.path.insert(0, str(TESTS))

import vision_models

ADDED = ("tokens_compared", "numeric", "bug", "unjudged")
"""Sums over the cells that prove something."""


def verify(family: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the matrix on a family; return what was found in all cells, and in each."""
    model, out = vision_models.make(family, folder / "model"), folder / "report.json"
    command = [
        sys.executable, "-m", "seer.cli.main", "verify", vision_models.write_lines(folder), "--model", model,
        "--json", out, "-n", args.n, "--max-tokens", args.max_tokens, "--min-tokens", args.min_tokens,
        "--seed", args.seed, "--set", "engine.max_model_len=400", *(["--turns"] if args.turns else []),
        *(["--matrix", args.matrix] if args.matrix else []),
    ]  # fmt: skip
    done = subprocess.run([str(part) for part in command], stdout=sys.stderr, check=False)
    if not out.exists():
        return {"exit": done.returncode}
    report = json.loads(out.read_text())
    return {
        "exit": done.returncode,
        **{name: report[name] for name in (*ADDED, "skipped")},
        "cells": {cell["name"]: _told(cell) for cell in report["cells"]},
    }


def _told(cell: dict[str, Any]) -> dict[str, Any]:
    counters = cell["counters"]
    compared = cell["comparison"] or {"tokens": 0, "max_logprob_difference": None}
    return {
        "tokens": compared["tokens"],
        "logprobs_differ_by": compared["max_logprob_difference"],
        **{name: cell[name] for name in ("numeric", "bug", "unmet", "error")},
        **{
            name: counters.get(name)
            for name in ("migrations", "preemptions", "accepted_tokens", "pool_tokens")
        },
        "seconds": round(cell["seconds"], 1),
    }


def main() -> int:
    """Verify the families that the command line names; 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    families = list(vision_models.FAMILIES)
    parser.add_argument("--families", nargs="+", choices=families, default=families)
    parser.add_argument("--matrix", default="", help="as for seer verify: default, all cells")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--min-tokens", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = {}
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            found[family] = verify(family, Path(folder), args)
    print(json.dumps({"machine": machine("torch", "vllm", "transformers"), "families": found}, indent=1))
    return int(any(each["exit"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
