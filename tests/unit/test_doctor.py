"""`seer doctor --kernels`: it runs on a CPU, and a check that crashes or hangs is a line, not the end."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from seer.cli.main import main
from seer.doctor import kernels
from seer.doctor.lines import MAX_TEXT, Line, Report, parse
from seer.doctor.runner import Check, run_checks

CHECKS = """
import os, subprocess, sys, time

def good(report):
    report.note("figures", us=1.5)
    report.expect(True, "it holds", "no fix needed")

def bad(report):
    report.expect(False, "it does not hold", "mend it", different=3)

def raises(report):
    report.note("begun")
    raise ValueError("out of order")

def killed(report):
    os.kill(os.getpid(), 9)

def hangs(report):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    report.note("begun", pid=child.pid)
    time.sleep(600)

def talks(report):
    while True:
        report.note("again")
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Checks of a module that child processes find."""
    (tmp_path / "made_up_checks.py").write_text(CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name, seconds=60.0: Check(name, f"made_up_checks:{name}", seconds)


def statuses(lines):
    return [(line.check, line.status) for line in lines if line.text != "ended"]


def test_lines_come_in_the_order_of_the_checks(made_up):
    lines = list(run_checks([made_up("good"), made_up("bad")], 120))
    assert statuses(lines) == [("good", "note"), ("good", "pass"), ("bad", "fail")]
    (figures, holds, ended, fails, _) = lines
    assert figures.figures == {"us": 1.5}
    assert (holds.fix, fails.fix, fails.figures) == ("", "mend it", {"different": 3})
    assert ended.figures["seconds"] >= 0


@pytest.mark.parametrize(("name", "says"), [("raises", "exit code 1"), ("killed", "signal 9")])
def test_a_check_that_crashes_fails_with_a_fix_and_the_next_one_runs(made_up, name, says):
    lines = list(run_checks([made_up(name), made_up("good")], 120))
    (failed,) = [line for line in lines if line.status == "fail"]
    assert failed.check == name
    assert says in failed.text
    assert f"--only {name}" in failed.fix
    assert ("ValueError: out of order" in failed.fix) == (name == "raises")
    assert ("good", "pass") in statuses(lines)


@pytest.mark.parametrize("name", ["hangs", "talks"])
def test_a_check_that_hangs_is_killed_with_all_it_started(made_up, name):
    lines = list(run_checks([made_up(name, 3.0), made_up("good")], 120))
    (failed,) = [line for line in lines if line.status == "fail"]
    assert "did not end within 3 s" in failed.text
    assert failed.fix
    assert ("good", "pass") in statuses(lines)
    for line in lines:
        if "pid" in line.figures:
            end = time.monotonic() + 60  # the kernel ends it when it comes to that
            while alive(line.figures["pid"]) and time.monotonic() < end:
                time.sleep(0.05)
            assert not alive(line.figures["pid"])


def alive(pid):
    """Whether it runs; a zombie that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_checks_that_no_time_is_left_for_fail_by_name(made_up):
    lines = list(run_checks([made_up("hangs"), made_up("good")], 2.0))
    assert statuses(lines)[-1] == ("good", "fail")
    assert "--seconds" in lines[-1].fix


def test_a_missing_package_is_named(tmp_path):
    lines = list(run_checks([Check("absent", "no_such_package.checks:check", 60)], 60))
    assert [line.fix for line in lines if line.status == "fail"] == ["pip install no_such_package"]


def test_the_json_is_whole_after_every_line(made_up, tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(kernels, "CHECKS", (made_up("good"), made_up("bad")))
    file = tmp_path / "lines.json"
    write = kernels._write
    monkeypatch.setattr(
        kernels, "_write", lambda *given: (write(*given), seen.append(json.loads(file.read_text())))
    )
    assert kernels.run((), file, 120) == 1
    assert [len(written["lines"]) for written in seen] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out.splitlines()[-1] == "1 lines pass, 1 fail"


def test_a_line_is_read_as_it_was_written(tmp_path):
    with (tmp_path / "lines").open("w") as to:
        Report("one", to).expect(False, "x" * (MAX_TEXT + 5), "line\nbreaks", ratio=float("inf"))
    (text,) = (tmp_path / "lines").read_text().splitlines()
    assert parse(text) == Line("one", "fail", "x" * MAX_TEXT, "line\nbreaks", {"ratio": "inf"})


def test_what_cannot_be_checked_is_refused_by_name():
    run = CliRunner()
    unknown = run.invoke(main, ["doctor", "--kernels", "--only", "bits,nothing"])
    assert (unknown.exit_code, "'nothing' is no check; there are machine, bits" in unknown.stderr) == (
        2,
        True,
    )
    nothing = run.invoke(main, ["doctor"])
    assert (nothing.exit_code, "--kernels" in nothing.stderr) == (2, True)


@pytest.mark.vllm
def test_all_checks_run_on_a_cpu(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(
        kernels, "CHECKS", tuple(check for check in kernels.CHECKS if check.name not in ("speed", "bits"))
    )
    file = tmp_path / "lines.json"
    assert kernels.run((), file, 300) == 0, capsys.readouterr().out
    found = {(line["check"], line["status"]) for line in json.loads(file.read_text())["lines"]}
    assert ("repeats", "pass") in found
    for name in (
        "compiled",
        "penalties",
        "steps",
        "slabs",
        "streams",
        "graph",
        "copies",
        "gathers",
        "overlap",
        "ipc",
    ):
        assert (name, "skip") in found


def test_the_runner_needs_the_standard_library_alone():
    code = "import sys, seer.doctor.kernels; print([m for m in ('torch', 'numpy', 'msgspec', 'click') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
