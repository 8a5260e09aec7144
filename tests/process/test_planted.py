"""Faults planted in engines from outside are found by name; with real engines: tests/e2e/test_verify.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import faults
from verify_runs import replayed, write_prompts

PLANTED = Path(faults.__file__).parent


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path, 40)


def verified(prompts: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict]:
    named = prompts.parent / "fault"
    named.write_text(fault)
    monkeypatch.setenv("PYTHONPATH", str(PLANTED))
    monkeypatch.setenv("SEER_PLANTED", str(named))
    monkeypatch.setenv("SEER_PLANTED_IN", "engines")
    result, found = replayed(
        prompts, *["-n", "2", "--max-tokens", "60", "--min-tokens", "100", "--matrix", "chunk-16"]
    )
    return result.exit_code, found


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
