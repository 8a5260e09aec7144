"""All that only a GPU can settle about an engine, in five commands for half an hour on a bare machine.

    python bench/gpu/on_gpu.py gate --out runs/gpu      # what a stream waits for drafts
    python bench/gpu/on_gpu.py split --out runs/gpu     # without drafts: where bare vLLM's tokens/s go
    python bench/gpu/on_gpu.py graphs --out runs/gpu    # a step by drafts, requests and kind of graphs
    python bench/gpu/on_gpu.py verify --out runs/gpu    # the same tokens
    python bench/gpu/on_gpu.py drafts --out runs/gpu    # with drafts, against bare vLLM, in every cell
    python bench/gpu/on_gpu.py all --cpu --out runs/gpu-cpu     # a dry run, tiny, of all five
    python bench/gpu/on_gpu.py brief --out runs/gpu     # the least of `drafts`, `split` and `verify`, 9 min

Run them in this order; `verify` before `graphs` when late, only `gate` and `brief` in a quarter of an hour.
Each has a deadline for itself and for each of its pieces, whose processes are killed then. A piece is a
command; what it prints is in OUT/COMMAND/PIECE.log, its figures, which it writes after each cell, in
PIECE.json. At the end a command writes OUT/COMMAND.json and prints its verdict (`verdicts.py`), also from
what an ended piece left. Compiled kernels are kept in build/gpu-cache. The exit code is 1 if a piece failed,
whatever the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import verdicts
from lib.paths import EXAMPLE, ROOT

BENCH = Path(__file__).parent
MODEL, PROMPTS = str(EXAMPLE / "model"), str(EXAMPLE / "prompts.jsonl")
PADDED = str(ROOT / "build" / "padded-4-8-random")
"""What `sides.py` makes, unless `split` has made it."""

CACHE = ROOT / "build" / "gpu-cache"
CACHES = {
    "XDG_CACHE_HOME": CACHE, "VLLM_CACHE_ROOT": CACHE / "vllm", "TRITON_CACHE_DIR": CACHE / "triton",
    "TORCHINDUCTOR_CACHE_DIR": CACHE / "inductor", "CUDA_CACHE_PATH": CACHE / "cuda",
    "FLASHINFER_WORKSPACE_BASE": CACHE,
}  # fmt: skip


LIMITS = (
    "engine.gpu_memory_utilization=0.3", "engine.max_num_seqs=256", "engine.max_model_len=1280",
    "engine.max_num_batched_tokens=4096",
)  # fmt: skip
"""Of the engines whose steps are measured."""


@dataclass(frozen=True)
class Piece:
    """A command, and the seconds after which it is killed; `OUT` in it stands for the file of its figures."""

    seconds: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """Pieces, `at_once` of them at a time behind the `first`, and the seconds that all of them may take."""

    seconds: float
    pieces: dict[str, Piece]
    at_once: int = 1
    first: str = ""


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a script beside this one."""
    return (sys.executable, str(BENCH / f"{name}.py"), "OUT", *arguments)


def seer(*arguments: str, sets: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command of Seer's, with settings."""
    given = (part for setting in ("pool.kind=none", *sets) for part in ("--set", setting))
    return (sys.executable, "-m", "seer.cli.main", *arguments, "--json", "OUT", *given)


def rates(seconds: int, sides: str, cells: str, turns: int, *arguments: str) -> Piece:
    """Return a run of `rates.py`, which begins no cell in its last seconds."""
    chosen = ("--sides", *sides.split(), "--cells", *cells.split(), "--turns", str(turns), *arguments)
    return Piece(seconds, script("rates", *chosen, "--fill", "random", "--seconds", str(seconds - 20)))


def table(mode: str, model: str, *sets: str) -> Piece:
    """Return a table of steps with one kind of graphs."""
    only = ("doctor", "--only", "start,step-table", "--model", model, "--seconds", "150")
    return Piece(160, seer(*only, sets=(f"engine.vllm.cudagraph_mode={mode}", *LIMITS, *sets)))


def same_tokens(seconds: int, matrix: str, work: tuple[str, ...], *sets: str) -> Piece:
    """Return a run of `seer verify` with the shipped model."""
    return Piece(seconds, seer("verify", PROMPTS, "--model", MODEL, "--matrix", matrix, *work, sets=sets))


def ways(seconds: int, *sets: str, responses: int = 3) -> Piece:
    """Return a run of `ways.py`."""
    given = (part for each in sets for part in ("--set", each))
    return Piece(seconds, script("ways", "--responses", str(responses), *given))


BFLOAT16, INVARIANT = "engine.dtype=bfloat16", "engine.batch_invariant=true"
SMALL = ("engine.gpu_memory_utilization=0.4", "engine.kv_blocks=8192")
"""Little memory, and room for what others take while an engine measures its own."""

WORK = ("-n", "4", "--max-tokens", "256")
FEWER = ("-n", "4", "--max-tokens", "64")
CELLS = "chunk-16,synchronous,preempt,drafts-right,drafts-random"
GPU = {
    "gate": Command(60, {"gate": Piece(55, script("gate_bench"))}),
    "split": Command(560, {
        "rates": rates(430, "vllm off off-now vllm-v1 engine vllm-here off-1024", "512x64 512x1 16x256", 2),
        "profile": Piece(130, script("profile_steps", "--seconds", "60")),
    }),
    "graphs": Command(330, {
        "model": Piece(100, script("sides")),
        "default": table("FULL_AND_PIECEWISE", PADDED),
        "off": table("FULL_AND_PIECEWISE", PADDED, "drafts.source=off"),
        "full": table("FULL", PADDED),
    }, 1, "model"),
    "verify": Command(300, {
        "verify-bfloat16": same_tokens(290, CELLS, WORK, BFLOAT16, *SMALL),
        "verify-invariant": same_tokens(290, CELLS, WORK, BFLOAT16, INVARIANT, *SMALL),
        "ways-bfloat16": ways(290, BFLOAT16, *SMALL),
        "ways-invariant": ways(290, BFLOAT16, INVARIANT, *SMALL),
    }, 2),
    "drafts": Command(430, {
        "rates": rates(425, "vllm grouped", "512x1 512x64 16x64 16x256 512x8 1024x256", 3),
    }),
}  # fmt: skip
"""Together 28 minutes: two of the half hour are for starting the machine and unpacking."""

BRIEF = Command(
    540,
    {
        "rates": rates(340, "vllm grouped off engine", "512x64 512x1 16x256", 2, "--at-once", "4"),
        "verify-bfloat16": same_tokens(400, "synchronous,drafts-right", FEWER, BFLOAT16, *SMALL),
        "ways-bfloat16": ways(400, BFLOAT16, *SMALL, responses=1),
    },
    2,
    "rates",
)
"""Ratios first, alone; what is left is for the same tokens, which nothing is timed by."""

TINY = ("-n", "1", "--max-tokens", "32", "--min-tokens", "500")
FEW = ("engine.max_num_seqs=8", "engine.max_model_len=512", "engine.kv_cache_gib=0.5")
WAYS = ("--set", "engine.kv_cache_gib=0.5")
QUICK = ("--cpu", "--turns", "1", "--seconds", "400", "--sides", "vllm")
CPU = {
    "gate": Command(60, {"gate": Piece(55, script("gate_bench", "--cpu"))}),
    "split": Command(560, {
        "rates": Piece(430, script("rates", *QUICK, "off", "engine")),
        "profile": Piece(130, script("profile_steps", "--cpu", "--seconds", "60", "--sides", "engine")),
    }),
    "graphs": Command(330, {
        "none": Piece(160, seer("doctor", "--only", "start,step-table", "--model", MODEL, sets=FEW)),
    }),
    "verify": Command(300, {
        "verify-float32": same_tokens(150, "chunk-16", TINY, *FEW),
        "ways-float32": Piece(150, script("ways", "--responses", "1", "--beside", "0", *WAYS)),
    }),
    "drafts": Command(430, {"rates": Piece(425, script("rates", *QUICK, "grouped"))}),
}  # fmt: skip
"""The same commands with the same limits, on the shipped model."""

CPU_BRIEF = Command(
    540,
    {
        "rates": Piece(400, script("rates", *QUICK, "grouped", "off")),
        "verify-float32": same_tokens(140, "chunk-16", TINY, *FEW),
    },
)


def run_piece(piece: Piece, out: Path, end: float) -> dict[str, float]:
    """Run a piece; return its exit code, 124 if it was killed at a deadline, and its seconds."""
    begun = time.monotonic()
    left = min(piece.seconds, end - begun)
    if left <= 0:
        return {"code": 124, "seconds": 0.0}
    with out.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [part.replace("OUT", str(out)) for part in piece.command], cwd=ROOT, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
            env={name: str(value) for name, value in CACHES.items()} | os.environ,
        )  # fmt: skip
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            kill_all(process.pid)
            code = 124
    return {"code": code, "seconds": round(time.monotonic() - begun, 1)}


def kill_all(pid: int) -> None:
    """Kill a process and all that came from it, whatever sessions they made."""
    import psutil

    try:
        family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for each in family:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, 10)


def run(name: str, command: Command, out: Path) -> dict[str, Any]:
    """Run a command; return what it writes."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    report: dict[str, Any] = {"limit_seconds": command.seconds, "pieces": {}}

    def perform(piece: str) -> None:
        figures = folder / f"{piece}.json"
        figures.unlink(missing_ok=True)
        done = run_piece(command.pieces[piece], figures, begun + command.seconds)
        report["pieces"][piece] = done | ({"figures": read(figures)} if figures.exists() else {})
        print(f"{name} {piece}: {done}", file=sys.stderr, flush=True)
        (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")

    if command.first:
        perform(command.first)
    with ThreadPoolExecutor(command.at_once) as pool:
        list(pool.map(perform, [piece for piece in command.pieces if piece != command.first]))
    found = {piece: each["figures"] for piece, each in report["pieces"].items() if each.get("figures")}
    judge = getattr(verdicts, name)
    status, line = judge(found) if found else ("incomplete", "no piece left figures")
    failed = [
        f"{piece} ended with {each['code']}" for piece, each in report["pieces"].items() if each["code"]
    ]
    if failed:
        line += "; " + ", ".join(failed)
        status = "incomplete" if status == "pass" else status
    report |= {"seconds": round(time.monotonic() - begun, 1), "verdict": status, "line": line}
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def read(file: Path) -> Any:  # noqa: ANN401 - what JSON says
    """Return the figures of a piece; None where it was cut off while it wrote."""
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=[*GPU, "brief", "all"])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--cpu", action="store_true", help="a dry run: the shipped model, tiny, on CPUs")
    parser.add_argument("--seconds", type=float, default=600, help="most of a command, where less is left")
    given = parser.parse_args()
    commands = CPU | {"brief": CPU_BRIEF} if given.cpu else GPU | {"brief": BRIEF}
    failed = False
    for name in GPU if given.command == "all" else [given.command]:
        command = replace(commands[name], seconds=min(commands[name].seconds, given.seconds))
        report = run(name, command, given.out.resolve())
        print(
            f"verdict {name}: {report['verdict']} in {report['seconds']:.0f} s: {report['line']}", flush=True
        )
        failed |= any(each["code"] for each in report["pieces"].values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
