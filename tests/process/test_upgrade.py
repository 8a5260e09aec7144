"""A system of the release before, upgraded process by process while one of its trainers has a rollout under way.

The release before is built from the commit that CHANGELOG.md names for it. One of another major of the protocol is not
upgraded process by process: then there is nothing to test.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from process.fuzz_system import OWNERS, _free_ports

import seer._native
from seer.common.wire.version import MAJOR

REPO = Path(__file__).resolve().parents[2]
NOW = [sys.executable, "-m", "seer.cli.main"]
ENGINES = ("e0", "e1")
PROMPTS, N, MAX_TOKENS = 24, 4, 400
DEADLINE = 120


def git(*words):
    done = subprocess.run(["git", "-C", REPO, *words], capture_output=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else None


def release_before():
    """The newest release that CHANGELOG.md has, and its commit."""
    found = re.search(
        r"^## \[(\d+\.\d+\.\d+)\].*?\bcommit ([0-9a-f]{7,40})\b",
        (REPO / "CHANGELOG.md").read_text(), re.MULTILINE | re.DOTALL,
    )  # fmt: skip
    return found[1], found[2]


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The command `seer` of the release before: its Python and C++, and the packages of this environment."""
    version, commit = release_before()
    folder = tmp_path_factory.mktemp("before")
    packed = git("archive", "--format=tar", commit)
    if packed is None:
        pytest.skip(f"this checkout lacks commit {commit}: it is no clone, or a shallow one")
    spoke = git("show", f"{commit}:common/wire/version.py").decode()
    if f"MAJOR = {MAJOR}\n" not in spoke:
        pytest.skip(f"release {version} speaks another major of the protocol than {MAJOR}")
    tree, packages = folder / "tree", folder / "packages"
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", tree], input=packed, check=True, timeout=60)
    shutil.copytree(tree / "src", packages)  # follows the links to the other roots
    native = Path(seer._native.__file__)
    if git("diff", "--quiet", commit, "--", "native") is None:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, tree],
            check=True, timeout=300,
        )  # fmt: skip
        (wheel,) = folder.glob("*.whl")
        subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, folder / "unpacked"], check=True)
        native = next((folder / "unpacked" / "seer").glob("_native*"))
    shutil.copy(native, packages / "seer")
    # A path file of another environment does not bring in this one's own: its editable Seer stays out.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=60)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "before.pth").write_text(f"{packages}\n{sysconfig.get_path('purelib')}\n")
    command = [folder / "venv" / "bin" / "python", "-m", "seer.cli.main"]
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split()[-1] == version
    return [str(word) for word in command]


def toml(table):
    for section, settings in table.items():
        yield f"[{section}]"
        yield from (f"{name} = {json.dumps(value)}" for name, value in settings.items())


class System:
    """Processes by name, each of the release that its command is of."""

    def __init__(self, folder):
        self.folder = folder
        at = dict(zip(OWNERS, (f"tcp://127.0.0.1:{port}" for port in _free_ports(len(OWNERS))), strict=True))
        self.endpoint = at["trainers"]
        self.table = {
            "endpoints": at,
            "buffer": {"chunk_size": 32, "log": str(folder / "log"), "keep_chunks": True},
            "engine": {"backend": "replay", "max_num_seqs": 16},
        }
        self.replay = {"mean_tokens": 250, "step_seconds": 0.02}
        self.processes = {}

    def start(self, command, name):
        """Start a process, and wait until it serves."""
        service = "engine" if name in ENGINES else name
        engine = self.table["engine"] | {"name": name if name in ENGINES else ""}
        table = self.table | {"engine": engine}
        if command == NOW:
            table["engine.replay"] = self.replay
        else:
            engine.update({f"replay_{key}": value for key, value in self.replay.items()})
        file = self.folder / f"{name}.toml"
        file.write_text("\n".join(toml(table)))  # what operators write: no setting that the release lacks
        ready, write = os.pipe()
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*command, service, "--config", file, "--ready-fd", str(write)],
                stderr=log, pass_fds=(write,),
            )  # fmt: skip
        os.close(write)
        with os.fdopen(ready) as pipe:
            assert "endpoints" in pipe.readline(), self.log(name)

    def upgrade(self, command, name):
        """Have a process drain and start it again; the buffer, which would wait for its rollouts, is killed."""
        old = self.processes[name]
        old.send_signal(signal.SIGKILL if name == "buffer" else signal.SIGTERM)
        code = old.wait(DEADLINE)
        assert name == "buffer" or code == 0, self.log(name)
        self.start(command, name)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def status(self, command):
        words = [*command, "status", "--connect", self.endpoint, "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return json.loads(done.stdout)["buffer"]

    def until(self, command, holds):
        deadline = time.monotonic() + DEADLINE
        while not holds(self.status(command)):
            assert time.monotonic() < deadline, self.status(command)

    def rollout(self, command, out):
        """A trainer of this release."""
        words = ["--out", str(out), "-n", str(N), "--max-tokens", str(MAX_TOKENS), "--connect", self.endpoint]
        return subprocess.Popen(
            [*command, "rollout", self.folder / "prompts.jsonl", *words], stderr=subprocess.PIPE
        )

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


def tokens(out):
    groups = [json.loads(line) for line in out.read_text().splitlines()]
    return {group["id"]: [each["token_ids"] for each in group["responses"]] for group in groups}


def test_a_system_is_upgraded_under_a_rollout_that_loses_nothing(before, tmp_path):
    lines = [json.dumps({"id": str(each), "prompt_token_ids": [1, 2, 3 + each]}) for each in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    system = System(tmp_path)
    try:
        for name in ("buffer", "context", "dgds", *ENGINES):
            system.start(before, name)
        trainer = system.rollout(before, tmp_path / "before.jsonl")
        system.until(NOW, lambda status: status["counters"].get("chunks", 0) > 20)
        for name in (*ENGINES, "context", "dgds", "buffer"):
            system.upgrade(NOW, name)
            assert trainer.poll() is None, f"the rollout ended before {name} was upgraded"
            if name in ENGINES:
                system.until(before, lambda status: len(status["instances"]) == len(ENGINES))
        _, said = trainer.communicate(timeout=DEADLINE)
        assert trainer.returncode == 0, said
        system.replay["step_seconds"] = 0.001
        for name in ENGINES:
            system.upgrade(NOW, name)
        again = system.rollout(NOW, tmp_path / "now.jsonl")
        _, said = again.communicate(timeout=DEADLINE)
        assert again.returncode == 0, said
        expected = tokens(tmp_path / "now.jsonl")
        assert len(expected) == PROMPTS
        assert all(len(responses) == N for responses in expected.values())
        assert tokens(tmp_path / "before.jsonl") == expected
    finally:
        system.close()
