"""Every requirement that anything here installs is pinned, with hashes that pip must find."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
LOCKS = sorted((REPO / "requirements").glob("*.lock"))
UNHASHED = "torch-cpu"
"""The package index has no builds of torch for CPUs."""


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_pins_each_release_by_its_files(lock):
    pins = re.split(r"\n(?=[a-zA-Z0-9])", "\n" + lock.read_text())[1:]
    assert pins
    for pin in pins:
        name, version, rest = re.fullmatch(r"([\w.-]+)==([\w.+]+)(.*)", pin.strip(), re.DOTALL).groups()
        if lock.stem == UNHASHED:
            assert (name, rest) == ("torch", "")
            assert version.endswith("+cpu")
        else:
            assert re.search(r"\\\n    --hash=sha256:[0-9a-f]{64}\b", rest), pin


@pytest.mark.parametrize("file", ["Makefile", "compose/Dockerfile", "tests/deploy/run_systemd.py"])
def test_what_installs_a_lock_requires_its_hashes(file):
    text = re.sub(r"\\\n\s*", " ", (REPO / file).read_text())
    installs = [line for line in text.splitlines() if re.search(r"pip\b.*install\b.*(lock\b|LOCKS)", line)]
    commands = [part for line in installs for part in re.split(r"&&|;", line) if "install" in part]
    for command in commands:
        if re.search(r"\.lock|LOCKS", command) and f"{UNHASHED}.lock" not in command:
            assert "--require-hashes" in command, command
    assert commands or file.endswith(".py")
