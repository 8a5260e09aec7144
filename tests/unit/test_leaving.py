"""When a machine's notice says that an engine must leave, and what the engine hands back before."""

from __future__ import annotations

import asyncio
import http.server
import os
import threading
from datetime import UTC, datetime

import pytest
from engine_system import REPLAY, engine, eventually
from msgspec import structs
from virtual_time import virtual

from seer.common.clock import LoopClock
from seer.common.config import Config
from seer.common.types import InstanceStats
from seer.services.engine import leaving
from seer.services.engine.leaving import LEAST_NOTICE_SECONDS, noticed, seconds_left
from seer.services.engine.replay.backend import ReplayBackend

NOW = datetime(2026, 11, 28, 8, 20, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", LEAST_NOTICE_SECONDS),
        ("TRUE\n", LEAST_NOTICE_SECONDS),
        ("FALSE", None),
        ("45.5", 45.5),
        ('{"action": "terminate", "time": "2026-11-28T08:22:00Z"}', 120.0),
        ('{"action": "stop", "time": "2026-11-28T10:22:00+02:00"}', 120.0),
        ('{"DocumentIncarnation": 3, "Events": []}', None),
        ('{"Events": [{"EventType": "Reboot", "NotBefore": ""}]}', None),
        ('{"Events": [{"EventType": "Preempt", "NotBefore": ""}]}', LEAST_NOTICE_SECONDS),
        (
            '{"Events": [{"EventType": "Terminate", "NotBefore": "Sat, 28 Nov 2026 08:25:00 GMT"},'
            ' {"EventType": "Preempt", "NotBefore": "Sat, 28 Nov 2026 08:20:30 GMT"}]}',
            30.0,
        ),
    ],
)
def test_a_notice_says_how_long_the_machine_lives(text, seconds):
    assert seconds_left(text, NOW) == seconds


def test_a_notice_that_is_nested_too_deep_is_none():
    with pytest.raises(RecursionError):
        seconds_left("[" * 60_000, NOW)


@pytest.mark.parametrize("text", ["soon", "{", '{"time": 5}', '{"time": "soon"}', "[1]", '{"Events": 3}'])
def test_other_text_is_no_notice(text):
    with pytest.raises(ValueError, match=r"\S"):
        seconds_left(text, NOW)


def test_what_would_block_its_reader_is_no_notice(tmp_path):
    os.mkfifo(tmp_path / "notice")
    told = []

    def read():
        with pytest.raises(OSError, match="not a regular file") as info:
            leaving._read(str(tmp_path / "notice"))
        told.append(info)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(5)
    assert told


@virtual
async def test_a_file_that_cannot_be_read_is_no_notice_and_the_next_text_counts(tmp_path):
    notice = tmp_path / "notice"
    looking = asyncio.create_task(noticed(str(notice), LoopClock()))
    for text in (None, "soon", "[" * 60_000, '{"Events": [3]}', "FALSE"):
        if text is not None:
            notice.write_text(text)
        await asyncio.sleep(5)
        assert not looking.done()
    notice.write_text("12")
    assert await looking == 12.0


async def test_an_address_that_finds_nothing_or_fails_is_no_notice():
    answers = [(404, ""), (500, "no"), (200, "FALSE"), (200, "TRUE")]

    class Machine(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = answers.pop(0)
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Machine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}/preempted"
        try:
            assert await noticed(where, LoopClock()) == LEAST_NOTICE_SECONDS
        finally:
            server.shutdown()
    assert not answers


async def test_what_speaks_no_http_is_no_notice():
    answers = [
        b"nonsense\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nTR",
        b"HTTP/1.0 200 OK\r\n\r\n7",
    ]

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await noticed(f"http://127.0.0.1:{port}/", LoopClock()) == 7.0
    assert not answers


class Saving(ReplayBackend):
    """Saves KV of chunks that it handed back for so many seconds."""

    def __init__(self, config, seconds):
        super().__init__(config, Config().shared)
        self.seconds, self.until = seconds, 0.0

    def end(self, request_id, attempt):
        super().end(request_id, attempt)
        self.until = asyncio.get_running_loop().time() + self.seconds

    def stats(self):
        saves = asyncio.get_running_loop().time() < self.until
        return InstanceStats(pinned_blocks=3 if saves else 0)


@pytest.mark.parametrize(
    ("notice", "saves", "leaves_after"),
    [
        (None, 4.0, 4.0),
        (None, 99.0, 10.0),
        ("120", 60.0, 60.0),
        ("120", 900.0, 115.0),
        ("2", 900.0, 0.0),
        ("1e300", 9e9, 600.0),
    ],
)
@virtual
async def test_it_leaves_once_its_kv_is_saved_or_the_time_is_up(tmp_path, notice, saves, leaves_after):
    where = tmp_path / "notice"
    config = structs.replace(REPLAY, leave_notice=str(where))
    async with engine(config, Saving(config, saves)) as (buffer, server, running, _):
        await buffer.run(0, new=4000)
        await asyncio.sleep(2)
        if notice is None:
            server.drain()
        else:
            where.write_text(notice)
            await eventually(lambda: server._leaving.begun)
        begun = asyncio.get_running_loop().time()
        if leaves_after:
            await asyncio.sleep(0.5)
            await buffer.run(1, new=50)  # comes too late
        await running
        took = asyncio.get_running_loop().time() - begun
        assert leaves_after - 0.1 <= took < leaves_after + 2  # `begun` is seen a moment later
        (result,) = buffer.results().values()
        assert (result.finish, result.request_id[-1]) == ("", "0")
        assert result.count > 100
