"""Faults planted in engines from outside are found by name; with real engines: tests/e2e/test_verify.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from planted import faults

from seer.cli.main import main

PLANTED = Path(faults.__file__).parent


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "prompt_token_ids": list(range(1, i + 3))} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def verified(prompts: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict]:
    out, named = prompts.parent / "report.json", prompts.parent / "fault"
    named.write_text(fault)
    monkeypatch.setenv("PYTHONPATH", str(PLANTED))
    monkeypatch.setenv("SEER_PLANTED", str(named))
    monkeypatch.setenv("SEER_PLANTED_IN", "engines")
    usual = "--backend replay -n 2 --max-tokens 60 --min-tokens 100 --set engine.replay.step_seconds=0.0005"
    command = ["verify", str(prompts), "--json", str(out), *usual.split(), "--matrix", "chunk-16"]
    result = CliRunner().invoke(main, command)
    return result.exit_code, json.loads(out.read_text())


@pytest.mark.parametrize("fault", ["order-one-chunk-in-41", "key-one-prompt-in-12", "order-logprobs", "none"])
def test_a_fault_of_chunks_that_go_on_is_found(prompts: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    code, report = verified(prompts, fault, monkeypatch)
    (cell,) = report["cells"]
    assert (code, cell["bug"] > 0) == ((0, False) if fault == "none" else (1, True))
    kinds = {each["kind"] for each in cell["comparison"]["mismatches"]}
    assert kinds <= {"logprob"} if fault == "order-logprobs" else kinds <= {"token", "finish"}


def test_the_list_has_faults_of_every_kind_and_the_cells_that_are_to_find_them():
    kinds = [fault.kind for fault in faults.FAULTS.values()]
    assert len(kinds) >= 30
    assert set(kinds) == {
        "order",
        "context",
        "key",
        "position",
        "history",
        "image",
        "pool",
        "draft",
        "routes",
        "grammar",
    }
    assert {fault.cell for fault in faults.FAULTS.values()} == {
        "chunk-16", "sampling", "structured", "pool-migrate", "drafts-sampling",
    }  # fmt: skip
