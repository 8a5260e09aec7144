"""Which segments of a log's folder are kept."""

import errno
import os
from pathlib import Path

import pytest
from logged_buffer import LoggedBuffer

from seer.services.buffer.events import Tick
from seer.services.buffer.log import log_folder, writer
from seer.services.buffer.log.replay import replay_incarnation
from seer.services.buffer.requests import events


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(writer.Folder, "limit", 4000)
    monkeypatch.setattr(writer, "SNAPSHOTS", 1)
    monkeypatch.setattr(log_folder, "ROLLOUTS", 3)
    clock = iter(range(10**6))
    monkeypatch.setattr(writer.time, "time", lambda: float(next(clock)))


def uses(folder):
    return [use for path in log_folder.segments(folder) for use in log_folder.submitted(path)]


def test_what_concerns_the_newest_rollouts_is_kept_and_no_more(tmp_path):
    buffer = LoggedBuffer(tmp_path)
    for number in range(1, 9):
        buffer.roll(number)
    buffer.log.close()
    found = uses(tmp_path)
    # The rule is applied when a segment begins: since then others may have been submitted.
    assert {("r6", 6), ("r7", 7), ("r8", 8)} <= set(found)
    assert ("r3", 3) not in found
    [paths] = log_folder.incarnations(tmp_path)
    list(replay_incarnation(paths))


def test_what_is_about_a_rollout_that_goes_on_is_kept_from_its_begin(tmp_path):
    buffer = LoggedBuffer(tmp_path)
    buffer.tell(events.GroupsSubmitted("t", "long", 1, 30, [events.GroupSpec("0", 10)], submission=9))
    for number in range(1, 9):
        buffer.roll(number)
    buffer.log.close()
    assert uses(tmp_path)[0] == ("long", 9)


def test_as_long_as_there_are_few_rollouts_all_is_kept(tmp_path):
    for incarnation in range(1, 6):
        LoggedBuffer(tmp_path, incarnation=incarnation).log.close()
    assert len(log_folder.incarnations(tmp_path)) == 5


def test_rollouts_of_all_incarnations_count(tmp_path):
    for number in range(1, 7):
        buffer = LoggedBuffer(tmp_path, incarnation=number)
        buffer.roll(number)
        buffer.log.close()
    LoggedBuffer(tmp_path, incarnation=7).log.close()
    assert set(uses(tmp_path)) == {("r4", 4), ("r5", 5), ("r6", 6)}


def test_who_comes_back_to_a_rollout_keeps_what_its_earlier_incarnation_wrote_of_it(tmp_path):
    for incarnation, number in enumerate((1, 2, 3, 1), 1):
        buffer = LoggedBuffer(tmp_path, incarnation=incarnation)
        buffer.roll(number)
        buffer.log.close()
    LoggedBuffer(tmp_path, incarnation=5).log.close()
    assert len(log_folder.incarnations(tmp_path)) == 5


def test_all_together_are_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(log_folder, "KEPT_BYTES", 60_000)
    buffer = LoggedBuffer(tmp_path)
    buffer.roll(1, prompts=20)
    buffer.log.close()
    paths = log_folder.segments(tmp_path)
    assert sum(path.stat().st_size for path in paths[:-1]) <= 60_000
    assert len(paths) > 2


def test_what_another_buffer_writes_and_what_is_no_segment_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(log_folder, "KEPT_BYTES", 1)
    for name in ("notes.jsonl", "0" * 16 + "-1.jsonl", "r1.kept"):
        (tmp_path / name).write_text("mine")
    first = LoggedBuffer(tmp_path, incarnation=1)
    [live] = log_folder.segments(tmp_path)
    second = LoggedBuffer(tmp_path, incarnation=2)
    second.roll(1)
    second.log.close()
    assert live.exists()
    first.tell(Tick())
    first.log.close()
    assert [line.event for _, line in replay_incarnation([live])][-1] == Tick()
    LoggedBuffer(tmp_path, incarnation=3).log.close()
    assert [path.name[:16] for path in log_folder.segments(tmp_path)] == [f"{3:016x}"]
    assert len(list(tmp_path.iterdir())) == 4


def test_another_buffer_that_deletes_at_the_same_time_does_not_end_a_log(tmp_path, monkeypatch):
    incarnations = log_folder.incarnations
    gone = tmp_path / f"{0:016x}-000000.jsonl"
    monkeypatch.setattr(log_folder, "incarnations", lambda folder: [*incarnations(folder), [gone]])
    buffer = LoggedBuffer(tmp_path)
    buffer.roll(1)
    buffer.log.close()
    assert len(log_folder.segments(tmp_path)) > 2


def test_what_cannot_be_read_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(log_folder, "KEPT_BYTES", 12_000)
    broken = tmp_path / f"{9:016x}-000000.jsonl"
    broken.write_bytes(b"\x00" * 5000)
    half = tmp_path / f"{8:016x}-000000.jsonl"
    half.write_bytes(b"")
    buffer = LoggedBuffer(tmp_path)
    buffer.roll(1)
    buffer.log.close()
    assert not broken.exists()
    assert not half.exists()


def test_what_can_neither_be_read_nor_deleted_ends_neither_the_log_nor_its_pruning(tmp_path, monkeypatch):
    monkeypatch.setattr(log_folder, "KEPT_BYTES", 12_000)
    unreadable = tmp_path / f"{0:016x}-000000.jsonl"
    unreadable.mkdir()
    buffer = LoggedBuffer(tmp_path)
    buffer.roll(1)
    assert buffer.log.outage is None
    buffer.log.close()
    first, *others = log_folder.segments(tmp_path)
    assert first == unreadable
    assert others[0].name > f"{1:016x}-000001.jsonl", "older ones were deleted"


def test_what_could_not_be_opened_once_is_not_taken_for_the_oldest(tmp_path, monkeypatch):
    for incarnation in (1, 2):
        buffer = LoggedBuffer(tmp_path, incarnation=incarnation)
        buffer.roll(incarnation)
        buffer.log.close()
    *older, newest = log_folder.segments(tmp_path)
    opened, pruner = Path.open, log_folder.Pruner(tmp_path)

    def too_many_files(path, *args, **options):
        if path == newest:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", too_many_files)
        pruner.prune()
    assert log_folder.segments(tmp_path) == [*older, newest]
    monkeypatch.setattr(log_folder, "KEPT_BYTES", newest.stat().st_size)
    pruner.prune()
    assert log_folder.segments(tmp_path) == [newest]
