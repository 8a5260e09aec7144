"""Beside `seer up`, commands need no `--connect`: they find the system that runs on this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SEER = (sys.executable, "-m", "seer.cli.main")
MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"
SOCKETS = ("trainers", "engines", "events", "event_snapshots", "estimates", "estimate_snapshots", "dgds")


class Machine:
    """A user's runtime folder, and what is run there."""

    def __init__(self, folder):
        self.folder, self.runtime, self.ups = folder, folder / "runtime", []
        self.runtime.mkdir(0o700)

    def up(self, name, *settings):
        """Run `seer up` with replay engines on sockets in a folder; return when it is ready."""
        folder = self.folder / name
        folder.mkdir()
        sets = [f"endpoints.{each}=ipc://{folder}/{each}" for each in SOCKETS]
        sets += [f"shared.model={MODEL}", "engine.backend=replay", "engine.replay.vocab_size=66", *settings]
        log = (folder / "log").open("wb")
        process = subprocess.Popen(
            [*SEER, "up", "--instances", "1", *(part for each in sets for part in ("--set", each))],
            stdout=log, stderr=log, env=self._environ,
        )  # fmt: skip
        self.ups.append(process)
        deadline = time.monotonic() + 120
        while "ready: trainers" not in (said := (folder / "log").read_text()):
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        return process

    def seer(self, *command):
        return subprocess.run(
            [*SEER, *command], capture_output=True, text=True, timeout=120, check=False, cwd=self.folder,
            env=self._environ,
        )  # fmt: skip

    @property
    def _environ(self):
        return os.environ | {"XDG_RUNTIME_DIR": str(self.runtime)}

    @property
    def files(self):
        return [path.read_text() for path in self.runtime.glob("*/*.json")]


@pytest.fixture
def machine():
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    made = Machine(folder)
    yield made
    for process in made.ups:
        process.kill()
        process.wait()
    shutil.rmtree(folder)


def test_commands_use_the_system_that_runs_here(machine):
    up = machine.up("a")
    endpoint = f"ipc://{machine.folder}/a/trainers"
    shown = machine.seer("status", "--json")
    assert shown.returncode == 0, shown.stderr
    buffer, *_ = json.loads(shown.stdout)["services"]
    assert buffer["endpoint"] == endpoint
    (machine.folder / "prompts.jsonl").write_text('{"id": "a", "prompt": "<bos> 12 10 5 > 17"}\n')
    rolled = machine.seer("rollout", "prompts.jsonl", "--out", "out.jsonl", "-n", "2", "--max-tokens", "20")
    assert rolled.returncode == 0, rolled.stderr
    assert f"uses the system at {endpoint}" in rolled.stderr
    (group,) = (json.loads(line) for line in (machine.folder / "out.jsonl").read_text().splitlines())
    assert [response["text"] != "" for response in group["responses"]] == [True, True]  # by its model
    drawn = machine.seer("report")
    assert drawn.returncode == 0, drawn.stderr
    assert "2 responses" in drawn.stderr
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0
    assert list(machine.runtime.iterdir()) == []


def test_of_two_systems_one_must_be_named_and_a_killed_one_does_not_count(machine):
    first, second = machine.up("a"), machine.up("b")
    for command in (["status"], ["rollout", "prompts.jsonl", "--out", "x.jsonl"], ["gateway"], ["report"]):
        asked = machine.seer(*command)
        assert asked.returncode == 2, asked.stderr
        assert f"process {first.pid}" in asked.stderr
        assert f"process {second.pid}" in asked.stderr
    first.kill()
    first.wait()
    shown = machine.seer("status")
    assert shown.returncode == 0, shown.stderr
    assert f"{machine.folder}/b/trainers" in shown.stdout
    assert len(machine.files) == 1  # the other's was removed


def test_no_key_is_in_the_file(machine):
    assert machine.seer("keys", "init", "keys").returncode == 0
    keys = {path: path.read_text().split()[-1] for path in (machine.folder / "keys").rglob("*.*")}
    assert keys
    own, admitted = f"{machine.folder}/keys/server.key", f"{machine.folder}/keys/public/peers"
    machine.up("a", f"security.key={own}", f"security.peers={admitted}")
    (file,) = machine.files
    assert not [path for path, key in keys.items() if key in file or str(path) in file]
