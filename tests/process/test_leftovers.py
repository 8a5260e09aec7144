"""A system that is killed leaves nothing behind that the next one to start does not remove."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from living import living, wait_for

from seer.client import RolloutClient
from seer.common.errors import WeightsRefused

SEER = (sys.executable, "-m", "seer.cli.main")
REPLAY = ("--set", "engine.backend=replay")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for temporary files, `t`, and for all else; short, for its sockets."""
    path = Path(tempfile.mkdtemp(prefix="l", dir="/tmp"))
    (path / "t").mkdir()
    (path / "prompts.jsonl").write_text(json.dumps({"id": "a", "prompt_token_ids": [1, 2]}))
    monkeypatch.setenv("TMPDIR", str(path / "t"))
    yield path
    shutil.rmtree(path)


def command(folder: Path, kind: str) -> list[str]:
    if kind == "rollout":
        slow = ("--set", "engine.replay.step_seconds=1", "-n", "1", "--max-tokens", "500", *REPLAY)
        out = tempfile.mktemp(dir=folder)  # a new one each time
        return [*SEER, "rollout", str(folder / "prompts.jsonl"), "--out", out, *slow]
    names = ("trainers", "engines", "events", "event_snapshots", "estimates", "estimate_snapshots", "dgds")
    ports = [part for name in names for part in ("--set", f"endpoints.{name}=ipc://{folder}/{name}")]
    return [*SEER, "up", *ports, *REPLAY]


def killed(folder: Path, kind: str) -> list[Path]:
    """Run a system, kill its launcher in the middle, and return what it left."""
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command(folder, kind), stdout=file, stderr=file)
    try:
        wait_for(lambda: "ready" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        if kind == "up":
            asyncio.run(_stream_weights(folder))
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not living(folder))
    log.unlink()
    return list((folder / "t").iterdir())


async def _stream_weights(folder: Path) -> None:
    async with RolloutClient(f"ipc://{folder}/trainers") as client, asyncio.timeout(120):
        while True:
            with contextlib.suppress(WeightsRefused):  # its engine has not registered yet
                await client.update_weights(1, {"w": np.zeros(2**20, np.uint8)})
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", ["rollout", "up"])
def test_nothing_of_a_killed_system_is_left_once_another_has_started(folder: Path, kind: str) -> None:
    left = killed(folder, kind)
    assert left
    inside = [path for top in left for path in top.rglob("*")]
    if kind == "up":  # its buffer's copy of the weights
        assert any(path.is_file() and path.stat().st_size >= 2**20 for path in inside)
    again = killed(folder, kind)
    assert not set(left) & set(again)
    subprocess.run(
        [*SEER, "rollout", folder / "prompts.jsonl", "--out", folder / "o.jsonl", *REPLAY,
         "-n", "1", "--max-tokens", "500"],
        capture_output=True, timeout=120, check=True, cwd=folder,
    )  # fmt: skip
    assert list((folder / "t").iterdir()) == []


def test_a_service_of_its_own_is_swept_by_the_next_one(folder: Path) -> None:
    """As under systemd or by hand: no launcher is there to tidy up."""

    def start() -> tuple[subprocess.Popen[bytes], Path]:
        before = set((folder / "t").iterdir())
        ready, theirs = os.pipe()
        dgds = ("dgds", "--set", f"endpoints.dgds=ipc://{folder}/dgds", "--ready-fd", str(theirs))
        process = subprocess.Popen([*SEER, *dgds], pass_fds=[theirs], stderr=subprocess.DEVNULL)
        os.close(theirs)
        assert b"endpoints" in os.read(ready, 4096)
        os.close(ready)
        (mine,) = set((folder / "t").iterdir()) - before
        return process, mine

    first, left = start()
    first.kill()
    first.wait()
    assert left.exists()
    second, _ = start()
    wait_for(lambda: not left.exists())
    second.terminate()
    assert second.wait(timeout=60) == 0
    assert list((folder / "t").iterdir()) == []
