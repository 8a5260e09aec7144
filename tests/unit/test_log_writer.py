"""Segments of a log, in files and in memory: each runs through the machines, and disks that fail end it alone."""

import errno
import io
import os
from pathlib import Path

import pytest
from logged_buffer import LoggedBuffer
from structlog.testing import capture_logs

from seer.report.log_reader import read_timeline
from seer.services.buffer.log import log_folder, writer
from seer.services.buffer.log.replay import replay_incarnation
from seer.services.buffer.log.rows import LogError, read
from seer.services.buffer.requests import events


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(writer.Folder, "limit", 6000)
    monkeypatch.setattr(writer.Ring, "limit", 8000)
    monkeypatch.setattr(writer, "SNAPSHOTS", 1)


def test_a_log_goes_on_in_segments_that_run_through_the_machines_one_after_another(tmp_path, small):
    buffer = LoggedBuffer(tmp_path / "new" / "log")
    buffer.roll(1)
    buffer.roll(2)
    buffer.log.close()
    [paths] = log_folder.incarnations(tmp_path / "new" / "log")
    assert len(paths) > 3
    assert [read(path)[0].number for path in paths] == list(range(len(paths)))
    told = list(replay_incarnation(paths))
    assert told[-1][1].time == buffer.now
    assert len(list(replay_incarnation(paths[2:]))) < len(told)
    for path in paths:
        assert list(replay_incarnation([path]))


def test_a_segment_that_does_not_follow_from_the_one_before_is_found(tmp_path, small):
    buffer = LoggedBuffer(tmp_path)
    buffer.roll(1)
    buffer.log.close()
    [paths] = log_folder.incarnations(tmp_path)
    text = paths[1].read_bytes()
    assert b'"tokens":' in text.partition(b"\n")[0]
    paths[1].write_bytes(text.replace(b'"tokens":', b'"tokens":1', 1))
    with pytest.raises(LogError, match=rf"{paths[1].name}: line 1: .*previous segment ends"):
        list(replay_incarnation(paths))


def test_segments_are_longer_where_snapshots_are(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.Folder, "limit", 6000)
    buffer = LoggedBuffer(tmp_path)
    buffer.roll(1, prompts=100)
    buffer.log.close()
    for path in log_folder.segments(tmp_path)[:-1]:
        first = path.read_bytes().index(b"\n")
        assert path.stat().st_size > max(4000, writer.SNAPSHOTS * first)


def test_a_segment_goes_on_while_there_are_many_requests_but_not_for_ever(tmp_path, small, monkeypatch):
    monkeypatch.setattr(writer, "SNAPSHOT_REQUESTS", 10)
    buffer = LoggedBuffer(tmp_path)
    buffer.roll(1, prompts=30)
    buffer.log.close()
    heads = [read(path)[0] for path in log_folder.segments(tmp_path)]
    sizes = [path.stat().st_size for path in log_folder.segments(tmp_path)]
    assert sizes[0] > 3 * 4000
    assert all(len(head.state) < 10_000 for head in heads)
    monkeypatch.setattr(writer.Folder, "longest", 9000)
    other = LoggedBuffer(tmp_path / "other", 2)
    other.roll(1, prompts=30)
    other.log.close()
    assert max(path.stat().st_size for path in log_folder.segments(tmp_path / "other")[:2]) < 9000 + 2 * 4000
    for [paths] in (log_folder.incarnations(tmp_path), log_folder.incarnations(tmp_path / "other")):
        assert list(replay_incarnation(paths))


def test_rows_in_memory_are_dropped_while_there_are_too_many_requests(tmp_path, small, monkeypatch):
    monkeypatch.setattr(writer, "SNAPSHOT_REQUESTS", 10)
    monkeypatch.setattr(writer.Ring, "longest", 9000)
    buffer = LoggedBuffer("")
    seen = []
    tell = buffer.tell
    buffer.tell = lambda event: (
        seen.append(sum(len(text) for _, text in buffer.log._segments.kept)),
        tell(event),
    )[1]
    buffer.roll(1, prompts=30)
    assert max(seen) < 9000 + 2 * 4000 + 8000
    assert 0 in seen
    buffer.roll(2)
    monkeypatch.setattr(writer.tempfile, "tempdir", str(tmp_path))
    buffer.log.dump()
    [folder] = tmp_path.iterdir()
    [paths] = log_folder.incarnations(folder)
    assert [line for _, line in replay_incarnation(paths)][-1].time == buffer.now


def test_without_a_folder_the_last_rows_are_kept_for_a_crash(tmp_path, small, monkeypatch):
    monkeypatch.setattr(writer.tempfile, "tempdir", str(tmp_path))
    buffer = LoggedBuffer("")
    for number in range(5):
        buffer.roll(number)
    kept = buffer.log._segments.kept
    assert len(kept) == 2
    assert sum(len(text) for _, text in kept) < 2 * 8000 + 8000
    with capture_logs() as logged:
        buffer.log.dump()
    [folder] = tmp_path.iterdir()
    assert logged[0]["command"] == f"seer replay {folder}"
    [paths] = log_folder.incarnations(folder)
    rows = [line for _, line in replay_incarnation(paths)]
    assert rows[-1].time == buffer.now
    assert len(rows) > 10


def test_of_many_crashes_the_last_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.tempfile, "tempdir", str(tmp_path))
    stranger = tmp_path / "seer-crash-link"
    stranger.symlink_to("/nowhere")
    (tmp_path / "seer-crash-file").write_text("")
    kept = []
    for number in range(writer.CRASHES + 3):
        before = set(tmp_path.iterdir())
        LoggedBuffer("").log.dump()
        (folder,) = set(tmp_path.iterdir()) - before
        os.utime(folder, (number, number))
        kept.append(folder)
    left = {path for path in tmp_path.iterdir() if path.is_dir()}
    assert left == set(kept[-writer.CRASHES :])
    assert stranger.is_symlink()
    assert (tmp_path / "seer-crash-file").exists()


def test_a_crash_leaves_its_log_where_the_process_s_own_folder_is_no_more(tmp_path, monkeypatch):
    from seer.common.process.scratch import private_temporary_folder

    monkeypatch.setattr(writer.tempfile, "tempdir", str(tmp_path))
    with private_temporary_folder():
        buffer = LoggedBuffer("")
        buffer.log.dump()
    [folder] = tmp_path.iterdir()
    assert len(log_folder.segments(folder)) == 1


@pytest.mark.parametrize("at", [0, 3])
def test_a_full_disk_ends_the_log_alone(tmp_path, small, monkeypatch, at):
    left = at

    class Disk(io.FileIO):
        def write(self, text):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(bytes(text)[:100])  # as a disk that is nearly full may

    monkeypatch.setattr(Path, "open", lambda path, mode, **_: Disk(path, mode.replace("b", "")))
    with capture_logs() as logged:
        buffer = LoggedBuffer(tmp_path)
        buffer.roll(1)
        buffer.log.close()
    assert [entry["event"] for entry in logged] == ["the log ends here, until it can be written"]
    assert buffer.machine.requests.counters["tokens"] > 0
    for paths in log_folder.incarnations(tmp_path):
        assert list(replay_incarnation(paths))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("room", range(0, 40_000, 3777))
def test_wherever_the_disk_fills_the_log_begins_again_once_there_is_room(
    tmp_path, small, monkeypatch, number, room
):
    if number == errno.EIO:
        room += 5000  # at the start it is a folder that cannot be used
    left, opened = room, Path.open

    class Disk(io.FileIO):
        def write(self, text):
            nonlocal left
            fits = min(left, len(text))
            left -= fits
            if text and not fits:
                raise OSError(number, os.strerror(number))
            return super().write(bytes(text)[:fits])

    def check_room(folder, size):
        if left < 10_000:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(
        Path, "open", lambda path, mode, **_: Disk(path, "x") if mode == "xb" else opened(path, mode)
    )
    monkeypatch.setattr(writer, "check_room", check_room)
    buffer = LoggedBuffer(tmp_path)
    turn = 0
    while buffer.log.outage is None:
        buffer.roll(turn := turn + 1)
        buffer.log.tick(buffer.now)
    since = buffer.log.outage.since
    buffer.roll(100)
    buffer.log.tick(buffer.now + 20.0)
    assert buffer.log.outage.since == since
    assert os.strerror(number) in buffer.log.outage.why
    left = 10**7
    buffer.now += 100.0
    buffer.log.tick(buffer.now)
    assert buffer.log.outage is None
    buffer.roll(101)
    buffer.log.close()
    [paths] = log_folder.incarnations(tmp_path)
    rows = [line for _, line in replay_incarnation(paths)]
    submitted = [row.event.rollout_id for row in rows if isinstance(row.event, events.GroupsSubmitted)]
    assert "r100" not in submitted
    assert submitted[-1] == "r101"
    assert rows[-1].time == buffer.now
    timeline = read_timeline(tmp_path)
    by_name = {each.rollout_id: each for each in timeline.rollouts}
    assert all(each.finished for each in by_name["r101"].responses)
    assert all(chunk.end >= chunk.start for chunk in timeline.chunks)
