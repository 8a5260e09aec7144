"""The main job on the real engine: `seer rollout` gives the same tokens whatever the schedule or the faults."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from living import alive
from shared_engines import ONE_CORE, SharedEngines

pytestmark = [pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "countdown"
RESPONSES = 4
SCHEDULES = {  # tests/e2e/test_verify.py has more, and compares token by token
    "chunks of 16, two instances": {"chunk_size": 16},
    "static, short of KV": {"policy": "static"},
    "the default, short of KV": {"chunk_size": 64},
}


def command(folder: Path, *options: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:10]
    prompts.write_text("\n".join(lines))
    base = [sys.executable, "-m", "seer.cli.main", "rollout", str(prompts), "--model", str(EXAMPLE / "model")]
    base += ["--out", str(folder / "out.jsonl"), "--report", str(folder / "report.json")]
    return [*base, "-n", str(RESPONSES), "--max-tokens", "300", *options]


def results(folder: Path) -> tuple[list[list[list[int]]], dict]:
    groups = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [group["id"] for group in groups] == [
        json.loads(line)["id"] for line in (folder / "prompts.jsonl").read_text().splitlines()
    ]
    for group in groups:
        assert [response["index"] for response in group["responses"]] == list(range(RESPONSES))
        for response in group["responses"]:
            assert 0 < len(response["token_ids"]) == len(response["logprobs"]) <= 300
            assert response["finish_reason"] == ("length" if len(response["token_ids"]) == 300 else "stop")
    tokens = [[response["token_ids"] for response in group["responses"]] for group in groups]
    return tokens, json.loads((folder / "report.json").read_text())


def rollout(folder: Path, *options: str) -> tuple[list[list[list[int]]], dict]:
    folder.mkdir()
    done = subprocess.run(command(folder, *options), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return results(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    return rollout(folder, "--instances", "1", "--set", *ONE_CORE)[0]


@pytest.fixture(scope="module")
def scarce():
    shared = SharedEngines(EXAMPLE / "model", 1, "engine.max_model_len=400", "engine.kv_blocks=48")
    yield shared
    shared.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_changes_a_token(schedule, reference, tmp_path, request):
    engines = request.getfixturevalue("scarce" if "short" in schedule else "pair")
    tokens, report = rollout(tmp_path / "run", "--connect", engines.anew(**SCHEDULES[schedule]))
    assert tokens == reference
    assert report["requests"] == 10 * RESPONSES
    assert report["tokens"] == sum(len(response) for group in tokens for response in group)
    assert (report["preemptions"] > 0) == (schedule == "static, short of KV")
    assert (report["chunks"] == report["requests"]) == ("static" in schedule)


def test_an_engine_killed_mid_run_loses_nothing_and_changes_nothing(reference, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    process = subprocess.Popen(command(folder, "--chunk-size", "32"), stderr=subprocess.PIPE, text=True)
    try:
        victim = _an_engine_at_work(process)
        services = set(_children(process.pid))
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "killed by SIGKILL" in errors
    tokens, _ = results(folder)
    assert tokens == reference
    assert not any(map(alive, services))


def _an_engine_at_work(process: subprocess.Popen) -> int:
    """Wait for the first report of progress and return the pid of one engine."""
    assert process.stderr is not None
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        line = process.stderr.readline()
        if line.startswith("ready"):
            time.sleep(0.7)  # into the rollout; the outcome does not depend on how far
            return next(pid for pid, words in _children(process.pid).items() if "engine" in words)
        assert line, "the rollout ended before it was ready"
    raise AssertionError("not ready in time")


def _children(parent: int) -> dict[int, list[str]]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if int(stat[1]) == parent:
                found[int(folder.name)] = words
    return found
