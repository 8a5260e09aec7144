"""Scheduling policies on two vLLM engines with a model that weighs something, one factor varied at a time.

Every cell is a comparison of `bench/scheduling/real_engines.py`, on the shipped model padded with zeros. The
central one has 30 times its weights, groups of 8, a KV pool, and memory so short that bare vLLM preempts
about 1.4 times a request; every other cell differs from it in one thing. Each run is kept in `--runs`, and a
table that was interrupted goes on where it was. Prints JSON; exit code 1 if a token differs between runs of
Seer.

    python bench/scheduling/heavier_engines.py --runs runs/heavier.jsonl
    python bench/scheduling/heavier_engines.py --runs runs/heavier.jsonl --cells central weight-1 --repeats 1
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import real_engines

CENTRAL = {"weight": "30"}
CELLS: dict[str, dict[str, str]] = {
    "central": {},
    "weight-1": {"weight": "1"},
    "weight-40": {"weight": "40"},
    "weight-150": {"weight": "150"},
    "kv-4": {"kv": "4"},
    "n-16": {"n": "16"},
    "blocks-256": {"blocks": "256"},
    "blocks-384": {"blocks": "384"},
    "blocks-1088": {"blocks": "1088"},
    "no-pool": {"no-pool": ""},
}
"""What differs from `CENTRAL`, as options of `real_engines.py`. With 1,088 blocks nothing is preempted."""


def cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a cell."""
    given = ["vllm", "--runs", str(options.runs), "--repeats", str(options.repeats)]
    given += ["--policies", options.policies]
    for option, value in (CENTRAL | CELLS[name]).items():
        given += [f"--{option}", *([value] if value else [])]
    return real_engines.report_of(real_engines.parser().parse_args(given))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="JSONL file that keeps every run")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--policies", default="static,static/off,seer,seer/off")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    table = {name: cell(name, options) for name in options.cells}
    print(json.dumps(table, indent=1))
    return 1 if any(each["equality"]["differing"] for each in table.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
