"""Calls between a gateway's processes: the list in `seer.gateway.process_calls`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from seer.common.errors import InvalidField
from seer.gateway import process_calls as link_module
from seer.gateway.errors import HttpError
from seer.gateway.process_calls import Link, LinkLost, Serve


async def echo(name: str, arguments: list[object]) -> object:
    return [name, *arguments]


@asynccontextmanager
async def pair(
    one: Serve = echo, other: Serve = echo
) -> AsyncIterator[tuple[Link, Link, list[asyncio.Task[None]]]]:
    ends = socket.socketpair()
    links = [await Link.over(end, serve) for end, serve in zip(ends, (one, other), strict=True)]
    tasks = [asyncio.create_task(each.run()) for each in links]
    try:
        yield links[0], links[1], tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_calls_go_both_ways_at_once() -> None:
    async with pair() as (one, other, _):
        calls = [each.call("f", i, "é\n", seconds=60) for each in (one, other) for i in range(50)]
        assert await asyncio.gather(*calls) == [["f", i, "é\n"] for _ in range(2) for i in range(50)]


async def test_calls_begin_in_order_and_may_end_in_another() -> None:
    began: list[object] = []
    release = asyncio.Event()

    async def slow(name: str, arguments: list[object]) -> object:
        began.append(name)
        if name == "first":
            await release.wait()
        else:
            release.set()
        return name

    async with pair(other=slow) as (one, _, _tasks):
        calls = [one.call(name, seconds=60) for name in ("first", "second")]
        assert await asyncio.gather(*calls) == ["first", "second"]
    assert began == ["first", "second"]


async def test_errors_come_back_with_their_status() -> None:
    async def failing(name: str, arguments: list[object]) -> object:
        raise {
            "http": HttpError(409, "busy", "p"),
            "field": InvalidField("f", 1, "no"),
            "bug": KeyError("x"),
        }[name]

    async with pair(other=failing) as (one, _, _tasks):
        for name, status, param in (("http", 409, "p"), ("field", 400, "f"), ("bug", 500, None)):
            with pytest.raises(HttpError) as info:
                await one.call(name, seconds=60)
            assert (info.value.status, info.value.param) == (status, param)


async def test_calls_end_when_the_other_side_does() -> None:
    async def never(name: str, arguments: list[object]) -> object:
        await asyncio.Event().wait()
        return None

    async with pair(other=never) as (one, _, tasks):
        call = asyncio.create_task(one.call("f", seconds=600))
        await asyncio.sleep(0)
        tasks[1].cancel()
        with pytest.raises(LinkLost):
            await call
        await tasks[0]
        with pytest.raises(LinkLost):
            await one.call("f", seconds=600)


async def test_a_call_has_a_deadline() -> None:
    async def never(name: str, arguments: list[object]) -> object:
        await asyncio.Event().wait()
        return None

    async with pair(other=never) as (one, _, _tasks):
        with pytest.raises(TimeoutError):
            await one.call("f", seconds=0.01)


async def test_calls_that_are_served_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MOST_CALLS", 3)
    release = asyncio.Event()

    async def wait(name: str, arguments: list[object]) -> object:
        await release.wait()
        return 0

    async with pair(other=wait) as (one, _, _tasks):
        calls = [asyncio.create_task(one.call("f", seconds=60)) for _ in range(4)]
        with pytest.raises(HttpError, match="3 calls of this process"):
            await calls[3]
        release.set()
        assert await asyncio.gather(*calls[:3]) == [0, 0, 0]


async def test_a_call_or_an_answer_that_is_too_long_fails_alone() -> None:
    async def long(name: str, arguments: list[object]) -> object:
        return "x" * (link_module.LINE_BYTES if name == "long" else 1)

    async with pair(other=long) as (one, _, _tasks):
        for name, status in (("short", 413), ("long", 500)):
            with pytest.raises(HttpError, match="longer than") as info:
                await one.call(name, "" if name == "long" else "x" * link_module.LINE_BYTES, seconds=5)
            assert info.value.status == status
        assert await one.call("short", seconds=5) == "x"
