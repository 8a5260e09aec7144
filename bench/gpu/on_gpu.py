"""All that only a GPU can settle about an engine, piece by piece, each with a deadline.

    python bench/gpu/on_gpu.py runs/gpu
    python bench/gpu/on_gpu.py runs/gpu --only rollout verify-bfloat16-invariant

Each piece is a command in a process group of its own, which is killed at its deadline; what it printed is in
FOLDER/NAME.log, its figures in FOLDER/NAME.json. FOLDER/summary.json has the exit codes and seconds of all
pieces that ran. The exit code is 1 if a piece failed. Engines that start for the first time compile for
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lib.paths import EXAMPLE, ROOT

MODEL, PROMPTS = str(EXAMPLE / "model"), str(EXAMPLE / "prompts.jsonl")
SEER = (sys.executable, "-m", "seer.cli.main")
BENCH = Path(__file__).parent
GRAPHS = ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
SMALL = ("--set", "engine.gpu_memory_utilization=0.15", "--set", "pool.kind=none")


@dataclass(frozen=True)
class Piece:
    """A command; `OUT` in it stands for the file of its figures."""

    seconds: int
    command: tuple[str, ...]


def verify(*settings: str, matrix: str) -> Piece:
    """Return a run of `seer verify` on the shipped model."""
    given = tuple(part for setting in settings for part in ("--set", setting))
    work = ("-n", "4", "--max-tokens", "256", "--matrix", matrix)
    return Piece(420, (*SEER, "verify", PROMPTS, "--model", MODEL, *work, "--json", "OUT", *SMALL, *given))


def doctor(only: str, *settings: str) -> Piece:
    """Return checks of `seer doctor` on the shipped model."""
    given = tuple(part for setting in settings for part in ("--set", setting))
    return Piece(420, (*SEER, "doctor", "--only", only, "--seconds", "400", "--json", "OUT", *SMALL, *given))


def ways(*settings: str) -> Piece:
    """Return a run of `ways.py` on the shipped model."""
    given = tuple(part for setting in settings for part in ("--set", setting))
    return Piece(300, (sys.executable, str(BENCH / "ways.py"), "OUT", *SMALL, *given))


def rates(*arguments: str) -> Piece:
    """Return a run of `rates.py`."""
    return Piece(590, (sys.executable, str(BENCH / "rates.py"), "OUT", *arguments))


CELLS = "chunk-16,preempt,migrate,drafts-right,drafts-random"
FEW = "chunk-16,preempt,drafts-right"
BFLOAT16 = "engine.dtype=bfloat16"
PLAIN = "chunk-16,preempt"
INVARIANT = "engine.batch_invariant=true"
AHEAD = "engine.async_scheduling=true"

PIECES = {
    "rollout": Piece(180, (
        *SEER, "rollout", PROMPTS, "--model", MODEL, "--out", "OUT.jsonl", "--report", "OUT", "--set",
        "pool.kind=none",
    )),
    "doctor": doctor("versions,imports,devices,compilers,limits,start,largest-batch,step-table,sleep"),
    "verify-float32": verify(matrix=CELLS),
    "verify-bfloat16": verify(BFLOAT16, matrix=CELLS),
    "verify-bfloat16-invariant": verify(BFLOAT16, INVARIANT, matrix=CELLS),
    "verify-float32-invariant": verify(INVARIANT, matrix=FEW),
    "verify-ahead": verify(AHEAD, "drafts.source=off", matrix=PLAIN),
    "verify-ahead-invariant": verify(BFLOAT16, INVARIANT, AHEAD, matrix=PLAIN),
    "ways-bfloat16": ways(BFLOAT16),
    "ways-invariant": ways(BFLOAT16, INVARIANT),
    "ways-invariant-flash": ways(BFLOAT16, INVARIANT, "engine.vllm.attention_backend=FLASH_ATTN"),
    "updates": Piece(480, (sys.executable, str(BENCH / "updates.py"), "OUT")),
    "rates": rates(),
    "rates-invariant": rates("--sides", "off", "ahead", "grouped", "--cells", "512x64", "--set", INVARIANT),
    **{
        f"graphs-{mode}": doctor("start,step-table", f"engine.vllm.cudagraph_mode={mode}")
        for mode in GRAPHS
    },
    "kernels": Piece(490, (*SEER, "doctor", "--kernels", "--json", "OUT")),
}  # fmt: skip


def run(name: str, folder: Path) -> dict[str, float]:
    """Run a piece; return its exit code, 124 if it was killed at its deadline, and its seconds."""
    piece, out = PIECES[name], str(folder / f"{name}.json")
    begun = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [part.replace("OUT", out) for part in piece.command], cwd=ROOT, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(piece.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = 124
    return {"code": code, "seconds": round(time.monotonic() - begun, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES))
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    summary = folder / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {}
    for name in given.only:
        found[name] = run(name, folder)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        summary.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(found[name]["code"] for name in given.only))


if __name__ == "__main__":
    sys.exit(main())
