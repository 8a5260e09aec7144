"""The report of a rollout counts what the run itself counts, whatever dies meanwhile."""

import asyncio
import time
import types
import xml.etree.ElementTree as ET

import msgspec
import pytest
from cluster_harness import PROMPTS, folder, running
from log_spans import agreed
from virtual_time import VIRTUAL, eventually

from seer.client import SamplingParams
from seer.common.config import BufferConfig, EngineConfig
from seer.common.policy.tail import tail_seconds
from seer.report.command import write_reports
from seer.report.log_reader import read_timeline
from seer.report.lost_share import Part
from seer.report.records import End
from seer.report.view import RolloutView, choose_rollout, lay_out
from seer.services.buffer.log import log_folder, writer

pytestmark = VIRTUAL

SVG = "{http://www.w3.org/2000/svg}"


def settings(tmp_path, **options):
    return BufferConfig(policy="seer", chunk_size=8, log=str(tmp_path / "log"), **options)


async def submit(client, rollout_id, number=0):
    sampling = SamplingParams(max_tokens=60)
    return await client.submit(PROMPTS, n=2, sampling=sampling, rollout_number=number, rollout_id=rollout_id)


async def test_an_engine_that_died_is_in_the_report_and_the_counts_are_the_runs_own(tmp_path):
    async with running(engines=2, buffer=settings(tmp_path)) as cluster, cluster.client() as client:
        rollout = await submit(client, "<r&1>")
        machine = cluster.services["buffer"].machine
        work = asyncio.create_task(rollout.result())
        await eventually(lambda: machine.counters["chunks"] > 40)
        await cluster.kill("e0")
        await asyncio.sleep(0.05)
        await cluster.start("e0")
        groups = await work
        counters = dict(machine.counters)
    timeline, _, _ = agreed(tmp_path / "log")
    view = RolloutView(timeline, choose_rollout(timeline))
    chunks = view.rollout.chunks
    assert len(chunks) == counters["chunks"] == sum(group.chunks for group in groups)
    assert sum(chunk.tokens for chunk in chunks) == counters["tokens"]
    assert sum(chunk.moved for chunk in chunks) == counters["migrations"] == sum(g.migrations for g in groups)
    lost = [chunk for chunk in chunks if chunk.how is End.ENGINE_LOST]
    assert len(lost) == counters["lost"] > 0
    assert {chunk.engine for chunk in lost} == {"e0"}
    (incarnation,) = view.lost_incarnations
    assert (incarnation.name, incarnation.died, incarnation.chunks_lost) == ("e0", True, len(lost))
    assert all(chunk.end == incarnation.left for chunk in lost)
    lengths = {
        f"{g.prompt_id}#{r.index}": (r.token_ids.size, r.finish_reason) for g in groups for r in g.responses
    }
    assert {each.name: (each.generated, each.finish) for each in view.rollout.responses} == lengths
    assert view.end - view.tail_start == pytest.approx(tail_seconds(rollout.finish_times), abs=0.01)
    check_page(tmp_path, view)
    check_trace(tmp_path, view)


async def test_what_is_possible_is_what_the_buffer_tells_and_lost_chunks_are_part_of_the_rest(tmp_path):
    engines = EngineConfig(backend="replay", kv_blocks=4000, max_num_seqs=64)
    prompts = [[1, number] for number in range(1, 65)]
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)

    async def rolled(client, name):
        await (await client.submit(prompts, n=2, sampling=sampling, rollout_id=name)).result()
        return (await client.status()).last_rollout

    log = BufferConfig(chunk_size=32, log=str(tmp_path / "log"))
    async with running(2, engine=engines, buffer=log) as cluster, cluster.client() as client:
        whole = await rolled(client, "whole")
        killing = asyncio.create_task(rolled(client, "killed"))
        await asyncio.sleep(0.8 * whole.seconds)
        await cluster.kill("e1")
        killed = await killing
    timeline, _, _ = agreed(tmp_path / "log")
    for told in (whole, killed):
        view = RolloutView(timeline, choose_rollout(timeline, told.rollout_id))
        assert view.lost.possible == pytest.approx(told.efficiency, abs=0.02)
        assert (view.lost.parts[Part.LOST] > 0) == (told is killed)
        assert f"{Part.USEFUL.title} " in write_reports(
            tmp_path / "log", html=tmp_path / "r.html", rollout_id=told.rollout_id
        )
        assert Part.OVERHEAD.meaning in (tmp_path / "r.html").read_text()


async def test_tokens_of_streams_are_counted_once_whatever_dies(tmp_path, monkeypatch):
    """Segments are short: most begin in the midst of streamed chunks."""
    monkeypatch.setattr(writer.Folder, "limit", 4000)
    monkeypatch.setattr(writer, "SNAPSHOTS", 1)
    async with running(engines=2, buffer=settings(tmp_path)) as cluster, cluster.client() as client:
        rollout, machine = client.open_rollout(), cluster.services["buffer"].machine
        sampling = SamplingParams(max_tokens=60)
        asked = [rollout.submit(prompt, n=2, sampling=sampling, stream=True) for prompt in PROMPTS]
        await eventually(lambda: machine.counters["tokens"] > 100)
        await cluster.kill("e0")
        groups = [await each.result() for each in asked]
        counters = dict(machine.counters)
    timeline, _, _ = agreed(tmp_path / "log")
    assert len(log_folder.segments(tmp_path / "log")) > 3
    (found,) = timeline.rollouts
    assert sum(chunk.tokens for chunk in found.chunks) == counters["tokens"]
    assert sum(chunk.how is not End.KEPT and chunk.tokens > 0 for chunk in found.chunks) > 0
    lengths = {
        f"{group.prompt_id}#{each.index}": each.token_ids.size for group in groups for each in group.responses
    }
    assert {each.name: each.generated for each in found.responses} == lengths
    early = log_folder.segments(tmp_path / "log")[:8]
    for path in early:  # what is left begins with chunks of which a part was streamed
        path.unlink()
    (found,) = read_timeline(tmp_path / "log").rollouts
    left = {each.name: each.generated for each in found.responses}
    assert left
    assert left.items() <= lengths.items()


def check_page(tmp_path, view):
    """The page is well-formed, has neither script nor address, and draws every chunk once."""
    at = tmp_path / "report.html"
    write_reports(tmp_path / "log", html=at)
    text = at.read_text()
    assert "&lt;r&amp;1&gt;" in text
    assert text.count("://") == text.count("http://www.w3.org/")
    page = ET.fromstring(text)
    assert not [each.tag for each in page.iter() if each.tag.endswith(("script", "link", "image"))]
    titles = [each.text or "" for each in page.iter(f"{SVG}title")]
    bars = lay_out(view).bars
    assert sum(len(each) for each in bars.values()) == len(view.rollout.chunks)
    shown = [title for title in titles if " on e" in title]
    assert len(shown) == len(view.rollout.chunks) + sum(len(each.chunks) for each in view.tail)
    assert sum("died" in title for title in titles) == 1
    write_reports(tmp_path / "log", html=at)
    assert at.read_text() == text
    for name, rows in bars.items():
        for one in rows:
            assert not [
                bar for bar in rows
                if bar.row == one.row and bar.chunk.start < one.chunk.end and one.chunk.start < bar.chunk.end
                and bar is not one
            ], name  # fmt: skip


def check_trace(tmp_path, view):
    """A slice a chunk; of each arrow, both ends, in slices of other engines, the later one later."""
    at = tmp_path / "trace.json"
    write_reports(tmp_path / "log", html=None, trace_file=at)
    events = msgspec.json.decode(at.read_bytes())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert set(names.values()) == {"e0", "e1"}
    slices = [each for each in events if each["ph"] == "X"]
    assert len(slices) == len(view.rollout.chunks)
    assert all(each["dur"] >= 0 and each["ts"] >= 0 and each["tid"] >= 1 for each in slices)
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(chunk.moved for chunk in view.rollout.chunks)
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] != end["pid"]
        assert start["ts"] <= end["ts"]
        for each in (start, end):
            assert any(
                (other["pid"], other["tid"]) == (each["pid"], each["tid"])
                and other["ts"] <= each["ts"] <= other["ts"] + other["dur"]
                for other in slices
            )
    assert [each["name"] for each in events if each["ph"] == "i"] == [
        f"lost; chunks lost: {view.lost_incarnations[0].chunks_lost}"
    ]


@pytest.mark.parametrize("keep", [False, True])
async def test_several_rollouts_an_update_sleep_and_a_lost_buffer(tmp_path, monkeypatch, keep):
    loop = asyncio.get_running_loop()
    clock = types.SimpleNamespace(time=lambda: 1e9 + loop.time())  # virtual, as all other times here
    monkeypatch.setattr(writer, "time", clock)
    assert time.time is not clock.time
    log = settings(tmp_path, keep_chunks=keep)
    async with running(engines=2, buffer=log) as cluster, cluster.client() as client:
        await (await submit(client, "r0")).result()
        await client.update_weights(1, folder(tmp_path / "w1", 1.0))
        await client.sleep(30)
        await client.wake(tags=["weights"])
        await asyncio.sleep(5)  # KV sleeps on
        await client.wake(30)
        first = cluster.services["buffer"].machine
        before = first.counters["chunks"]
        rollout = await submit(client, "r1", 1)
        work = asyncio.create_task(rollout.result())
        await eventually(lambda: first.counters["chunks"] > before + 20)
        await cluster.kill("buffer")
        await asyncio.sleep(1.0)
        await cluster.start("buffer")
        groups = await work
        counters = cluster.services["buffer"].machine.counters
    timeline, _, _ = agreed(tmp_path / "log")
    assert [(each.rollout_id, len(each.responses)) for each in timeline.rollouts] == [("r0", 16), ("r1", 16)]
    texts = [each.text.partition(";")[0] for each in timeline.spans]
    assert texts == ["weights 1", "engines asleep", "buffer lost"]
    assert [each.failed for each in timeline.spans] == [False, False, True]
    assert timeline.spans[1].end - timeline.spans[1].start >= 5
    assert len(timeline.chunks) == first.counters["chunks"] + counters["chunks"]
    assert all(chunk.end >= chunk.start for chunk in timeline.chunks)
    assert {chunk.how for chunk in timeline.chunks} == {End.KEPT, End.BUFFER_LOST}
    view = RolloutView(timeline, choose_rollout(timeline, "r1"))
    tokens = sum(response.token_ids.size for group in groups for response in group.responses)
    assert sum(response.generated for response in view.rollout.responses) == tokens
    figures = {name: value for value, name in view.figures()}
    again = int(figures.get("tokens computed again", "0").replace(",", ""))
    assert sum(chunk.tokens for chunk in view.rollout.chunks) == tokens + again
    assert (again == 0) == keep == (counters["restored"] > 0)
    (span,) = view.spans
    assert 1.0 <= span.end - span.start < 3.0
    assert RolloutView(timeline, choose_rollout(timeline, "r0")).spans == []
    ET.fromstring(page_of(tmp_path, "r0"))
    assert "buffer lost; chunks lost:" in page_of(tmp_path, "r1")


async def test_trajectories_have_a_line_each_whatever_turns_were_taken_again(tmp_path):
    async def agent(trajectory):
        for _ in range(3):
            await trajectory.generate()
            await asyncio.sleep(4.0)
            trajectory.append([1, 2])

    async def roll(client):
        asked = {"n": 2, "sampling": SamplingParams(max_tokens=24), "max_context": 200, "rollout_number": 1}
        async with client.trajectories(PROMPTS[:3], rollout_id="agents", **asked) as rollout:
            return [each async for group in rollout.run(agent) for each in group.trajectories]

    async with running(engines=2, buffer=settings(tmp_path)) as cluster:
        async with cluster.client(name="trainer") as client:
            first = asyncio.create_task(roll(client))
            await asyncio.sleep(6.0)
            first.cancel()
            await asyncio.wait([first])
        async with cluster.client(name="trainer") as client:
            found = await roll(client)
        counters = dict(cluster.services["buffer"].machine.counters)
    timeline, _, _ = agreed(tmp_path / "log")
    view = RolloutView(timeline, choose_rollout(timeline, "agents"))
    assert len(timeline.rollouts) == 1
    lengths = {f"{each.prompt_id}#{each.index}": int(each.loss_mask.sum()) for each in found}
    assert {each.name: each.generated for each in view.rollout.responses} == lengths
    assert {len(each.turns) for each in view.rollout.responses} == {3}
    assert len(view.rollout.chunks) == counters["chunks"]
    figures = {name: value for value, name in view.figures()}
    assert (figures["turns"], figures["responses"]) == ("18", "6")
    again = int(figures["tokens computed again"].replace(",", ""))
    assert sum(lengths.values()) + again == counters["tokens"]
    assert again > 0
    text = page_of(tmp_path, "agents")
    ET.fromstring(text)
    assert "away for" in text


def page_of(tmp_path, rollout_id):
    write_reports(tmp_path / "log", html=tmp_path / "r.html", rollout_id=rollout_id)
    return (tmp_path / "r.html").read_text()
