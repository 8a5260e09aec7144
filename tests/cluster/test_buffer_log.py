"""What a buffer logs runs through its machines again, bit for bit, whatever happened to it."""

import asyncio
import re
import tempfile

import pytest
from cluster_harness import Cluster, folder, roll, running
from virtual_time import VIRTUAL, eventually, virtual

from seer.common.config import BufferConfig
from seer.common.errors import ConfigError
from seer.prompt_trace.way import follow
from seer.services.buffer.log.log_folder import incarnations
from seer.services.buffer.log.replay import replay, replay_incarnation
from seer.services.buffer.log.rows import LogError, read
from seer.services.buffer.requests.instructions import Dispatch
from seer.services.buffer.requests.request_machine import RequestMachine

pytestmark = VIRTUAL


async def eventful(tmp_path):
    """Run rollouts through an update, sleep, and the loss of an engine and of the buffer; return the logs."""
    logs = tmp_path / "log"
    settings = BufferConfig(policy="seer", chunk_size=8, log=str(logs))
    async with running(engines=2, buffer=settings) as cluster, cluster.client() as client:
        await roll(client)
        work = asyncio.create_task(roll(client, number=1))
        await eventually(lambda: cluster.services["buffer"].machine.counters["chunks"] > 150)
        await cluster.kill("e0")
        await cluster.start("e0")
        await work
        await client.update_weights(1, folder(tmp_path / "w1", 1.0))
        await client.sleep(30, level=2)
        await client.wake(30, tags=["weights"])
        await client.wake(30)
        work = asyncio.create_task(roll(client, number=2, rollout_id="r2"))
        await asyncio.sleep(0.05)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        await work
    return sorted(logs.iterdir(), key=lambda path: read(path)[0].clock)


async def test_a_log_runs_through_the_machines_again(tmp_path):
    first, second = await eventful(tmp_path)
    for path in (first, second):
        header, lines = read(path)
        lines = list(lines)
        assert header.policy == "seer"
        machine = replay(header, lines)
        assert machine.requests.counters["chunks"] == sum(
            isinstance(item, Dispatch) for each in lines for item in each.out
        )
        assert machine.weights.live.version == 1
    assert not machine.requests.requests


async def test_a_trace_has_every_chunk_of_a_prompt_and_what_became_of_it(tmp_path):
    segments = [(header, list(lines)) for header, lines in map(read, await eventful(tmp_path))]
    groups = {
        (item.request_id.rpartition("#")[0])
        for _, lines in segments for each in lines for item in each.out if isinstance(item, Dispatch)
    }  # fmt: skip
    for group_id in groups:
        told = follow(segments, group_id)
        placed = [
            item for _, lines in segments for each in lines for item in each.out
            if isinstance(item, Dispatch) and item.request_id.rpartition("#")[0] == group_id
        ]  # fmt: skip
        assert sum("(chunk " in line for line in told) == len(placed)
        ends = [line for line in told if re.search(r"#\d+ (\d+ tokens from|lost|failed|dropped)", line)]
        assert len(ends) == len(placed)
        assert "acknowledged by trainer" in told[-1]
    assert sum("lost with engine e0" in line for each in groups for line in follow(segments, each))
    assert sum("lost with the buffer" in line for each in groups for line in follow(segments, each))


async def test_another_answer_is_found_and_half_a_line_is_no_error(tmp_path):
    path, _ = await eventful(tmp_path)
    text = path.read_bytes()
    path.write_bytes(text[:-7])
    _, lines = read(path)
    whole = text.count(b"\n")
    assert len(list(lines)) == whole - 2  # without the header, and the last
    changed = text.replace(b'["Dispatch","e1"', b'["Dispatch","e0"', 1)
    assert changed != text
    path.write_bytes(changed)
    with pytest.raises(LogError, match=r"line .* answered"):
        replay(*read(path))


async def test_what_is_no_log_is_refused_by_name(tmp_path):
    path = tmp_path / "x.jsonl"
    for text in (b"", b"hello\n", b'{"policy": 5}\n'):
        path.write_bytes(text)
        with pytest.raises(LogError, match="is not a log of a buffer"):
            read(path)
    path.write_bytes(b'{"format": 9, "policy": "seer", "limits": {"chunk_size": 1}, "update_seconds": 1}\n')
    with pytest.raises(LogError, match="format 9"):
        read(path)


async def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    cluster = Cluster(buffer=BufferConfig(log=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"buffer\.log = "):
        await cluster.start("buffer")


def faulty(self, event, now, out):
    if self.counters["chunks"] > 40:
        raise KeyError("a bug")
    ended(self, event, now, out)


ended = RequestMachine._chunk_ended


@pytest.mark.parametrize("logged", [False, True])
def test_what_a_buffer_crashes_at_can_be_replayed(tmp_path, monkeypatch, logged):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(RequestMachine, "_chunk_ended", faulty)
    crash(tmp_path / "seer-crash-log" if logged else "")
    [folder] = tmp_path.glob("seer-crash-*")
    [paths] = incarnations(folder)
    with pytest.raises(LogError, match=r"line \d+: ChunkEnded.* fails at .*\(faulty\): KeyError\('a bug'\)"):
        list(replay_incarnation(paths))
    monkeypatch.undo()
    with pytest.raises(LogError, match=r"line \d+: ChunkEnded.* is answered by .*, in the log by nothing"):
        list(replay_incarnation(paths))


@virtual
async def crash(log):
    settings = BufferConfig(chunk_size=8, log=str(log))
    async with running(engines=1, buffer=settings) as cluster, cluster.client() as client:
        work = asyncio.create_task(roll(client))
        [buffer] = [task for task in asyncio.all_tasks() if task.get_name() == "buffer"]
        await asyncio.wait([buffer])
        assert isinstance(buffer.exception(), ExceptionGroup)
        work.cancel()


@virtual
async def quiet_end():
    async with running(engines=1) as cluster, cluster.client() as client:
        await roll(client)
        await cluster.kill("buffer")


def test_a_buffer_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    quiet_end()
    assert not list(tmp_path.glob("seer-crash-*"))
