"""`seer spans` against a collector that takes spans, refuses them, fails for a while, or hangs."""

import asyncio
import contextlib
import math
import time

import pytest
from log_spans import spans_of
from logged_buffer import LoggedBuffer
from otlp_receiver import Receiver, attributes
from virtual_time import eventually

from seer.common.config import Config
from seer.common.errors import InvalidField, Unreachable
from seer.services.buffer.log import log_folder, rows
from seer.services.buffer.requests import events
from seer.spans import service as service_module
from seer.spans.collector import Answer, Collector
from seer.spans.service import SpanService
from seer.spans.span_reader import Ended, Place


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def log(tmp_path):
    buffer = LoggedBuffer(tmp_path / "log", incarnation=26)
    for number in range(3):
        buffer.roll(number)
    buffer.log.close()
    return tmp_path / "log"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(service_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(service_module, "PAUSE_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")


def serving(log, url, *, oldest=math.inf, once=True):
    return SpanService(Config(), None, None, log=log, otlp=url, oldest=oldest, once=once)


async def run(service):
    await service.start()
    await asyncio.wait_for(service.run(), 20)


@contextlib.asynccontextmanager
async def following(log, url, **options):
    service = serving(log, url, once=False, **options)
    await service.start()
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        service.drain()
        await asyncio.wait_for(task, 10)


def place_of(span):
    return Place(int.from_bytes(span.trace_id), int.from_bytes(span.span_id))


async def test_what_arrives_is_what_the_log_says(log, receiver):
    service = serving(log, f"{receiver.url}/")
    await run(service)
    expected = {span.place: span for span in spans_of(log)[0]}
    assert {place_of(span): span.name for span in receiver.spans} == {
        place: span.name for place, span in expected.items()
    }
    for span in receiver.spans:
        meant = expected[place_of(span)]
        assert attributes(span) == meant.attributes
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (
            int(meant.start * 1e9),
            int(meant.end * 1e9),
        )
        assert int.from_bytes(span.parent_span_id) == (meant.parent.span if meant.parent else 0)
        assert [
            Place(int.from_bytes(each.trace_id), int.from_bytes(each.span_id)) for each in span.links
        ] == ([meant.link] if meant.link else [])
    [resource] = {each["service.instance.id"] for each in receiver.resources}
    assert log_folder.segments(log)[0].name.startswith(resource)
    assert service._sent == len(receiver.spans) == len(expected)


@pytest.mark.parametrize("status", [503, 429])
async def test_while_the_collector_fails_the_log_waits_and_nothing_is_lost(log, receiver, status):
    receiver.status = status
    async with following(log, receiver.url) as service:
        await eventually(lambda: receiver.tries > 2)
        assert len(service._batch) < 2 * service_module.BATCH
        receiver.status = 200
        await eventually(
            lambda: len(receiver.spans) >= len(spans_of(log)[0]) - 3
        )  # rollouts end once it is quiet
    assert not service._dropped


async def test_a_collector_that_is_back_at_its_address_gets_what_it_missed(log, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")  # a busy machine takes a while to read spans
    port = receiver.server_port
    receiver.close()
    async with following(log, f"http://127.0.0.1:{port}"):
        await asyncio.sleep(0.3)
        back = Receiver(port)
        await eventually(lambda: len(back.named("group")) == 12, 60)
    back.close()


async def test_spans_that_became_too_old_are_dropped_and_counted(log, receiver):
    receiver.status = 503
    async with following(log, receiver.url) as service:
        await eventually(lambda: receiver.tries)
        waiting = len(service._batch)
        service._oldest = -math.inf  # as if time had passed
        await eventually(lambda: service._dropped.total() >= waiting > 0)
        receiver.status = 200
    assert not receiver.spans


@pytest.mark.parametrize("status", [301, 302, 308, 400, 401, 404, 500])
async def test_refused_spans_are_dropped_and_counted(log, receiver, status):
    receiver.status = status
    service = serving(log, receiver.url)
    await run(service)
    assert (service._sent, dict(service._dropped)) == (0, {"refused": len(spans_of(log)[0])})
    assert receiver.tries == 1


async def test_a_part_that_was_rejected_is_counted(log, receiver):
    receiver.rejects = 3
    service = serving(log, receiver.url)
    await run(service)
    assert dict(service._dropped) == {"refused": 3}


async def test_it_ends_in_time_though_the_collector_hangs(log, receiver, monkeypatch):
    monkeypatch.setattr(service_module, "FLUSH_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    receiver.stuck.clear()
    async with following(log, receiver.url) as service:
        await eventually(lambda: receiver.tries)
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert service._dropped["unsent"] > 0


async def test_what_the_collector_did_not_take_in_time_is_counted(log, receiver, monkeypatch):
    monkeypatch.setattr(service_module, "FLUSH_SECONDS", 0.5)
    monkeypatch.setattr(service_module, "PAUSE_SECONDS", 0.8)
    receiver.status = 429
    async with following(log, receiver.url) as service:
        await eventually(lambda: receiver.tries)
    assert service._dropped["unsent"] > 0
    assert receiver.tries < 12, "a collector that has too much to do is asked without a pause"


async def test_what_is_left_is_sent_before_it_ends(log, receiver, monkeypatch):
    monkeypatch.setattr(service_module, "POLL_SECONDS", 30.0)
    async with following(log, receiver.url):
        await eventually(lambda: receiver.spans)
        known = len(receiver.spans)
        buffer = LoggedBuffer(log, incarnation=27)
        buffer.roll(9)
        buffer.log.close()
    assert len(receiver.spans) > known


async def test_what_is_written_while_it_sends_is_sent_before_it_ends(log, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10")
    receiver.stuck.clear()
    async with following(log, receiver.url) as service:
        await eventually(lambda: receiver.tries)
        buffer = LoggedBuffer(log, incarnation=27)
        buffer.roll(9)
        buffer.log.close()
        service.drain()
        receiver.stuck.set()
    assert len(receiver.named("group")) == 16


async def test_once_gives_up_a_collector_that_stays_away(log, monkeypatch):
    monkeypatch.setattr(service_module, "PATIENCE_SECONDS", 0.3)
    with pytest.raises(Unreachable, match="the collector took no spans"):
        await run(serving(log, "http://127.0.0.1:9"))


async def test_a_log_that_is_not_there_yet_is_awaited_and_rows_of_no_sense_stop_nothing(tmp_path, receiver):
    async with following(tmp_path / "log", receiver.url):
        buffer = LoggedBuffer(tmp_path / "log", incarnation=1)
        buffer.roll(0)
        buffer.log.close()
        with log_folder.segments(tmp_path / "log")[0].open("ab") as file:
            file.write(
                b'[9e9,["Tick"],[["Dispatch","a","no number",7,8]]]\n[9e9,["Tick"],[["Restore","unknown"]]]\n'
            )
        buffer = LoggedBuffer(tmp_path / "log", incarnation=2)
        buffer.roll(1)
        buffer.log.close()
        await eventually(lambda: len(receiver.named("group")) == 8)


async def test_a_row_whose_numbers_are_too_large_stops_nothing(log, receiver):
    row = events.GroupsSubmitted("t", "r", 1, 8, [events.GroupSpec("p", 8)], submission=4242)
    with log_folder.segments(log)[-1].open("ab") as file:
        file.write(rows.line(9e5, row, []).replace(b"4242", b"%d" % 2**70))
    buffer = LoggedBuffer(log, incarnation=27)
    buffer.roll(9)
    buffer.log.close()
    await run(serving(log, receiver.url))
    assert len(receiver.named("group")) == 16


async def test_a_fault_of_its_own_is_raised(log, receiver, monkeypatch):
    monkeypatch.setattr(SpanService, "_keep", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await run(serving(log, receiver.url))


@pytest.mark.parametrize(
    "url",
    [
        "localhost:4318",
        "ftp://a",
        "http://",
        "/v1/traces",
        "http://[::1",
        "http://a:b",
        "http://a:99999",
        "http://a/?key=b",
    ],
)
def test_an_address_of_no_use_is_refused(log, url):
    with pytest.raises(InvalidField, match="--otlp"):
        serving(log, url)


def test_no_log_is_refused_at_once(tmp_path):
    with pytest.raises(InvalidField, match="LOG"):
        serving(tmp_path / "nothing", "")


@pytest.mark.parametrize("text", ["a\0\n\x1b[31m\u202e", "é" * 5000, "", '\U0001f600/#"'])
def test_whatever_a_log_says_can_be_sent(receiver, text):
    numbers = {"large": 2**64 - 1, "low": -(2**70), "flag": True, "texts": [text, "b"], text or "empty": text}
    collector = Collector(receiver.url)
    for start, end in ((-1.0, 1e300), (float("inf"), 2.0), (5.0, 4.0)):
        span = Ended("chunk", Place(1, 2), None, start, end, numbers, error=text)
        assert collector.send([span]) is Answer.TAKEN
        got = receiver.spans[-1]
        assert got.end_time_unix_nano >= got.start_time_unix_nano
        assert attributes(got)["texts"] == [text[:1024], "b"]
    assert collector.send([span._replace(name="\ud800")]) is Answer.REFUSED
    collector.close()
