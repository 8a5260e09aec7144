"""Runs `seer verify` as a user does, or in this process, and judges what its report says of cells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from seer.cli.main import main


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


def write_prompts(folder: Path, count: int) -> Path:
    path = folder / "prompts.jsonl"
    lines = [{"id": f"p{i}", "prompt_token_ids": list(range(1, i + 3))} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path, 3)


def replayed(prompts: Path, *options: object) -> tuple[Result, dict[str, Any]]:
    """Verify on the replay backend; return what the command said, and its report, empty if there is none."""
    out = prompts.parent / "report.json"
    usual = "--backend replay -n 4 --set engine.replay.step_seconds=0.0005"
    command = ["verify", str(prompts), "--json", str(out), *usual.split(), *map(str, options)]
    result = CliRunner().invoke(main, command)
    return result, json.loads(out.read_text()) if out.exists() else {}


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
