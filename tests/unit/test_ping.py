"""`python -m seer.cli.ping`: an answer, silence, and a mistake."""

import asyncio

import pytest

from seer.cli.ping import main, ping
from seer.common.clock import LoopClock
from seer.common.config import Config, Endpoints
from seer.common.errors import Unreachable
from seer.common.net.transport.zmq import ZmqTransport
from seer.services.dgds.server import make


async def test_a_running_service_answers_again_and_again():
    transport = ZmqTransport()
    server = make(Config(endpoints=Endpoints(dgds="tcp://127.0.0.1:0")), transport, LoopClock())
    endpoint = (await server.start())["dgds"]
    serving = asyncio.create_task(server.run())
    try:
        for _ in range(3):
            await ping(endpoint)
        assert server._hub.counters["refused"] == server._hub.counters["malformed"] == 0
        assert len(server._hub._peers) == 1
    finally:
        server.drain()
        await serving
        await transport.close()


async def test_a_service_whose_loop_hangs_does_not_answer():
    transport = ZmqTransport()
    router = await transport.router("tcp://127.0.0.1:0")  # bound, but nobody reads it
    try:
        with pytest.raises(Unreachable, match="did not answer"):
            await ping(router.endpoint, seconds=0.2)
    finally:
        await transport.close()


@pytest.mark.parametrize(("answer", "code"), [(b"200 OK", 0), (b"503 Service Unavailable", 1)])
async def test_the_pools_master_is_asked_over_http(capsys, answer, code):
    async def serve(reader, writer):
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 " + answer + b"\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    asked = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await asyncio.to_thread(main, [endpoint]) == code
    assert asked == [b"GET /health HTTP/1.1\r\n"]
    assert ("503" in capsys.readouterr().err) == bool(code)


def test_a_mistake_is_one_line(capsys):
    assert main([]) == 1
    assert main(["tcp://"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "usage: python -m seer.cli.ping ENDPOINT"
    assert err[1].startswith("error: ")
    assert len(err) == 2
