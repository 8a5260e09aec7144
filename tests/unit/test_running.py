"""Commands find the systems that this user runs on this machine, and nothing else."""

import json
import os
import subprocess
import sys

import pytest

from seer.common.process.running import Running, announce, runtime_folder, systems, the_system

_HOLDER = """
import os, sys
from seer.common.process.running import Running, announce
held = announce(Running(pid=os.getpid(), endpoint="ipc:///killed"))
print(held.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    own = tmp_path / "runtime"
    own.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return own


def system(number, **more):
    return Running(pid=number, endpoint=f"tcp://127.0.0.1:{number}", **more)


def test_a_system_is_found_as_long_as_it_is_announced(folder):
    assert systems() == []
    assert the_system("") is None
    held = announce(system(7, model="/m", log="/l"))
    assert systems() == [system(7, model="/m", log="/l")]
    assert [path.stat().st_mode & 0o077 for path in folder.iterdir()] == [0]
    held.close()
    assert (systems(), list(folder.iterdir())) == ([], [])


def test_what_a_killed_system_left_is_not_shown_and_removed_though_its_number_is_used_again(folder):
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        assert [each.pid for each in systems()] == [process.pid]
        process.kill()
    (left,) = folder.iterdir()
    (left / "where.json").write_text(json.dumps({"pid": os.getpid(), "endpoint": "ipc:///killed"}))
    assert (systems(), list(folder.iterdir())) == ([], [])


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"{", b"[" * 10_000, b"{}", b'{"pid": "x", "endpoint": 1}']
)
def test_a_file_that_is_none_of_ours_is_no_system(folder, content):
    with announce(system(1)) as held, announce(system(2)) as other:
        (held.path / "where.json").write_bytes(content)
        (other.path / "where.json").write_text('{"pid": 2, "endpoint": "tcp://127.0.0.1:2", "later": [1]}')
        assert systems() == [system(2)]


def test_a_system_that_stays_goes_before_those_of_single_commands():
    with announce(system(1)):
        assert the_system("") == system(1)
        assert the_system("", stays=True) is None  # it would end with its command
        with announce(system(2)), announce(system(3, stays=True)):
            assert the_system("") == the_system("", stays=True) == system(3, stays=True)


@pytest.mark.parametrize("given", [None, "", "runtime", "/nowhere", "open", "link"])
def test_without_a_private_runtime_folder_another_is_made(tmp_path, folder, monkeypatch, given):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    if given is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / given) if given in ("open", "link") else given)
    assert runtime_folder() == tmp_path / f"seer-{os.geteuid()}"
    assert runtime_folder().stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_user_could_have_made_is_not_used(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    theirs = tmp_path / f"seer-{os.geteuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    with pytest.raises(PermissionError, match="remove it"):
        announce(system(1))
    assert (systems(), list(theirs.iterdir())) == ([], [])
    theirs.rmdir()
    theirs.symlink_to(tmp_path)
    assert systems() == []
