"""What updates of a real training run send: GRPO on the shipped model, in float32 and in bfloat16.

For each type of the engines' weights and each learning rate the example trains for a few steps, once with
deltas and once without, from one seed. By run: the bytes of each update after the first over those of the
whole stream, why an update was whole, and the seconds of an update, deltas over whole. Prints JSON.

    python bench/weights/training.py --steps 6
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lib.hardware import machine
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"

RUN = """
import functools, json, sys, time
from pathlib import Path
folder, out, deltas = (sys.argv.pop(1) for _ in range(3))
sys.path.insert(0, folder)
import train
update = train.RolloutClient.update_weights

async def noted(client, *given):
    began = time.perf_counter()
    live = await update(client, *given)
    with Path(out).open("a") as file:
        print(json.dumps([*client.deltas.last, time.perf_counter() - began]), file=file)
    return live

train.RolloutClient.update_weights = noted
train.RolloutClient = functools.partial(train.RolloutClient, deltas=deltas == "deltas")
sys.exit(train.main())
"""


def updates(model: Path, rate: float, steps: int, how: str) -> list[list[Any]]:
    """Train, and return of each update after the first: bytes sent, of, why whole, seconds."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "updates.jsonl"
        command = (
            sys.executable, "-c", RUN, str(EXAMPLES / "grpo"), str(out), how, "--model", str(model),
            "--learning-rate", str(rate), "--iterations", str(steps), "--out", name, "--held-out", "8",
        )  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in out.read_text().splitlines()][1:]


def measured(model: Path, rate: float, steps: int) -> dict[str, Any]:
    """Return the figures of one model at one learning rate."""
    found, whole = (updates(model, rate, steps, how) for how in ("deltas", "whole"))
    seconds = [statistics.median(each[3] for each in given) for given in (found, whole)]
    figures = {
        "bytes": [round(sent / of, 4) for sent, of, _, _ in found],
        "why": sorted({why for _, _, why, _ in found if why}),
        "whole_seconds": round(seconds[1], 3),
        "seconds": round(seconds[0] / seconds[1], 2),
    }
    print(model, rate, figures, file=sys.stderr)
    return figures


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 4e-4])
    asked = parser.parse_args()
    shipped = EXAMPLES / "countdown" / "model"
    with tempfile.TemporaryDirectory() as name:
        models = {"bfloat16": Path(name), "float32": shipped}
        AutoModelForCausalLM.from_pretrained(shipped, dtype=torch.bfloat16).save_pretrained(name)
        AutoTokenizer.from_pretrained(shipped).save_pretrained(name)
        runs = {
            f"{dtype}, {rate:g}": measured(model, rate, asked.steps)
            for dtype, model in models.items()
            for rate in asked.rates
        }
    print(json.dumps({"machine": machine(), "steps": asked.steps, "over_whole": runs}, indent=1))


if __name__ == "__main__":
    main()
