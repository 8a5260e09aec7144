"""Kept chunks, file by file: what is read again is what was written, or nothing."""

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.errors import ConfigError
from seer.common.process.scratch import open_private
from seer.services.buffer.events import Weights
from seer.services.buffer.log import kept_chunks as kept_module
from seer.services.buffer.log.chunk_file import Output
from seer.services.buffer.log.kept_chunks import KeptChunks, SoFar
from seer.services.buffer.log.outage import RETRY_SECONDS

WEIGHTS = Weights(3, "d3")
PROMPT = np.arange(7, dtype=np.int32)
ASKED = 77


def chunk(seed, count):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 99, count).astype(np.int32), -rng.random(count).astype(np.float32)


def beside(index, tokens):
    """What comes beside tokens: a function of each, for responses 0 and 3 alone."""
    return {"x |u1 3": np.repeat(tokens % 251, 3).astype(np.uint8)} if index % 3 == 0 else {}


def check_beside(outputs):
    for index, output in outputs.items():
        expected = beside(index, output.tokens)
        assert output.beside.keys() == expected.keys()
        assert all(np.array_equal(output.beside[kind], data) for kind, data in expected.items())


class Buffer:
    """What the rest of the buffer has of groups of this incarnation."""

    def __init__(self):
        self.groups, self.asked = {}, []

    def so_far(self, group_id):
        self.asked.append(group_id)
        return SoFar(ASKED, PROMPT, WEIGHTS, self.groups.get(group_id, {}))

    def add(self, group_id, index, arrays, finish):
        group = self.groups.setdefault(group_id, {})
        before = group.get(index, (arrays[0][:0], arrays[1][:0]))
        tokens, logprobs = (np.concatenate(each) for each in zip(before, arrays, strict=False))
        group[index] = Output(tokens, logprobs, finish, beside(index, tokens))


def keep(kept, group, index, arrays, finish=("", ""), rollout="r"):
    kept.buffer.add(f"{rollout}/{group}", index, arrays, finish)
    kept.keep(f"{rollout}/{group}", index, Output(*arrays, finish, beside(index, arrays[0])))


def begun(path, *groups, ttl=100.0):
    buffer = Buffer()
    kept = KeptChunks(str(path), ttl, 0.0, buffer.so_far)
    kept.buffer = buffer
    for group in groups:
        kept.open("r", group)
    return kept


def written(path):
    """Two chunks of response 0, which goes on, and one of response 2, which ended; and another group."""
    kept = begun(path, "p", "q")
    for index, seed, finish in ((0, 1, ""), (2, 2, "stop"), (0, 3, "")):
        keep(kept, "p", index, chunk(seed, 5 + seed), (finish, "END" if finish else ""))
    keep(kept, "q", 0, chunk(4, 3))
    kept.close()
    (file,) = path.iterdir()
    return file


def test_what_was_kept_is_offered_and_restored(tmp_path):
    written(tmp_path)
    kept = begun(tmp_path, "p")
    offered = kept.offer("r", "p", ASKED, PROMPT)
    assert (offered.version, offered.digest) == (3, "d3")
    assert [(each.index, each.count, each.finish, each.stop_reason) for each in offered.responses] == [
        (0, 6 + 8, "", ""),
        (2, 7, "stop", "END"),
    ]
    restored = kept.restore("r/p")
    check_beside(restored)
    for index, seeds in ((0, (1, 3)), (2, (2,))):
        for got, parts in zip(
            restored[index][:2], zip(*(chunk(seed, 5 + seed) for seed in seeds), strict=True), strict=True
        ):
            assert np.array_equal(got, np.concatenate(parts))
            assert got.dtype == parts[0].dtype


def test_it_goes_on_in_the_same_file_incarnation_after_incarnation(tmp_path):
    written(tmp_path)
    for incarnation in range(3):
        kept = begun(tmp_path, "p")
        assert kept.offer("r", "p", ASKED, PROMPT).responses[0].count == 14 + 4 * incarnation
        kept.restore("r/p")
        keep(kept, "p", 0, chunk(9, 4))
        kept.close()


def test_another_question_or_prompt_is_offered_nothing(tmp_path):
    written(tmp_path)
    kept = begun(tmp_path, "p")
    assert kept.offer("r", "p", ASKED + 1, PROMPT) is None
    assert kept.offer("r", "p", ASKED, PROMPT + 1) is None
    assert kept.offer("s", "p", ASKED, PROMPT) is None
    assert kept.offer("r", "x", ASKED, PROMPT) is None


def test_a_group_that_begins_anew_has_nothing_of_before(tmp_path):
    written(tmp_path)
    kept = begun(tmp_path, "p")
    keep(kept, "p", 1, chunk(5, 2))  # as where other weights are live: nothing was restored
    kept.close()
    offered = begun(tmp_path).offer("r", "p", ASKED, PROMPT)
    assert [(each.index, each.count) for each in offered.responses] == [(1, 2)]


def test_a_forgotten_group_is_offered_no_more_and_the_last_takes_the_file_along(tmp_path):
    file = written(tmp_path)
    kept = begun(tmp_path, "p", "q")
    for group in "pq":
        kept.offer("r", group, ASKED, PROMPT)
        kept.restore(f"r/{group}")
    kept.forget("r/p")
    kept.close()
    later = begun(tmp_path, "q")
    assert later.offer("r", "p", ASKED, PROMPT) is None
    later.offer("r", "q", ASKED, PROMPT)
    later.restore("r/q")
    later.forget("r/q")
    assert not file.exists()


def test_what_nobody_asks_for_goes_after_a_while(tmp_path):
    file = written(tmp_path)
    kept = begun(tmp_path)
    kept.tick(99.0)
    assert file.exists()
    kept.tick(100.0)
    assert not file.exists()
    assert kept.offer("r", "p", ASKED, PROMPT) is None


class Disk:
    """Takes `room` bytes in files; each write that does not fit writes what does, and fails."""

    def __init__(self, monkeypatch, room):
        self.room = room
        monkeypatch.setattr(
            kept_module, "open_private", lambda *of, **options: DiskFile(self, *of, **options)
        )
        monkeypatch.setattr(kept_module, "check_room", self.check_room)

    def check_room(self, folder):
        if self.room < 10_000:
            raise OSError(28, "No space left on device")


class DiskFile:
    def __init__(self, disk, *of, **options):
        self.disk, self.file = disk, open_private(*of, **options)

    def write(self, data):
        fits = min(self.disk.room, len(data))
        self.disk.room -= fits
        if self.file.write(data[:fits]) < len(data):
            raise OSError(28, "No space left on device")
        return fits

    def truncate(self, size):
        self.file.truncate(size)

    def close(self):
        self.file.close()


def all_offered(path, tmp_path_factory):
    """Return what the successor of a buffer that is killed now has, by group."""
    copy = tmp_path_factory.mktemp("killed") / "chunks"
    shutil.copytree(path, copy)
    later, found = begun(copy, *"pqs"), {}
    for group in "pqs":
        if later.offer("r", group, ASKED, PROMPT) is not None:
            found[f"r/{group}"] = later.restore(f"r/{group}")
            check_beside(found[f"r/{group}"])
    later.close()
    return found


def is_beginning(found, whole):
    return all(
        np.array_equal(part, whole[group][index][number][: len(part)])
        for group, responses in found.items()
        for index, arrays in responses.items()
        for number, part in enumerate(arrays[:2])
    )


@pytest.mark.parametrize("room", [0, 1, 20, 60, 110, 160, 250, 333, 420, 555, 600])
def test_wherever_the_disk_fills_all_is_kept_again_once_there_is_room(
    tmp_path, tmp_path_factory, monkeypatch, room
):
    disk, kept, now = Disk(monkeypatch, room), begun(tmp_path, "p", "q"), 0.0
    for step in range(12):
        keep(kept, "pq"[step % 2], step % 3, chunk(step, 5), ("stop", "END") if step > 8 else ("", ""))
        kept.tick(now := now + 1.0)
        assert is_beginning(all_offered(tmp_path, tmp_path_factory), kept.buffer.groups)
    assert kept.outage is not None
    since = kept.outage.since
    assert since < 12.0
    kept.forget("r/q")
    kept.open("r", "s")
    keep(kept, "s", 0, chunk(30, 6))
    kept.tick(now := now + 50.0)
    assert kept.outage.since == since, "there is still no room"
    disk.room = 10**6
    kept.tick(now + 1.0)
    assert kept.outage is not None, "it is not tried all the time"
    kept.tick(now := now + RETRY_SECONDS)
    assert kept.outage is None
    found = all_offered(tmp_path, tmp_path_factory)
    assert is_beginning(found, kept.buffer.groups)
    for group in ("r/p", "r/s"):  # without another chunk of either
        assert {index: (len(arrays[0]), arrays[2]) for index, arrays in found[group].items()} == {
            index: (len(arrays[0]), arrays[2]) for index, arrays in kept.buffer.groups[group].items()
        }
    kept.forget("r/p")
    kept.forget("r/s")
    assert not list(tmp_path.iterdir())


def test_one_that_cannot_be_cut_keeps_no_other_from_going_on(tmp_path, monkeypatch):
    disk, kept = Disk(monkeypatch, 50), begun(tmp_path, "p")
    kept.open("r2", "p")
    keep(kept, "p", 0, chunk(1, 6))
    keep(kept, "p", 0, chunk(1, 6), rollout="r2")
    kept.tick(1.0)
    disk.room = 10**6
    out = kept._files["r"][0].out

    def broken(size):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(out, "truncate", broken)
    kept.tick(100.0)
    assert "Input/output" in kept.outage.why
    kept.forget("r/p")
    kept.tick(200.0)
    assert kept.outage is None
    kept.close()
    assert begun(tmp_path).offer("r2", "p", ASKED, PROMPT).responses[0].count == 6


def test_a_chunk_of_a_group_that_has_not_caught_up_leaves_no_hole(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(kept_module, "CATCH_UP_BYTES", 1)  # one group a tick
    disk, kept = Disk(monkeypatch, 10**6), begun(tmp_path, *"pqs")
    for room, seed in ((10**6, 1), (0, 2), (10**6, 3)):
        disk.room = room
        for group in "pqs":
            keep(kept, group, 0, chunk(seed, 5))
        kept.flush()
        assert is_beginning(all_offered(tmp_path, tmp_path_factory), kept.buffer.groups)
    kept.tick(100.0)
    assert len(kept._files["r"][0].behind) == 2
    for group in "pqs":
        keep(kept, group, 0, chunk(4, 5))
    kept.flush()
    found = all_offered(tmp_path, tmp_path_factory)
    assert is_beginning(found, kept.buffer.groups)
    assert all(len(found[f"r/{group}"][0][0]) == 20 for group in "pqs")


def test_a_disk_that_can_only_be_read_ends_nothing(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    kept = begun(tmp_path, "p")
    keep(kept, "p", 0, chunk(1, 6))
    kept.tick(1.0)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(kept_module, "open_private", refuse)
    monkeypatch.setattr(kept_module, "check_room", refuse)
    kept.forget("r/p")
    kept.open("r", "q")
    keep(kept, "q", 0, chunk(1, 6))
    for now in (2.0, 20.0, 40.0):
        kept.tick(now)
        assert "Read-only" in kept.outage.why
    kept.close()


def test_catching_up_is_done_by_and_by(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_module, "CATCH_UP_BYTES", 2_000)
    names = [f"p{number}" for number in range(20)]
    disk, kept = Disk(monkeypatch, 0), begun(tmp_path, *names)
    for name in names:
        keep(kept, name, 0, chunk(1, 100))
    kept.tick(1.0)
    disk.room = 10**6
    kept.tick(100.0)
    sizes = []
    while kept._files["r"][0].behind:
        sizes.append(kept._files["r"][0].size)
        kept.tick(100.0)
    assert len(sizes) > 5
    assert max(after - before for before, after in pairwise(sizes)) < 3_000
    kept.close()
    later = begun(tmp_path)
    assert all(later.offer("r", name, ASKED, PROMPT).responses[0].count == 100 for name in names)


def test_what_was_offered_is_given_whatever_becomes_of_the_file(tmp_path):
    file = written(tmp_path)
    kept = begun(tmp_path)
    assert kept.offer("r", "p", ASKED, PROMPT) is not None
    kept.open("r", "p")
    file.unlink()
    kept.tick(1000.0)
    assert len(kept.restore("r/p")[0][0]) == 14


def test_what_was_offered_is_given_after_a_long_while_though_the_group_waits_in_another_file(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(kept_module, "FILE_BYTES", 1)
    written(tmp_path)
    kept = begun(tmp_path)
    assert kept.offer("r", "p", ASKED, PROMPT) is not None
    kept.open("r", "p")
    kept.tick(100.0)
    assert len(kept.restore("r/p")[0][0]) == 14
    kept.forget("r/p")
    assert not list(tmp_path.iterdir())


def test_what_was_offered_and_refused_is_dropped(tmp_path):
    written(tmp_path)
    kept = begun(tmp_path)
    assert kept.offer("r", "p", ASKED, PROMPT) is not None
    kept.tick(1.0)
    assert not kept._files["r"][-1].offered
    assert kept.offer("r", "p", ASKED, PROMPT) is not None  # it may be asked for again


def test_a_file_that_is_gone_offers_nothing(tmp_path):
    file = written(tmp_path)
    kept = begun(tmp_path, "p")
    file.write_bytes(b"")
    assert kept.offer("r", "p", ASKED, PROMPT) is None
    file.unlink()
    assert kept.offer("r", "p", ASKED, PROMPT) is None


@given(st.data())
def test_damage_anywhere_leaves_a_beginning_of_what_was_kept(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("kept")
    file = written(path)
    text = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        text = text[:at]
    else:
        text[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(text)
    kept = begun(path, "p")
    offered = kept.offer("r", "p", ASKED, PROMPT)
    if offered is None or not offered.responses:
        return
    restored = kept.restore("r/p")
    check_beside(restored)
    whole = {0: (chunk(1, 6), chunk(3, 8)), 2: (chunk(2, 7),)}
    for each in offered.responses:
        tokens, logprobs, finish, _ = restored[each.index]
        assert finish == (each.finish, each.stop_reason)
        assert len(tokens) == len(logprobs) == each.count
        expected = [np.concatenate(parts) for parts in zip(*whole[each.index], strict=True)]
        assert np.array_equal(tokens, expected[0][: each.count])
        assert np.array_equal(logprobs, expected[1][: each.count])
    keep(kept, "p", 0, chunk(9, 4))
    kept.close()
    again = begun(path).offer("r", "p", ASKED, PROMPT)  # what follows the damage is read, too
    assert again.responses[0].count == next(e.count for e in offered.responses if e.index == 0) + 4


def test_a_folder_is_one_buffers_at_a_time(tmp_path):
    file = written(tmp_path)
    first = begun(tmp_path, "p")
    with pytest.raises(ConfigError, match="another buffer keeps its chunks in"):
        begun(tmp_path)
    first.close()
    assert file.exists()
    begun(tmp_path).close()


def test_only_its_user_can_read_what_is_kept(tmp_path):
    folder = tmp_path / "chunks"
    folder.mkdir(0o755)
    file = written(folder)
    file.chmod(0o644)  # as an earlier release left it
    kept = begun(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    kept.close()
    made = written(tmp_path / "new")
    assert made.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"buffer\.log: no chunks can be kept there"):
        begun(tmp_path / "file" / "chunks")


def test_what_a_group_has_is_asked_once_and_not_at_all_without_a_folder(tmp_path):
    for folder, times in (("", 0), (tmp_path, 1)):
        kept = begun(folder)
        kept.open("r", "p")
        for _ in range(3):
            keep(kept, "p", 0, chunk(1, 6))
        kept.close()
        assert len(kept.buffer.asked) == times


def test_a_rollout_that_takes_prompts_for_ever_keeps_what_goes_on_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_module, "FILE_BYTES", 4_000)
    kept = begun(tmp_path, "oldest")
    keep(kept, "oldest", 0, chunk(0, 10))
    largest = 0
    for number in range(200):
        kept.open("r", f"p{number}")
        keep(kept, f"p{number}", 0, chunk(number, 50), ("stop", ""))
        kept.flush()
        if number:
            kept.forget(f"r/p{number - 1}")
        kept.flush()
        largest = max(largest, sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert largest < 4 * 4_000 < 200 * 50 * 8
    kept.close()
    again = begun(tmp_path, "oldest", "p199")
    assert again.offer("r", "p3", ASKED, PROMPT) is None
    for prompt, arrays in (("oldest", chunk(0, 10)), ("p199", chunk(199, 50))):
        assert again.offer("r", prompt, ASKED, PROMPT) is not None
        (restored,) = again.restore(f"r/{prompt}").values()
        assert np.array_equal(restored[0], arrays[0])
    keep(again, "oldest", 0, chunk(7, 4))
    for prompt in ("oldest", "p199"):
        again.forget(f"r/{prompt}")
    assert not list(tmp_path.iterdir())


def test_a_group_that_begins_anew_in_another_file_leaves_none_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_module, "FILE_BYTES", 1)
    written(tmp_path)
    kept = begun(tmp_path, "p", "q")
    for group in ("p", "q"):
        keep(kept, group, 0, chunk(5, 6))
    kept.flush()
    assert len(list(tmp_path.iterdir())) == 1
    assert kept.offer("r", "p", ASKED, PROMPT) is None
    kept.close()
    assert begun(tmp_path).offer("r", "p", ASKED, PROMPT).responses[0].count == 6
