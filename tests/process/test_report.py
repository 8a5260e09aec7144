"""`seer rollout --report-html`: written at the end, and when the run is told to stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

SLOW = ("--set", "engine.replay.step_seconds=0.1", "--chunk-size", "16", "--max-tokens", "200")


def command(folder: Path, *options: str) -> list[str]:
    lines = [json.dumps({"id": f"p{i}", "prompt_token_ids": [i + 1]}) for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    files = ["--out", str(folder / "out.jsonl"), "--report-html", str(folder / "r.html")]
    seer = [sys.executable, "-m", "seer.cli.main", "rollout", str(folder / "prompts.jsonl")]
    return [*seer, *files, "--backend", "replay", "-n", "4", *options]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for temporary files that must end up empty."""
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    return tmp_path / "t"


def test_a_rollout_draws_itself(tmp_path: Path, temporary: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        command(tmp_path, "--report", str(report)), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())
    texts = [element.text for element in ET.parse(tmp_path / "r.html").iter() if element.text]
    for name, value in (("responses", 24), ("tokens", figures["tokens"]), ("chunks", figures["chunks"])):
        assert texts[texts.index(name) - 1] == f"{value:,}"
    assert list(temporary.iterdir()) == []


def test_its_log_is_simulated_again_and_ends_when_it_did(tmp_path: Path, temporary: Path) -> None:
    log, found = tmp_path / "log", tmp_path / "found.json"
    timed = ["engine.replay.step_seconds=0.03", "engine.replay.row_seconds=0.003", f"buffer.log={log}"]
    settings = [part for each in timed for part in ("--set", each)]
    options = ["--chunk-size", "32", "--max-tokens", "400", "--max-num-seqs", "6", *settings]
    subprocess.run(command(tmp_path, *options), check=True, timeout=120)
    seer = [sys.executable, "-m", "seer.cli.main"]
    again = [*seer, "sim", "--from-log", str(log), "--policies", "static", "--json", str(found)]
    subprocess.run(again, check=True, timeout=120)
    [study] = json.loads(found.read_text())["workloads"]
    times = {each["label"]: each["summary"]["total"] for each in study["policies"]}
    # Real time, on a machine that may do other work: tests/cluster/test_sim_from_log.py says how near it is.
    assert times[study["real"]["label"]] == pytest.approx(study["real"]["total"], rel=0.5)
    assert times.keys() == {"seer", "static"}
    drawn = [*seer, "report", str(log), "--out", str(tmp_path / "again.html")]
    told = subprocess.run(drawn, check=True, capture_output=True, text=True, timeout=120).stderr
    assert f"simulated: seer {times['seer']:.1f} s; the best other policy, " in told
    assert list(temporary.iterdir()) == []


def test_one_that_is_told_to_stop_draws_what_it_did(tmp_path: Path, temporary: Path) -> None:
    with subprocess.Popen(command(tmp_path, *SLOW), stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line.rstrip().endswith("running"):  # the first plain line of progress
                break
        run.send_signal(signal.SIGTERM)
        said = run.stderr.read()
        assert run.wait(60) == 143, said
    texts = [element.text for element in ET.parse(tmp_path / "r.html").iter() if element.text]
    assert any(text.endswith("running when the log ended") or " of 24" in text for text in texts)
    assert not (tmp_path / "out.jsonl").exists()
    assert list(temporary.iterdir()) == []
