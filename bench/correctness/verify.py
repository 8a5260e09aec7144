"""The same tokens, whatever the schedule: the full matrix on the shipped model. Prints JSON.

At least 200,000 tokens are compared, then one cell runs again with a planted fault, which must be
found. Exit code 0 only if both came out as they should.

    python bench/correctness/verify.py --out verify.json
    python bench/correctness/verify.py --turns --min-tokens 20000
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lib.hardware import machine
from lib.paths import EXAMPLE
from msgspec.structs import replace

from seer.common.config import Config, load
from seer.common.types import SamplingParams
from seer.verify.cell_run import Job
from seer.verify.run import verify

MIN_TOKENS = 200_000
FAULT_CELLS = {False: "chunk-64", True: "turns-migrate"}
"""Without turns, and with them."""


def config(model: Path, overrides: list[str]) -> Config:
    return load(None, {}, [f"shared.model={model.resolve()}", *overrides])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model")
    parser.add_argument("--prompts", type=Path, default=EXAMPLE / "prompts.jsonl")
    parser.add_argument("-n", type=int, default=4, help="responses per prompt")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--matrix", default="", help="cells, comma-separated; default: all that can run here")
    parser.add_argument("--turns", action="store_true", help="the cells whose responses have turns")
    parser.add_argument("--min-tokens", type=int, default=MIN_TOKENS)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    job = Job(
        prompts=options.prompts,
        n=options.n,
        sampling=SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature),
        seed=0,
        config=config(options.model, options.overrides),
        matrix=options.matrix,
        min_tokens=options.min_tokens,
        turns=options.turns,
    )
    clean = verify(job, say)
    planted = verify(replace(job, matrix=FAULT_CELLS[job.turns], plant_fault=True, n=1, min_tokens=1), say)
    result = {"machine": machine("torch", "vllm"), "clean": clean.as_json(), "planted": planted.as_json()}
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0 if not clean.failures() and planted.count("bug") else 1


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
