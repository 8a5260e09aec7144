"""Receipts of real engines: `seer recompute` generates each response again, and finds what was forged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from forged_receipts import FORGED
from shared_engines import EXAMPLE, MODEL, changed_model

from seer.common.receipt import sealed
from seer.verify.recompute import read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def seer(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seer.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def responses(tmp_path_factory) -> Path:
    """Responses whose chunks of 16 moved between two engines, with drafts from siblings."""
    folder = tmp_path_factory.mktemp("receipts")
    prompts, out = folder / "prompts.jsonl", folder / "responses.jsonl"
    prompts.write_text("".join((EXAMPLE / "prompts.jsonl").read_text().splitlines(keepends=True)[:8]))
    done = seer(
        "rollout", prompts, "--model", MODEL, "--out", out, "-n", 4, "--max-tokens", 120, "--temperature", 1.2,
        "--chunk-size", 16, "--policy", "migrate", "--instances", 2, "--kv-pool", "none", "--receipts",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def test_responses_that_moved_with_drafts_are_generated_again_and_forged_ones_are_found(responses, tmp_path):
    receipts = [each.receipt for each in read(responses)]
    assert len(receipts) == 8 * 4
    engines = [{chunk.engine for chunk in each.chunks} for each in receipts]
    assert sum(len(each) == 2 for each in engines) > 8
    assert sum(chunk.accepted for each in receipts for chunk in each.chunks) > 0
    longest = max(receipts, key=lambda each: len(each.token_ids))
    forged = [sealed(edit(longest)) for edit, _ in FORGED.values()]
    file = tmp_path / "receipts.jsonl"
    file.write_bytes(responses.read_bytes() + b"\n".join(map(msgspec.json.encode, forged)))
    done = seer("recompute", file, "--model", MODEL)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert [line.rpartition(": ")[2] for line in lines[: len(receipts)]] == ["equal"] * len(receipts)
    found = lines[len(receipts) :]
    assert len(found) == len(FORGED)
    for line, (name, (_, expected)) in zip(found, FORGED.items(), strict=True):
        assert f" {longest.group}#{longest.index}: different: {expected}" in line, (name, line)
    assert f"{len(lines)} receipts: {len(receipts)} equal, 0 last-bit, {len(FORGED)} different" in done.stderr


def test_other_weights_and_edits_are_found_without_an_engine(responses, tmp_path):
    other = changed_model(tmp_path / "other")
    done = seer("recompute", responses, "--model", other)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len(lines) == 32
    assert all(": different: the weights differ: the receipt's are " in line for line in lines)
    first = json.loads(responses.read_text().splitlines()[0])
    first["responses"] = first["responses"][:1]
    first["responses"][0]["token_ids"][3] += 1
    edited = tmp_path / "edited.jsonl"
    edited.write_text(json.dumps(first))
    done = seer("recompute", edited, "--model", MODEL)
    assert done.returncode == 1
    assert ": different: changed after it was made: token_ids[0:16]" in done.stdout
    assert "vllm" not in done.stderr
