"""Runs `seer verify` as a user does, and judges what its report says of cells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def verify(folder: Path, prompts: Path, model: Path, *options: object) -> tuple[int, dict[str, Any], str]:
    """Run `seer verify`; return its exit code, report and words."""
    out = folder / "report.json"
    out.unlink(missing_ok=True)  # of a run before
    command = [sys.executable, "-m", "seer.cli.main", "verify", prompts, "--model", model, "--json", out]
    done = subprocess.run(
        list(map(str, [*command, *options])), capture_output=True, text=True, timeout=1500, check=False
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


def check_faulty(cell: dict[str, Any]) -> None:
    """A planted fault is a bug; what it drew is judged by the teacher, whose token is the reference's."""
    assert cell["bug"] > 0
    for mismatch in cell["comparison"]["mismatches"]:
        assert (mismatch["kind"], mismatch["expected"]) == ("token", mismatch["reference"])
        assert (mismatch["verdict"] == "bug") == (mismatch["gap"] > mismatch["error"])


def check_clean(cell: dict[str, Any], report: dict[str, Any]) -> None:
    assert not cell["unmet"]
    assert cell["bug"] == 0
    assert cell["comparison"]["tokens"] == report["reference"]["counters"]["tokens"]
