"""Whose the spool's folder is: only what a buffer marked as its own is ever touched."""

import os
import stat
from pathlib import Path

import pytest

from seer.common.blobs import Blob
from seer.common.errors import ConfigError
from seer.services.buffer.own_folder import MARKER
from seer.services.buffer.weights.spool_folder import NAME, SpoolFolder


def begin(folder: SpoolFolder, name: str, size: int = 4) -> Blob:
    stream = Blob(name, size, folder.root / name, f"token {name}")
    folder.begin(stream)
    return stream


def everything(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


@pytest.fixture
def claimed(tmp_path):
    folder = SpoolFolder(str(tmp_path))
    folder.claim()
    yield folder
    folder.release()


def test_what_a_user_keeps_beside_it_stays(tmp_path):
    for name in ("venv/bin/python", "v1/model.safetensors", "spare/mine", "v2/stream.json", "notes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = everything(tmp_path)
    folder = SpoolFolder(str(tmp_path))
    folder.claim()
    assert folder.inherited() == {}
    begin(folder, "v1-a", 10)
    folder.keep_as_spare("v1-a")
    begin(folder, "v2-a", 20)
    folder.remove("v2-a")
    folder.release()
    left = {name for name in everything(tmp_path) if not name.startswith(NAME)}
    assert left == before
    assert everything(tmp_path / NAME) == {MARKER}


def test_a_second_buffer_is_refused_until_the_first_is_gone(tmp_path, claimed):
    begin(claimed, "v1-a")
    second = SpoolFolder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"buffer\.spool = .*another buffer holds .*folder of its own"):
        second.claim()
    assert (claimed.root / "v1-a" / "stream.json").exists()
    claimed.release()
    second.claim()
    second.release()


def refuse(tmp_path):
    with pytest.raises(ConfigError, match=r"buffer\.spool = .*: ") as caught:
        SpoolFolder(str(tmp_path)).claim()
    return str(caught.value)


def test_a_folder_of_that_name_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / NAME / "v1").mkdir(parents=True)
    assert "move it away" in refuse(tmp_path)
    assert everything(tmp_path / NAME) == {"v1"}


def test_a_link_a_file_and_an_unusable_folder_are_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    assert "no folder of this user's" in refuse(tmp_path)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).write_text("mine")
    assert "no folder of this user's" in refuse(tmp_path)
    assert "cannot be used" in refuse(tmp_path / NAME / "below")
    (tmp_path / "marked" / NAME).mkdir(parents=True)
    (tmp_path / "marked" / NAME / MARKER).symlink_to(tmp_path / "victim")
    assert "cannot be used" in refuse(tmp_path / "marked")
    assert not (tmp_path / "victim").exists()


def test_only_its_user_reads_it(tmp_path, claimed):
    mask = os.umask(0)
    try:
        (tmp_path / NAME).chmod(0o755)
        claimed.release()
        claimed.claim()
        temporary = SpoolFolder("")
        for folder in (claimed, temporary):
            begin(folder, "v1-a")
            for each in [folder.root, *folder.root.rglob("*")]:
                assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600), each
        temporary.release()
        assert not everything(tmp_path) & {str(temporary.root)}
    finally:
        os.umask(mask)
        temporary.release()


def test_whole_streams_of_an_earlier_incarnation_are_taken_over_and_others_deleted(claimed):
    for name, size in (("v1-whole", 4), ("v2-part", 4), ("v3-short", 8)):
        stream = begin(claimed, name, size)
        stream.file.write_bytes(bytes(4))
        stream.note(whole=name != "v2-part")
    (claimed.root / "v4-garbage").mkdir()
    (claimed.root / "other").mkdir()
    assert claimed.inherited() == {"v1-whole": (4, "token v1-whole")}
    assert {each.name for each in claimed.root.iterdir()} == {"v1-whole", "other", MARKER}


def test_a_process_that_was_killed_holds_nothing(tmp_path):
    child = os.fork()
    if not child:
        SpoolFolder(str(tmp_path)).claim()
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    folder = SpoolFolder(str(tmp_path))
    folder.claim()
    folder.release()
