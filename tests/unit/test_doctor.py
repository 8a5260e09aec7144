"""`seer doctor`: checks run one after another, and one that crashes or hangs is a line, not the end."""

import ast
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from living import alive, children

from seer.cli.main import main
from seer.common.config import load
from seer.doctor import checkup, output
from seer.doctor.report_lines import MAX_TEXT, Line, Report, parse
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

def garbage(report):
    report._to.write("no line of a check\\n")

def endless(report):
    while True:
        report._to.write("x" * 65536)

def leaves(report):
    os._exit(0)

def engine(report):
    raise ModuleNotFoundError("No module named 'torch'", name="torch")

def process(report):
    report.note("process", pid=os.getpid())
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


def test_a_check_of_engines_where_none_are_installed_names_what_is_missing_and_the_extra(made_up):
    lines = list(run_checks([made_up("engine"), made_up("good")], 120))
    (failed,) = [line for line in lines if line.status == "fail"]
    assert failed.text == "not checked: torch is not installed, which engines need"
    assert "seer-rollout[cpu]" in failed.fix
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


@pytest.mark.parametrize(
    ("name", "says"),
    [("garbage", "no line of a check"), ("endless", "no line of a check"), ("leaves", "exit code 0")],
)
def test_a_check_that_writes_garbage_or_ends_unseen_fails(made_up, name, says):
    lines = list(run_checks([made_up(name), made_up("good")], 120))
    (failed,) = [line for line in lines if line.status == "fail"]
    assert (failed.check, says in failed.text) == (name, True)
    assert ("good", "pass") in statuses(lines)


def shared(made_up, *names, **options):
    return [replace(made_up(name), process="one", **options) for name in names]


def test_neighbours_share_a_process_until_one_breaks_it(made_up):
    checks = shared(made_up, "process", "killed", "good")
    lines = list(run_checks([replace(checks[0], name="first"), *checks, made_up("bad")], 120))
    assert statuses(lines) == [
        ("first", "note"), ("process", "note"), ("killed", "fail"), ("good", "note"), ("good", "pass"),
        ("bad", "fail"),
    ]  # fmt: skip
    first, second = (line.figures["pid"] for line in lines if line.text == "process")
    assert first == second
    assert [line.check for line in lines if line.text == "ended"] == [
        "first",
        "process",
        "killed",
        "good",
        "bad",
    ]


def test_others_have_processes_of_their_own(made_up):
    alone, also = (replace(made_up("process"), name=name) for name in ("alone", "also"))
    one, other = (replace(made_up("process"), name=name, process=name) for name in ("one", "other"))
    lines = list(run_checks([alone, also, one, other], 120))
    pids = [line.figures["pid"] for line in lines if line.text == "process"]
    assert len(set(pids)) == len(pids) == 4


def test_each_check_of_a_process_has_its_own_deadline(made_up):
    (hangs, good) = shared(made_up, "hangs", "good")
    lines = list(run_checks([replace(hangs, seconds=1.0, setup=1.0), good], 120))
    (failed,) = [line for line in lines if line.status == "fail"]
    assert "did not end within 2 s" in failed.text  # the first one has what its process takes to begin
    assert ("good", "pass") in statuses(lines)


def test_what_needs_a_failed_check_fails_by_name_and_is_not_begun(made_up):
    for first in ("bad", "killed"):
        (broken, good) = shared(made_up, first, "good")
        lines = list(
            run_checks([broken, replace(good, needs=first), replace(made_up("process"), needs=first)], 120)
        )
        assert statuses(lines) == [(first, "fail"), ("good", "fail"), ("process", "fail")]
        assert first in lines[-1].text
        assert f"mend {first}" in lines[-1].fix


@pytest.mark.parametrize(
    ("optional", "status", "fix"), [(True, "skip", "--only good"), (False, "fail", "--seconds")]
)
def test_a_check_that_no_time_is_left_for_is_said_with_a_fix(made_up, optional, status, fix):
    lines = list(run_checks([made_up("hangs"), replace(made_up("good"), optional=optional)], 2.0))
    assert statuses(lines)[-1] == ("good", status)
    assert fix in lines[-1].fix


def test_what_checks_print_is_kept(made_up, tmp_path):
    list(run_checks([made_up("raises")], 120, logs=tmp_path))
    assert "ValueError: out of order" in (tmp_path / "raises.log").read_text()


def test_a_missing_package_is_named(tmp_path):
    lines = list(run_checks([Check("absent", "no_such_package.checks:check", 60)], 60))
    assert [line.fix for line in lines if line.status == "fail"] == ["pip install no_such_package"]


def test_the_json_is_whole_after_every_line(made_up, tmp_path, monkeypatch):
    seen = []
    file = tmp_path / "lines.json"
    write = output.write
    monkeypatch.setattr(
        output, "write", lambda *given: (write(*given), seen.append(json.loads(file.read_text())))
    )
    lines = output.show(run_checks([made_up("good"), made_up("bad")], 120), file)
    assert [len(written["lines"]) for written in seen] == [1, 2, 3, 4, 5]
    assert output.counted(lines) == "1 lines pass, 1 fail"


def test_a_line_is_read_as_it_was_written(tmp_path):
    with (tmp_path / "lines").open("w") as to:
        Report("one", to).expect(False, "x" * (MAX_TEXT - 3) + " secret", "line\nbreaks", ratio=float("inf"))
    (text,) = (tmp_path / "lines").read_text().splitlines()
    assert parse(text) == Line("one", "fail", "x" * (MAX_TEXT - 3), "line\nbreaks", {"ratio": "inf"})


def test_what_cannot_be_checked_is_refused_by_name():
    run = CliRunner()
    for options, says in (
        (["--only", "bits,nothing"], "'nothing' is no check; there are versions, imports"),
        (["--json", "/no/such/folder/file"], "give a file in an existing folder"),
        (["--set", "engine.nothing=1"], "unknown key engine.nothing"),
    ):
        refused = run.invoke(main, ["doctor", *options])
        assert (refused.exit_code, says in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_doctor_that_ends_ends_its_check(number, status):
    doctor = subprocess.Popen(
        [sys.executable, "-m", "seer.cli.main", "doctor", "--only", "imports"], stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while not (of_check := children(doctor.pid)):
        assert time.monotonic() < end
        time.sleep(0.02)
    doctor.send_signal(number)
    assert doctor.wait(60) == status
    while any(map(alive, of_check)):  # the kernel ends it when it comes to that
        assert time.monotonic() < end
        time.sleep(0.02)


def test_every_check_has_a_name_of_its_own_and_a_function():
    names = [check.name for check in checkup.CHECKS]
    assert len(set(names)) == len(names)
    assert {check.needs for check in checkup.CHECKS} <= {*names, ""}
    for check in checkup.CHECKS:
        module, _, function = check.function.partition(":")
        tree = ast.parse((Path(checkup.__file__).parent / f"{module.rpartition('.')[2]}.py").read_text())
        assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_without_a_gpu_only_what_applies_is_run(monkeypatch):
    monkeypatch.setattr(checkup, "visible_devices", list)
    without = [check.name for check in checkup._applying()]
    assert ("bits" in without, "repeats" in without) == (True, False)
    monkeypatch.setattr(checkup, "visible_devices", lambda: ["a GPU"])
    assert [check.name for check in checkup._applying()] == [check.name for check in checkup.CHECKS]


def test_without_a_model_engines_fail_with_a_fix_and_the_machine_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkup, "SHIPPED_MODEL", tmp_path / "none")
    file = tmp_path / "lines.json"
    assert checkup.run(load(None, {}), ("clock", "start", "sleep"), file, None, 100) == 1
    report = json.loads(file.read_text())
    assert (report["model"], report["shipped_model"], report["verdict"]["state"]) == ("", False, "not ready")
    found = {(line["check"], line["status"]): line for line in report["lines"]}
    assert found["clock", "pass"]
    assert "--model" in found["start", "fail"]["fix"]
    assert "start" in found["sleep", "fail"]["text"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("verdict: not ready: start: no model")


def test_the_runner_needs_the_standard_library_alone():
    code = "import sys, seer.doctor.output; print([m for m in ('torch', 'numpy', 'msgspec', 'click') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
