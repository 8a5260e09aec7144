"""What killed processes leave behind is swept, and nothing else ever is."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from seer.common.process import scratch
from seer.common.process.scratch import Scratch, private_temporary_folder, sweep

_HOLDER = """
import sys
from seer.common.process.scratch import Scratch
held = Scratch("run", sys.argv[1])
(held.path / "weights").mkdir()
(held.path / "weights" / "data").write_text("x")
print(held.path, flush=True)
sys.stdin.read()
"""


def holder(parent):
    """A process that holds a folder until it is killed; returns both."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def kill(process):
    process.kill()
    process.communicate()


def left_behind(parent, kind="run"):
    """A marked folder that nobody holds."""
    made = Scratch(kind, parent)
    (made.path / "deep").mkdir()
    (made.path / "deep" / "file").write_text("x")
    os.close(made._mark)
    return made.path


def tree(path):
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


def test_a_folder_is_private_and_gone_in_the_end(tmp_path):
    with Scratch("run", tmp_path) as made:
        assert made.path.stat().st_mode & 0o777 == 0o700
        (made.path / "sub").mkdir()
        (made.path / "link").symlink_to("sub")
    assert tree(tmp_path) == []


def test_only_what_no_living_process_owns_is_swept(tmp_path):
    (living, theirs), (killed, left) = holder(tmp_path), holder(tmp_path)
    try:
        assert sweep(tmp_path) == []
        kill(killed)
        assert sweep(tmp_path) == [left]
        assert not left.exists()
        assert (theirs / "weights" / "data").exists()
    finally:
        kill(living)
        kill(killed)
    assert sweep(tmp_path) == [theirs]


def test_nothing_else_is_touched(tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    outside.mkdir()
    parent = tmp_path / "t"
    parent.mkdir()
    (parent / "seer-run-abcdefgh").mkdir()  # our name, no mark: a user's, or one that is being made
    (parent / "seer-run-abcdefgi").mkdir()
    (parent / "seer-run-abcdefgi" / scratch._MARK).symlink_to(outside / "mark")
    (parent / "seer-run-abcdefgj").mkdir()
    (parent / "seer-run-abcdefgj" / scratch._MARK).mkdir()
    (parent / "seer-run-abcdefgk").mkdir()
    os.mkfifo(parent / "seer-run-abcdefgk" / scratch._MARK)  # must not hang either
    (parent / "seer-run-abcdefgl").write_text("a file")
    (parent / "seer-run-abcdefgm").symlink_to(left_behind(outside))  # a link to one of ours elsewhere
    left_behind(outside).rename(parent / "seer-mine")  # a mark, another name
    left_behind(outside).rename(parent / "seer-run-abcdefgn.bak")
    left_behind(outside).rename(outside / "seer-run-abcdefgo")
    (outside / "mark").write_text("")
    before = tree(tmp_path)
    assert sweep(parent) == []
    assert tree(tmp_path) == before
    theirs = left_behind(parent)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # another user's
    assert sweep(parent) == []
    assert theirs.exists()


def test_links_in_a_folder_are_not_followed(tmp_path):
    outside, parent = tmp_path / "outside", tmp_path / "t"
    outside.mkdir()
    parent.mkdir()
    (outside / "file").write_text("x")
    left = left_behind(parent)
    (left / "link").symlink_to(outside)
    (left / "deep" / "link").symlink_to(outside)
    assert sweep(parent) == [left]
    assert (outside / "file").read_text() == "x"


@pytest.mark.parametrize("step", ["open", "write"])
def test_a_folder_that_is_just_being_made_is_not_swept(tmp_path, monkeypatch, step):
    real, swept = getattr(os, step), []

    def act(*args, **options):
        monkeypatch.undo()
        done = real(*args, **options)
        swept.extend(sweep(tmp_path))
        return done

    monkeypatch.setattr(os, step, act)
    with Scratch("run", tmp_path) as made:
        swept += sweep(tmp_path)
        assert (made.path / scratch._MARK).exists()
    assert swept == []


def test_many_sweepers_and_makers_at_once(tmp_path):
    """All that is left behind goes, once; nothing that is held does."""
    left = {left_behind(tmp_path) for _ in range(40)}
    gone, lost = [], []

    def sweeper():
        for _ in range(5):
            gone.extend(sweep(tmp_path))

    def maker():
        for _ in range(40):
            with Scratch("proc", tmp_path) as made:
                (made.path / "file").touch()
                if not (made.path / "file").exists():
                    lost.append(made.path)

    threads = [threading.Thread(target=each) for each in (sweeper, maker, sweeper, maker, sweeper)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
    assert set(gone) == left
    assert len(gone) == len(left)
    assert tree(tmp_path) == []


def test_a_sweep_that_is_cut_off_goes_on_at_the_next(tmp_path, monkeypatch):
    left = left_behind(tmp_path)
    (left / "other").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(scratch.shutil, "rmtree", _raise)
        with pytest.raises(KeyboardInterrupt):
            sweep(tmp_path)
    assert left.exists()
    assert sweep(tmp_path) == [left]


def _raise(*args, **options):
    raise KeyboardInterrupt


def test_what_is_kept_is_the_users(tmp_path):
    made = Scratch("run", tmp_path)
    (made.path / "buffer.log").write_text("x")
    made.keep()
    assert sweep(tmp_path) == []
    assert tree(tmp_path) == [made.path.name, f"{made.path.name}/buffer.log"]


def test_a_service_keeps_to_its_own_folder_and_children_inherit_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    left = left_behind(tmp_path)
    with private_temporary_folder():
        mine = Path(tempfile.mkdtemp(prefix="x"))
        child = [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"]
        made = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
        assert mine.parent == Path(made).parent
        assert mine.parent.parent == tmp_path
        for thread in threading.enumerate():
            if thread.name == "seer-sweep":
                thread.join()
        assert not left.exists()
    assert tree(tmp_path) == []
    assert os.environ["TMPDIR"] == str(tmp_path) == tempfile.gettempdir()


def test_a_service_runs_without_a_folder_where_none_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scratch.os, "write", full)  # the folder is there, its mark does not fit
    with private_temporary_folder():
        assert tempfile.gettempdir() == str(tmp_path)
    assert tree(tmp_path) == []


def test_what_was_left_on_a_disk_that_is_full_by_now_is_swept(tmp_path, monkeypatch):
    full, other = tmp_path / "full", tmp_path / "other"
    full.mkdir()
    other.mkdir()
    left = left_behind(full)
    monkeypatch.setenv("TMPDIR", str(full))
    monkeypatch.setattr(tempfile, "tempdir", str(other))  # which `tempfile` takes then
    with private_temporary_folder():
        for thread in threading.enumerate():
            if thread.name == "seer-sweep":
                thread.join()
        assert not left.exists()


@pytest.mark.parametrize("mode", ["ab", "wb", "ab+"])
def test_a_private_file_is_private_also_if_it_was_not(tmp_path, mode):
    (tmp_path / "old").touch(0o644)
    umask = os.umask(0)
    try:
        for name in ("old", "new"):
            with scratch.open_private(tmp_path / name, mode) as file:
                file.write(b"x")
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(umask)
