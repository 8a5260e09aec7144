"""Jobs in processes that can be ended: the lists in `seer.gateway.jobs` and `seer.gateway.job_processes`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
from gateway_system import MODEL, TEMPLATE

from seer.gateway import job_processes
from seer.gateway.errors import HttpError
from seer.gateway.job_processes import JobProcesses
from seer.gateway.jobs import Answer

FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
"""A template of a request's own, which is trusted here."""

CHAT = [{"role": "user", "content": "1"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs") / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
async def processes(model: Path) -> AsyncIterator[JobProcesses]:
    found = JobProcesses(str(model), trust=True)
    found.start()
    yield found
    found.close()


def children(processes: JobProcesses) -> list[str]:
    process = processes._process
    assert process is not None
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


async def ended(processes: JobProcesses) -> None:
    async with asyncio.timeout(60):
        while children(processes):
            await asyncio.sleep(0.02)


async def test_jobs_answer_as_the_calls_do_and_errors_name_their_field(processes: JobProcesses) -> None:
    [ids] = await processes.run("prompt", "encode", ["1 + 2"], False)
    assert await processes.run("tokens", "decode", ids) == "1 + 2"
    assert len(await processes.run("tokens", "tokens", ids)) == len(ids)
    assert (
        await processes.run("messages", "chat", CHAT, {}, False)
        == (await processes.run("prompt", "encode", ["1 ="], False))[0]
    )
    for name, given, says in (
        ("chat", (CHAT, {"template": "{{ 1 / 0 }}"}, False), "the chat template cannot take this"),
        ("chat", (CHAT, {"arguments": {"tokenize": True}}, False), "has a field of its own"),
        ("encode", (["1", 5], False), "cannot be taken"),
        ("decode", ([2**60],), "cannot be taken"),
        ("chat", (CHAT, {"arguments": {"a": 10**30}}, False), "whole numbers must be between"),
        (
            "chat",
            ([{"role": "user", "content": "1"}], {"template": "{{ [[1] * 9] * 9 | map('x') }}"}, False),
            "f",
        ),
        ("image", ("image", b"GIF89a"), "cannot be run"),
        ("pixels", ([("image", b"GIF89a")],), "cannot be run"),
    ):
        with pytest.raises(HttpError, match=says) as info:
            await processes.run("f", name, *given)
        assert info.value.status == 400


async def test_the_process_that_forks_has_one_thread(processes: JobProcesses) -> None:
    await processes.run("prompt", "encode", ["1"], False)
    assert processes._process is not None
    assert threads(processes._process.pid) == 1


async def test_a_job_that_nobody_waits_for_is_ended_and_quick_ones_wait_for_none(
    processes: JobProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More endless jobs than may run at once: a quick one is answered meanwhile."""
    await processes.run("prompt", "encode", ["1"], False)
    monkeypatch.setattr(job_processes, "QUICK_SECONDS", 3.0)
    endless = [
        asyncio.create_task(processes.run("messages", "chat", CHAT, {"template": FOREVER}, False))
        for _ in range(4)
    ]
    while not children(processes):
        await asyncio.sleep(0.02)
    assert await processes.run("prompt", "encode", ["1"], False)
    assert not any(task.done() for task in endless)
    for task in endless:
        task.cancel()
    await asyncio.wait(endless)
    await ended(processes)
    assert await processes.run("prompt", "encode", ["1"], False)


async def test_what_takes_too_long_or_too_much_is_refused_by_its_field(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = JobProcesses(str(model), trust=True, seconds=1)
    monkeypatch.setattr(job_processes, "QUICK_SECONDS", 0.1)
    processes.start()
    try:
        for given in ({"template": FOREVER}, {"template": "{{ 'a' * 10**11 }}"}):
            with pytest.raises(HttpError, match=r"takes more than 1 s of a core|MemoryError") as info:
                await processes.run("messages", "chat", CHAT, given, False)
            assert (info.value.status, info.value.param) == (400, "messages")
    finally:
        processes.close()


async def test_a_process_that_died_is_started_again(processes: JobProcesses) -> None:
    await processes.run("prompt", "encode", ["1"], False)
    assert processes._process is not None
    processes._process.kill()
    processes._process.wait()
    assert await processes.run("prompt", "encode", ["1"], False)


async def test_a_job_that_a_dead_process_had_is_not_refused_by_its_bounds(
    processes: JobProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request has started the process again before the job's own is told of the death."""
    monkeypatch.setattr(job_processes, "QUICK_SECONDS", 60.0)
    job = asyncio.create_task(processes.run("prompt", "encode", ["1"], False))
    await asyncio.sleep(0.05)  # it is asked for, and the process still loads
    processes.start()
    with pytest.raises(HttpError, match="it is started again") as info:
        await job
    assert info.value.status == 503


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> tuple[JobProcesses, socket.socket]:
    """Return processes of which that which forks has yet to read as many jobs as its socket takes, and its end."""
    monkeypatch.setattr(job_processes, "QUICK_SECONDS", 60.0)
    processes = JobProcesses("model", trust=False)
    processes._process = MagicMock(poll=lambda: None)
    processes._control, theirs = socket.socketpair()
    processes._control.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            socket.send_fds(processes._control, [b"j"], [2])
    return processes, theirs


async def test_a_job_waits_for_a_process_that_has_no_room_for_it_yet(
    loading: tuple[JobProcesses, socket.socket],
) -> None:
    processes, theirs = loading
    job = asyncio.create_task(processes.run("prompt", "encode", ["1"], False))
    await asyncio.sleep(0.05)
    assert not job.done()
    theirs.setblocking(False)
    while not job.done():
        with contextlib.suppress(BlockingIOError):
            _, [given], *_ = socket.recv_fds(theirs, 1, 1)
            if stat.S_ISSOCK(os.fstat(given).st_mode):
                with socket.socket(fileno=given) as asked:
                    await asyncio.to_thread(asked.recv, 1024)
                    asked.sendall(msgspec.msgpack.encode(Answer(result=[5])))
            else:
                os.close(given)
        await asyncio.sleep(0)
    assert await job == [5]
    theirs.close()
    processes.close()


async def test_a_process_that_has_no_room_for_a_job_for_too_long_is_named(
    loading: tuple[JobProcesses, socket.socket],
) -> None:
    processes, theirs = loading
    processes._seconds = 0
    with pytest.raises(HttpError, match="takes no work yet") as info:
        await processes.run("prompt", "encode", ["1"], False)
    assert info.value.status == 503
    theirs.close()
    processes.close()
