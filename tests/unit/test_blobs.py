"""Blobs: files that come in parts and are read meanwhile, who gives them away, and who fetches them."""

import asyncio
import threading

import numpy as np
import pytest
from virtual_time import virtual

from seer.common import blobs, wire
from seer.common.blobs import MAX_DAMAGED, Asked, Blob, Readers, checksum, on_this_machine, part_bytes, window

PART = wire.SHORT_SPOOL_BYTES
SIZE = 3 * PART + 100
BYTES = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
WHOLE = (0, PART, 2 * PART, 3 * PART)


def part(offset, damaged=False, length=PART):
    data = BYTES[offset : offset + length]
    return wire.SpoolData(name="v1", offset=offset, checksum=checksum(data) ^ damaged, data=data)


def asked(offset):
    return wire.ReadSpool(name="v1", offset=offset)


async def made(folder, *offsets):
    folder.mkdir()
    blob = Blob("v1", SIZE, folder, "token")
    blob.begin("get a larger disk")
    for offset in offsets:
        assert await blob.write(part(offset))
    return blob


async def test_a_blob_has_exactly_the_parts_that_arrived_whole(tmp_path):
    blob = await made(tmp_path / "a")
    assert not await blob.write(part(0, damaged=True))
    for length in (PART + 1, 0):
        assert not await blob.write(part(0, length=length))
    for offset, have, arrived in (
        (PART, 0, PART),
        (0, 2 * PART, 2 * PART),
        (3 * PART, 2 * PART, 2 * PART + 100),
    ):
        assert await blob.write(part(offset))
        assert (blob.have, blob.arrived) == (have, arrived)
    assert [at for at in WHOLE if not blob.has(at, blob.length(at))] == [2 * PART]
    await blob.write(part(2 * PART))
    assert (blob.have, blob.arrived, blob.file.read_bytes()) == (SIZE, SIZE, BYTES.tobytes())


async def test_who_waits_for_a_part_gets_it_or_hears_why_it_never_comes(tmp_path, monkeypatch):
    blob, disk = await made(tmp_path / "a"), asyncio.Semaphore(1)
    first, last = (asyncio.create_task(blob.part(asked(offset), disk)) for offset in (0, 3 * PART))
    await asyncio.sleep(0)
    await blob.write(part(0))
    got = await first
    assert (got.data == BYTES[:PART]).all()
    assert got.checksum == checksum(got.data)
    assert not last.done()
    with pytest.raises(ValueError, match="no such bytes"):
        await blob.part(asked(SIZE), disk)
    read = blobs.read_at

    def removed(*place):  # it is removed, and its file is another's, while a part of it is read
        blob._end = "it was removed"
        return read(*place)

    with monkeypatch.context() as patch:
        patch.setattr(blobs, "read_at", removed)
        with pytest.raises(ValueError, match="it was removed"):
            await blob.part(asked(0), disk)
    blob.end("it was removed")
    for waiting in (last, blob.part(asked(0), disk)):
        with pytest.raises(ValueError, match="it was removed"):
            await waiting


async def test_a_linked_copy_outlives_the_one_that_it_was_linked_to(tmp_path):
    theirs, ours = await made(tmp_path / "a", *WHOLE), await made(tmp_path / "b", 0, 2 * PART)
    assert on_this_machine(theirs.state())
    assert not on_this_machine(Blob("v1", SIZE, theirs.folder).state())
    assert await ours.link(theirs.folder)
    theirs.file.unlink()
    (theirs.folder / blobs.NOTES).unlink()
    assert not on_this_machine(theirs.state())
    assert (ours.have, ours.arrived, ours.file.read_bytes()) == (SIZE, SIZE, BYTES.tobytes())
    other = await made(tmp_path / "c")
    assert not await other.link(theirs.folder)
    assert other.have == 0


async def test_a_link_that_is_cancelled_has_ended_when_its_folder_may_be_removed(tmp_path, monkeypatch):
    theirs, ours = await made(tmp_path / "a", *WHOLE), await made(tmp_path / "b")
    begun, goes_on, linked = threading.Event(), threading.Event(), blobs._linked

    def slow(*places):
        begun.set()
        goes_on.wait()
        return linked(*places)

    monkeypatch.setattr(blobs, "_linked", slow)
    linking = asyncio.create_task(ours.link(theirs.folder))
    await asyncio.to_thread(begun.wait)
    linking.cancel()
    await asyncio.wait([linking], timeout=0.05)
    try:
        assert not linking.done()
    finally:
        goes_on.set()
    await asyncio.wait([linking])
    assert linking.cancelled()


async def test_readers_hear_what_is_there_and_get_parts_as_they_arrive(tmp_path):
    blob = await made(tmp_path / "a", 0)
    readers = Readers({"v1": blob, "v0": "it is gone", "v2": ""}.get, 2)
    said = []

    async def reply(address, answer):
        said.append((address, answer))

    for name, size, problem in (("v1", SIZE, ""), ("v0", 0, "it is gone"), ("v2", 0, "")):
        await readers.answer(reply, b"a", wire.OpenSpool(name=name))
        assert (said[-1][1].size, said[-1][1].problem) == (size, problem)
    await readers.answer(reply, b"a", wire.ReadSpool(name="v0", offset=0))
    assert said.pop()[1].problem == "it is gone"
    for offset in (PART, PART, 2 * PART, 0):
        await readers.answer(reply, b"a", asked(offset))
    assert [offset for _, _, offset in readers.reads] == [PART, 2 * PART]  # and no more wait
    del said[:]
    await blob.write(part(PART))
    await readers.reads[b"a", "v1", PART]
    assert [(to, answer.offset, len(answer.data)) for to, answer in said] == [(b"a", PART, PART)]
    blob.file.unlink()
    await readers.answer(reply, b"b", asked(0))
    await readers.reads[b"b", "v1", 0]
    assert "cannot be read" in said[-1][1].problem
    (waiting,) = readers.reads.values()
    readers.close()
    await asyncio.wait([waiting])
    assert not readers.reads


class Holder(Asked):
    """Gives `PART` bytes at once; loses the questions that `lost` says, and may damage parts. Patient for 20 s."""

    def __init__(self, lost=lambda number: False, damaged=False):
        self.asked, self.answers, self.lost, self.damaged = [], asyncio.Queue(), lost, damaged
        super().__init__("v1", self._take, self.answers.get)

    async def patience(self):
        if self.silent >= 20:
            raise ValueError("it is silent")
        return 20

    async def _take(self, question):
        self.asked.append(question.offset)
        if not self.lost(len(self.asked)):
            length = min(question.length, PART)
            self.answers.put_nowait(part(question.offset, self.damaged, length))


@virtual
async def test_what_is_lost_is_asked_for_again_and_nothing_twice(tmp_path):
    blob, holder = await made(tmp_path / "a", PART), Holder(lambda number: number <= 2)
    await holder.fetch(blob)
    assert blob.file.read_bytes() == BYTES.tobytes()
    assert holder.asked == [0, 2 * PART, 3 * PART, 0, 2 * PART]


@virtual
async def test_a_source_of_damaged_parts_alone_and_a_silent_one_are_given_up(tmp_path):
    blob = await made(tmp_path / "a")
    damaging = Holder(damaged=True)
    with pytest.raises(ValueError, match=f"{MAX_DAMAGED} parts in a row arrived damaged"):
        await damaging.fetch(blob)
    assert len(damaging.asked) < 2 * MAX_DAMAGED
    before = asyncio.get_running_loop().time()
    with pytest.raises(ValueError, match="it is silent"):
        await Holder(lambda number: True).fetch(blob)
    assert asyncio.get_running_loop().time() - before == 20


@pytest.mark.parametrize(
    ("size", "part", "most"),
    [(1, 2, 8), (127, 2, 8), (128, 2, 8), (255, 2, 8), (256, 4, 8), (448, 6, 5), (512, 8, 4), (10**6, 8, 4)],
)
def test_long_streams_have_long_parts_and_fewer_in_flight(size, part, most):
    assert part_bytes(size * 2**20) == part * 2**20
    assert window(part * 2**20) == most
    assert not part_bytes(size * 2**20) % PART  # else what peers of before give of one overlaps the next


@virtual
async def test_peers_of_before_give_and_get_parts_of_their_own_size(tmp_path, monkeypatch):
    monkeypatch.setattr(blobs, "part_bytes", lambda size: 2 * PART)
    blob, holder = await made(tmp_path / "a"), Holder(lambda number: number == 3)
    await holder.fetch(blob)
    assert blob.file.read_bytes() == BYTES.tobytes()
    assert holder.asked == [0, 2 * PART, PART, 3 * PART, PART]  # the rests, one of which is lost
    given = await blob.part(asked(PART), asyncio.Semaphore(1))
    assert (given.offset, given.data.tobytes()) == (PART, BYTES[PART : 2 * PART].tobytes())
