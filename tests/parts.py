"""Runs the tests in parts, and says how long each took: what `make test` and `make test-all` call.

Invariants:
- tests run side by side, those with engines each on cores of their own; engines of several ranks have the
  machine to themselves;
- a part that fails keeps no other from running, but makes the exit status 1;
- with `--resume` a part that passed is not run again until some file of the checkout changes, Markdown apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
DONE = ROOT / "build" / "test-parts.json"
"""By part: what it passed with, and how many seconds it took."""

PYTEST = (sys.executable, "-m", "pytest", "-q", "--durations=15", "--durations-min=1")
CHAOS = (sys.executable, "bench/correctness/chaos.py")
FUZZ = (sys.executable, "tests/process/fuzz.py")
FUZZ_FILES = (sys.executable, "tests/process/fuzz_files.py")
FUZZ_HTTP = (sys.executable, "tests/process/fuzz_http.py")
FUZZ_MEANING = (sys.executable, "tests/chaos/odd_meaning.py")

_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
WORKERS = str(max(4, min(8, _cores)))
"""At least four: half of what light tests take is waiting for processes; but each worker collects all tests."""

ENGINE_WORKERS = str(min(4, _cores))
"""Each has a core or more, and up to four engines of a GB."""

VERIFY = "tests/e2e/test_verify.py"
OFFSETS = ("tests/e2e/test_vllm_backend.py", "tests/e2e/test_drafts.py", "tests/e2e/test_draft_paths.py")

SIDE_BY_SIDE = ("-n", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder")
"""In the order given: long files of few tests, as the campaigns, would else begin last."""

ON_OWN_CORES = ("-n", ENGINE_WORKERS, "--dist", "loadfile", "--no-loadscope-reorder", "--own-cores")

E2E = "tests/e2e"
LONG = [f"{E2E}/test_{name}.py" for name in ("weights", "vllm_backend", "turns", "trl", "kv_pool", "images")]
"""Begun early: short files are last."""

IMPORT_VLLM = (
    "tests/property/test_chunk_gate.py",
    "tests/property/test_decode_scheduler.py",
    "tests/property/test_detokenizer.py",
    "tests/unit/test_batch_invariance.py",
    "tests/unit/test_decode_graphs.py",
    "tests/unit/test_device_paths.py",
    "tests/unit/test_kv_connector.py",
    "tests/unit/test_read_slices.py",
    "tests/unit/test_sleep_beside_others.py",
    "tests/unit/test_vllm_transfer.py",
)
"""Light, but run by workers of engines, as vLLM's import takes each worker seconds; and before those, which leave
settings of vLLM in the environment."""

RANKS = [
    str(file.relative_to(ROOT))
    for file in sorted((ROOT / E2E).glob("test_*.py"))
    if "mark.ranks" in file.read_text()
]
"""Alone collected by one worker, while the machine has nothing else to do: TRL's take it seconds."""


def _without(*paths: str) -> list[str]:
    return [f"--ignore={path}" for path in paths]


TEST = {
    "light": [
        (
            *PYTEST,
            *SIDE_BY_SIDE,
            "-m",
            "not (vllm and slow or breadth)",
            "tests",
            *_without(E2E, *IMPORT_VLLM),
        ),
    ],
    "engines": [
        (
            *PYTEST, *ON_OWN_CORES, "-m", "vllm and not (breadth or ranks)", *IMPORT_VLLM, VERIFY, "tests/chaos",
            *LONG, E2E,
        ),
        (*PYTEST, "-m", "ranks and not breadth", *RANKS),
    ],
}  # fmt: skip
"""`make test`: every claim."""

BREADTH = {
    "matrix": [(*PYTEST, "-m", "breadth", VERIFY)],
    "offsets": [(*PYTEST, "-m", "breadth", *OFFSETS)],
    "variants": [(*PYTEST, "-m", "breadth", "tests", *_without(VERIFY, *OFFSETS))],
    "properties": [(*PYTEST, *SIDE_BY_SIDE, "--hypothesis-profile=explore", "tests/property")],
    "faults": [(*CHAOS, "--seconds", "300", "--seed", "1000", "--only", "virtual", "processes")],
    "engine-faults": [(*CHAOS, "--seconds", "600", "--seed", "1000", "--only", "vllm")],
    "stops": [(*CHAOS, "--only", "stops")],
    "fuzz": [
        (*FUZZ, "--frames", "500000", "--seed", "1"),
        (*FUZZ, "--frames", "500000", "--seed", "2", "--keys"),
        (*FUZZ_FILES, "--cases", "700000", "--seed", "1"),
        (*FUZZ_HTTP, "--bodies", "300000", "--seed", "1"),
        (*FUZZ_MEANING, "--runs", "500", "--seed", "1000"),
    ],
}
"""`make test-all`: the same claims with more sizes, variants and seeds."""


def code() -> str:
    """Return a digest of all files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    digest = hashlib.sha256()
    for name in sorted(set(listed.decode().split("\0")) - {""}):
        file = ROOT / name
        if file.suffix != ".md" and file.is_file():
            digest.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def run(names: list[str], *, resume: bool) -> dict[str, tuple[str, float]]:
    """Run parts one after the other; return how each ended, and its seconds."""
    known: dict[str, dict[str, object]] = json.loads(DONE.read_text()) if DONE.exists() else {}
    ended: dict[str, tuple[str, float]] = {}
    for name in names:
        now = code() if resume else ""
        before = known.get(name, {})
        if resume and before.get("code") == now:
            ended[name] = ("passed before", float(str(before["seconds"])))
            continue
        print(f"--- {name}", flush=True)
        began = time.monotonic()
        failed = [
            command for command in (TEST | BREADTH)[name] if subprocess.run(command, cwd=ROOT).returncode
        ]
        seconds = round(time.monotonic() - began, 1)
        ended[name] = ("FAILED" if failed else "passed", seconds)
        if resume and not failed:
            known[name] = {"code": now, "seconds": seconds}
            DONE.parent.mkdir(exist_ok=True)
            DONE.write_text(json.dumps(known, indent=1))
    return ended


def main() -> int:
    """Run the parts asked for; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(TEST | BREADTH)}")
    parser.add_argument("--all", action="store_true", help=f"all of {', '.join(BREADTH)}")
    parser.add_argument("--resume", action="store_true", help="leave out what passed with the same files")
    args = parser.parse_args()
    names = args.parts or list(BREADTH if args.all else TEST)
    if unknown := [name for name in names if name not in TEST | BREADTH]:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(TEST | BREADTH)}")
    ended = run(names, resume=args.resume)
    for name, (how, seconds) in ended.items():
        print(f"{name:15} {how:15} {seconds // 60:.0f} min {seconds % 60:.0f} s")
    return int(any(how == "FAILED" for how, _ in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
