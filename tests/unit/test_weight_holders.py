"""When an engine leaves another one that it copies weights from, and how it gives its own copy away."""

import asyncio
import tempfile
import threading

import pytest
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import virtual

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.errors import ConfigError
from seer.common.net.identity import Identity
from seer.services.engine.weights.delta_source import DeltaSource
from seer.services.engine.weights.fetcher import WeightFetcher
from seer.services.engine.weights.holders import AVOID_SECONDS, GONE, HOLDER_BYTES, Copy, Patience, Peers


def judge(patience, *intervals):
    """Return the problem of each interval: (bytes here at its end, bytes the holder had at its beginning)."""
    return [patience.problem(got, had) for got, had in intervals]


def test_who_sends_enough_is_kept_even_if_it_says_nothing_else():
    assert judge(Patience(1, 0), (HOLDER_BYTES, None), (2 * HOLDER_BYTES, 5 * HOLDER_BYTES)) == ["", ""]


def test_who_answers_nothing_is_left():
    assert judge(Patience(3, 0), (0, None)) == ["answered nothing for 10 s"]
    assert judge(Patience(3, 0), (HOLDER_BYTES - 1, None)) == ["answered nothing for 10 s"]


@pytest.mark.parametrize("got", [0, 1000, HOLDER_BYTES - 1])
def test_who_has_more_and_sends_it_slowly_is_left(got):
    (problem,) = judge(Patience(3, 0), (got, 3 * HOLDER_BYTES))
    assert problem == f"has {3 * HOLDER_BYTES} bytes of it, and sent only {got} in 10 s"


def test_who_sends_all_that_it_had_is_kept_however_little_that_is():
    patience = Patience(1, 0)
    assert judge(patience, (10, 10), (20, 15), (30, 30)) == ["", "", ""]
    assert not patience.waited_in_vain


def test_who_gets_no_further_is_left_the_later_the_more_are_in_between():
    near, far = Patience(1, 0), Patience(3, 0)
    for patience in (near, far):
        assert judge(patience, (10, 10), (10, 10)) == ["", ""]
    assert (near.waited_in_vain, far.waited_in_vain) == (True, False)
    judge(far, (10, 10), (10, 10))
    assert far.waited_in_vain
    judge(far, (15, 15))  # it goes on
    assert not far.waited_in_vain


def peers(transport):
    return Peers(transport, identity("a"), LoopClock())


def identity(name):
    return Identity(role="engine", name=name, incarnation=1, config_hash="same")


async def test_an_engine_says_what_it_has_and_what_it_deleted():
    mine, copy = peers(None), Copy("v1", 100)
    assert mine._find("v1") == ""  # it may come
    mine.offer(copy)
    assert mine._find("v1") is copy
    assert mine._find("v2") == ""
    mine.withdraw(copy)
    copy.end(GONE)
    copy.delete()
    assert mine._find("v1") == GONE
    assert not copy.folder.exists()
    with pytest.raises(ValueError, match=GONE):
        await copy.part(wire.ReadSpool(name=copy.name, offset=0), asyncio.Semaphore())


@virtual
async def test_a_holder_of_no_use_is_left_alone_for_a_while():
    mine = peers(None)
    mine.avoid("b")
    assert mine.usable(["a", "b", "c"]) == ["a", "c"]
    await asyncio.sleep(AVOID_SECONDS)
    assert mine.usable(["b"]) == ["b"]


@pytest.mark.parametrize(
    ("configured", "buffer", "bound"),
    [
        ("", "ipc:///tmp/buffer", False),
        ("", "tcp://127.0.0.1:7102", False),
        ("", "tcp://no.such.host.invalid:7102", False),
        ("off", "tcp://10.0.0.1:7102", False),
        ("tcp://a:7", "tcp://127.0.0.1:7102", True),
    ],
)
async def test_where_an_engine_listens(configured, buffer, bound):
    server = peers(MemoryTransport(MemoryNetwork()))
    endpoint = await server.start(configured, buffer)
    assert endpoint == ("tcp://a:7" if bound else "")
    server.close()


async def test_an_endpoint_that_is_taken_is_refused_by_the_setting():
    transport = MemoryTransport(MemoryNetwork())
    await transport.router("tcp://a:7")
    with pytest.raises(ConfigError, match=r"engine\.weights_endpoint = 'tcp://a:7': cannot bind"):
        await peers(transport).start("tcp://a:7", "")


async def test_a_cancelled_discard_deletes_every_copy(monkeypatch):
    mine = peers(None)
    fetcher = WeightFetcher(None, peers=mine)
    copies = [Copy("v1", 100), Copy("v1.delta", 10), Copy("v0", 100)]
    for copy in copies:
        mine.offer(copy)
    delta = DeltaSource(copies[0], None, None)
    fetcher._copy, fetcher._delta, fetcher._outdated = copies[0], delta, copies[2]
    delta.copy = copies[1]
    waiting = asyncio.create_task(fetcher.discard())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert [mine._find(copy.name) for copy in copies] == [GONE] * 3
    assert [copy.folder.exists() for copy in copies] == [False] * 3


async def test_a_copy_that_is_cancelled_as_it_begins_leaves_no_folder(tmp_path, monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def slow(copy, fix):
        begun.set()
        goes_on.wait()
        (copy.folder / "late").touch()

    async def send(question):
        fetcher.arrived(wire.SpoolState(name="v1", size=100, have=0))

    monkeypatch.setattr(Copy, "begin", slow)
    fetcher = WeightFetcher(send)
    fetching = asyncio.create_task(fetcher.folder("spool:v1"))
    await asyncio.to_thread(begun.wait)
    fetching.cancel()
    await asyncio.wait([fetching], timeout=0.05)
    try:
        assert list(tmp_path.iterdir()), "what is being written is not deleted"
    finally:
        goes_on.set()
    await asyncio.wait([fetching])
    assert not list(tmp_path.iterdir())
