"""The parts of `make test` and `make test-all`: each runs, stops and goes on alone."""

import re
import subprocess
import sys
from pathlib import Path

import parts
import pytest

GOOD, BAD = (sys.executable, "-c", ""), (sys.executable, "-c", "raise SystemExit(1)")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[tuple[str, ...]]]:
    """Parts made up, a place for what passed, and files that `code` says are "1"."""
    breadth = {"good": [GOOD], "bad": [BAD, GOOD], "late": [GOOD]}
    monkeypatch.setattr(parts, "BREADTH", breadth)
    monkeypatch.setattr(parts, "DONE", tmp_path / "build" / "done.json")
    monkeypatch.setattr(parts, "code", lambda: "1")
    return breadth


def ended(*names: str, resume: bool = True) -> dict[str, str]:
    return {name: how for name, (how, _) in parts.run(list(names), resume=resume).items()}


def test_a_part_that_fails_keeps_no_other_from_running(made):
    assert ended("good", "bad", "late") == {"good": "passed", "bad": "FAILED", "late": "passed"}


def test_only_what_passed_with_these_files_is_left_out(made, monkeypatch):
    ended("good", "bad")
    assert ended("good", "bad", "late") == {"good": "passed before", "bad": "FAILED", "late": "passed"}
    assert ended("good", resume=False) == {"good": "passed"}
    made["bad"] = [GOOD]
    monkeypatch.setattr(parts, "code", lambda: "2")
    assert ended("good", "bad") == {"good": "passed", "bad": "passed"}


def test_the_exit_status_tells_of_any_failure(made, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parts", "--all", "--resume"])
    assert parts.main() == 1
    assert "bad             FAILED" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["parts", "good", "late"])
    assert parts.main() == 0
    monkeypatch.setattr(sys, "argv", ["parts", "nonsense"])
    with pytest.raises(SystemExit):
        parts.main()


def test_the_digest_is_of_what_git_does_not_ignore(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    (tmp_path / ".gitignore").write_text("*.log")
    seen = [parts.code()]
    for name, text in (("a.py", "1"), ("a.py", "2"), ("a.log", ""), ("README.md", ""), ("b.py", "2")):
        (tmp_path / name).write_text(text)
        seen.append(parts.code())
    empty, first, second, *ignored, last = seen
    assert len({empty, first, second, last}) == 4
    assert set(ignored) == {second}


def test_light_workers_import_no_vllm_and_what_does_runs_with_engines():
    imports = re.compile(r'^(pytest\.importorskip\("vllm"\)|from vllm|import vllm)', re.MULTILINE)
    elsewhere = {"e2e", "gateway_clients"}
    files = {file: file.read_text() for file in (parts.ROOT / "tests").glob("*/test_*.py")}
    found = [
        file for file, text in files.items() if imports.search(text) and file.parent.name not in elsewhere
    ]
    needs_triton = parts.ROOT / "tests/unit/test_cpu_kernels_triton.py"
    listed = {parts.ROOT / name for name in parts.IMPORT_VLLM}
    assert set(found) - {needs_triton} <= listed
    assert [file for file in listed if "pytestmark = pytest.mark.vllm\n" not in files[file]] == []
