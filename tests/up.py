"""`seer up` as a process of its own, on sockets of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENDPOINTS = ("trainers", "engines", "events", "event_snapshots", "estimates", "estimate_snapshots", "dgds")


class Up:
    """`settings` are further `--set`s. The engines share one core, as others need the rest."""

    def __init__(self, model: Path, instances: int, *settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
        self.endpoint = f"ipc://{self.folder}/trainers"
        command = [sys.executable, "-m", "seer.cli.main", "up", "--model", str(model)]
        command += ["--instances", str(instances)]
        given = [f"endpoints.{name}=ipc://{self.folder}/{name}" for name in ENDPOINTS]
        given += [f"engine.cpu_cores={min(os.sched_getaffinity(0))}", *settings]
        command += [part for setting in given for part in ("--set", setting)]
        self.log = self.folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)

    def wait(self) -> None:
        deadline = time.monotonic() + 200
        while "ready: trainers" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        shutil.rmtree(self.folder)
