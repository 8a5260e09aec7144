"""Parts of weights that are written side by side, by the spool and by who fetches, in threads of any speed."""

import asyncio
import errno
import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import eventually, run, virtual

from seer.common import blobs, wire
from seer.common.blobs import MAX_DAMAGED, WRITES, Asked, Blob, checksum
from seer.common.clock import LoopClock
from seer.services.buffer.weights.spool import Spool

PART = 50
NAME = "v1-a"
SECONDS = st.lists(st.floats(0, 1), min_size=1, max_size=12)


class Threads:
    """Takes the place of threads: writes take `seconds` each, in turn; `fails` has numbers of those that fail.

    `under_way`, `most`: writes now, and at most at once; `log`: ends of them, and what else is put there.
    """

    def __init__(self, monkeypatch, seconds=(0.0,), fails=()):
        self.seconds, self.fails = seconds, fails
        self.begun = self.under_way = self.most = 0
        self.log = []
        monkeypatch.setattr(asyncio, "to_thread", self._run)

    async def _run(self, work, *args, **kwargs):
        if getattr(work, "__name__", "") not in ("put", "store"):
            return work(*args, **kwargs)
        number, self.begun, self.under_way = self.begun, self.begun + 1, self.under_way + 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.seconds[number % len(self.seconds)])
            self.log.append(number)
            if number in self.fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return work(*args, **kwargs)
        finally:
            self.under_way -= 1


class Trainer:
    """Sends bytes to a spool, a window ahead of what it confirms, and again from where it says.

    Asserts that what the spool says is there is in the file. `damaged`: numbers of messages to damage.
    """

    def __init__(self, spool, size, name=NAME, start=0, damaged=()):
        self.spool, self.name, self.size, self.start, self.damaged = spool, name, size, start, damaged
        self.data = (np.arange(start, start + size) * 7).astype(np.uint8)
        self.sent = self.confirmed = self.messages = 0
        self.problems = []
        self.whole = asyncio.Event()

    def open(self, whole=0):
        message = wire.OpenSpool(name=self.name, size=self.size, start=self.start, whole_size=whole)
        self.spool.put(self.hear, b"", message)

    async def hear(self, address, state):
        if state.problem:
            self.problems.append(state.problem)
            return
        there = self.file()[self.start : self.start + state.have]
        assert there == self.data[: state.have].tobytes(), "it says that bytes are there, which are not"
        self.confirmed = state.have
        self.sent = state.have if state.resend else self.sent
        while self.sent < min(self.size, self.confirmed + 2 * WRITES * PART):
            data = self.data[self.sent : self.sent + PART]
            check = checksum(data)
            data = data ^ (self.messages in self.damaged)
            self.messages += 1
            self.spool.put(
                self.hear, b"", wire.SpoolData(name=self.name, offset=self.sent, checksum=check, data=data)
            )
            self.sent += len(data)
        if state.have == self.size:
            self.whole.set()

    def file(self):
        stream = self.spool._streams[self.name]
        return getattr(stream, "whole", stream).file.read_bytes()


async def serving(folder):
    spool = Spool(str(folder), LoopClock())
    spool.start()
    task = asyncio.create_task(spool.run())
    await asyncio.sleep(0.01)
    return spool, task


async def stop(task):
    task.cancel()
    await asyncio.wait([task])


# --- the spool -------------------------------------------------------------------------------


@given(SECONDS, st.sets(st.integers(0, 30), max_size=6), st.integers(1, 900))
def test_writes_end_in_any_order_and_no_answer_counts_bytes_behind_one_under_way(
    tmp_path_factory, seconds, damaged, size
):
    async def attempt(monkeypatch):
        threads = Threads(monkeypatch, seconds)
        spool, task = await serving(tmp_path_factory.mktemp("spool"))
        trainer = Trainer(spool, size, damaged=damaged)
        trainer.open()
        await trainer.whole.wait()
        assert trainer.file() == trainer.data.tobytes()
        assert json.loads((spool._streams[NAME].folder / blobs.NOTES).read_bytes())["whole"]
        assert threads.most <= WRITES
        await stop(task)
        assert not trainer.problems

    with pytest.MonkeyPatch.context() as monkeypatch:
        run(attempt(monkeypatch))


@given(SECONDS, st.integers(1, 400), st.integers(1, 400))
def test_ranks_parts_are_written_side_by_side_and_whoever_ends_last_notes_that_all_is_there(
    tmp_path_factory, seconds, first, second
):
    async def attempt(monkeypatch):
        threads = Threads(monkeypatch, seconds)
        spool, task = await serving(tmp_path_factory.mktemp("spool"))
        ranks = [Trainer(spool, first, f"{NAME}.part0"), Trainer(spool, second, f"{NAME}.part1", start=first)]
        for rank in ranks:
            rank.open(first + second)
        for rank in ranks:
            await rank.whole.wait()
        stream = spool._streams[NAME]
        assert (stream.have, threads.most <= WRITES) == (first + second, True)
        assert json.loads((stream.folder / blobs.NOTES).read_bytes())["whole"]
        assert stream.file.read_bytes() == np.concatenate([rank.data for rank in ranks]).tobytes()
        await stop(task)

    with pytest.MonkeyPatch.context() as monkeypatch:
        run(attempt(monkeypatch))


@virtual
async def test_as_many_parts_as_may_be_are_written_at_once_and_the_others_wait(tmp_path, monkeypatch):
    threads = Threads(monkeypatch, [1.0])
    spool, task = await serving(tmp_path)
    trainers = [Trainer(spool, 8 * PART, f"v{number}-a") for number in range(2)]
    for trainer in trainers:
        trainer.open()
    await asyncio.sleep(0.5)
    assert (threads.under_way, spool._turns.queue.qsize()) == (WRITES, 16 - WRITES - 1)
    for trainer in trainers:
        await trainer.whole.wait()
    assert threads.most == WRITES
    assert asyncio.get_running_loop().time() < 16 / WRITES + 1, "or one would wait for another"
    await stop(task)


@virtual
async def test_writes_that_fail_are_one_error_and_the_stream_goes_once_all_have_ended(
    tmp_path, monkeypatch, capsys
):
    threads = Threads(monkeypatch, [1.0, 0.2, 0.3, 2.0], fails={1, 2})
    spool, task = await serving(tmp_path)
    trainer = Trainer(spool, 20 * PART)
    removed = []
    remove = spool._folder.remove
    monkeypatch.setattr(
        spool._folder, "remove", lambda *name: (removed.append(threads.under_way), remove(*name))
    )
    trainer.open()
    await eventually(lambda: trainer.problems)
    await asyncio.sleep(10)
    assert {*trainer.problems} == {"cannot be stored: [Errno 28] No space left on device"}
    assert capsys.readouterr().err.count("a stream of weights failed") == 1
    assert removed
    assert not any(removed), "a part was written while its stream was removed"
    before = threads.begun
    other = Trainer(spool, 20 * PART, "v2-a")
    other.open()
    await other.whole.wait()
    assert (threads.begun, before < 12) == (before + 20, True)
    await stop(task)


@virtual
async def test_no_stream_goes_or_begins_again_while_a_part_of_it_is_written(tmp_path, monkeypatch):
    threads = Threads(monkeypatch, [100.0])
    spool, task = await serving(tmp_path)
    trainer = Trainer(spool, 3 * PART)
    trainer.open()
    await eventually(lambda: threads.under_way == 3)
    spool.name(f"spool:{NAME}")
    await asyncio.sleep(2 * wire.SPOOL_STALL_SECONDS)  # of which the trainer is not the cause
    spool.remove_unneeded(set())
    await asyncio.sleep(1)
    assert NAME in spool._streams
    trainer.open()  # as after a broken connection
    await trainer.whole.wait()
    assert (threads.begun, trainer.messages) == (3, 3), "what is under way is not sent again"
    spool.remove_unneeded(set())
    await eventually(lambda: NAME not in spool._streams)
    await stop(task)


@virtual
async def test_when_the_spool_ends_nothing_is_written_any_more(tmp_path, monkeypatch):
    threads = Threads(monkeypatch, [1.0])
    spool, task = await serving(tmp_path)
    trainer = Trainer(spool, 20 * PART)
    trainer.open()
    await eventually(lambda: threads.under_way == WRITES)
    await stop(task)
    assert (threads.under_way, len(threads.log)) == (0, threads.begun)
    await asyncio.sleep(10)
    assert threads.begun == WRITES


# --- who fetches -----------------------------------------------------------------------------

SIZE = 12 * wire.SHORT_SPOOL_BYTES
BYTES = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)


class Holder(Asked):
    """Has all parts. `asked`: those that it was asked for and are not written yet, `most` of them at once."""

    def __init__(self, blob, damaged=()):
        self.blob, self.damaged, self.most, self.count = blob, damaged, 0, 0
        self.offsets, self.answers = set(), asyncio.Queue()
        super().__init__(NAME, self._take, self.answers.get)

    async def patience(self):
        return 100.0

    async def _take(self, question):
        self.offsets = {each for each in self.offsets if not self.blob.has(each, self.blob.length(each))} | {
            question.offset
        }
        self.most = max(self.most, len(self.offsets))
        data = BYTES[question.offset : question.offset + wire.SHORT_SPOOL_BYTES]
        damaged = self.count in self.damaged
        self.count += 1
        part = wire.SpoolData(name=NAME, offset=question.offset, checksum=checksum(data) ^ damaged, data=data)
        for _ in range(1 if damaged else 2):  # as if a whole one had been asked for again
            self.answers.put_nowait(part)


def made(folder):
    blob = Blob(NAME, SIZE, folder)
    blob.begin("get a larger disk")
    return blob


@pytest.mark.parametrize("seconds", [[0.0], [1.0], [3.0, 1.0, 0.5, 2.0, 0.1], [5.0, 0.0, 0.0]])
def test_a_window_at_most_is_asked_for_or_written_each_part_once_in_any_order(tmp_path, monkeypatch, seconds):
    async def attempt():
        threads = Threads(monkeypatch, seconds)
        blob = made(tmp_path)
        holder = Holder(blob, damaged={0, 3, 4})
        came = blob.came

        def checked(offset, length):
            came(offset, length)
            assert blob.file.read_bytes()[: blob.have] == BYTES[: blob.have].tobytes()

        blob.came = checked
        await holder.fetch(blob)
        assert blob.file.read_bytes() == BYTES.tobytes()
        assert (threads.begun, threads.under_way) == (12 + 3, 0)
        assert threads.most <= WRITES
        assert holder.most <= wire.SPOOL_WINDOW
        assert (threads.most, holder.most) == (WRITES, wire.SPOOL_WINDOW) or max(seconds) == 0

    run(attempt())


@virtual
async def test_a_write_that_fails_ends_a_fetch_with_its_error_once_all_have_ended(tmp_path, monkeypatch):
    threads = Threads(monkeypatch, [3.0, 1.0, 2.0, 4.0], fails={1, 2})
    blob = made(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        await Holder(blob).fetch(blob)
    assert (threads.under_way, threads.begun) == (0, WRITES)
    await asyncio.sleep(10)
    assert threads.begun == WRITES


@virtual
async def test_a_fetch_that_is_given_up_ends_when_nothing_is_written_any_more(tmp_path, monkeypatch):
    threads = Threads(monkeypatch, [3.0, 1.0, 2.0, 4.0])
    blob = made(tmp_path)
    task = asyncio.create_task(Holder(blob).fetch(blob))
    await eventually(lambda: threads.under_way == WRITES)
    await stop(task)
    assert task.cancelled()
    assert (threads.under_way, len(threads.log)) == (0, WRITES)
    before = blob.file.read_bytes()
    await asyncio.sleep(10)
    assert (threads.begun, blob.file.read_bytes()) == (WRITES, before)


@virtual
async def test_parts_that_arrive_damaged_in_a_row_end_a_fetch_however_many_are_written(tmp_path, monkeypatch):
    threads = Threads(monkeypatch, [3.0, 1.0, 2.0, 4.0])
    blob = made(tmp_path)
    with pytest.raises(ValueError, match=f"{MAX_DAMAGED} parts in a row arrived damaged"):
        await Holder(blob, damaged=range(1000)).fetch(blob)
    assert threads.under_way == 0
    assert threads.begun < MAX_DAMAGED + WRITES
