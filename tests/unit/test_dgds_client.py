"""The client engines embed, against the real server over the memory transport, in virtual time."""

import asyncio

import numpy as np
from dgds_system import GROUP, array, client_of, system
from faulty_transport import Faults, FaultyTransport
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import VIRTUAL, eventually

from seer.common import wire
from seer.common.clock import LoopClock
from seer.services.dgds import server as dgds_server
from seer.services.dgds.connection import MAX_BATCH_TOKENS, OPEN_SECONDS
from seer.services.dgds.packing import group_digest, pack
from seer.services.dgds.resend_buffer import OVERHEAD_TOKENS, RESEND_SECONDS, ResendBuffer

pytestmark = VIRTUAL


def test_several_reports_of_one_gap_rewind_once():
    outputs, key = ResendBuffer(10**6), (1, 0)
    outputs.begin(key, 2, array(1, 2, 3))
    outputs.append(key, 2, 3, [4, 5])

    def handed_out():
        return [(part.previous, part.tokens.tolist()) for part in outputs.batch(100)]

    assert handed_out() == [(3, [4, 5])]
    outputs.rewind(key, 1, 0, now=0.0)
    assert handed_out() == []
    for moment in (0.0, 0.1, RESEND_SECONDS / 2):
        outputs.rewind(key, 2, 1, now=moment)
    assert handed_out() == [(1, [2, 3]), (3, [4, 5])]
    outputs.rewind(key, 2, 1, now=RESEND_SECONDS - 0.01)
    assert handed_out() == []
    outputs.rewind(key, 2, 4, now=RESEND_SECONDS)
    assert handed_out() == [(4, [5])]


async def test_tokens_of_all_requests_share_a_batch_per_flush():
    async with system() as it:
        client = it.client(flush_seconds=0.5)
        await asyncio.sleep(1)
        for index in range(3):
            client.begin(GROUP, index, 1, array())
        for step in range(4):
            for index in range(3):
                client.append(GROUP, index, 1, step, [10 * index + step])
            await asyncio.sleep(0.1)
        assert it.held() is None
        await asyncio.sleep(0.2)
        assert [it.held(index) for index in range(3)] == [[10 * i + s for s in range(4)] for i in range(3)]
        assert client.counters["batches"] == 1


async def test_an_absent_dgds_costs_counters_and_is_caught_up_with_when_it_comes():
    async with system(started=False) as it:
        client = it.client()
        client.begin(GROUP, 0, 1, array())
        client.append(GROUP, 0, 1, 0, [1, 2])
        await asyncio.sleep(3 * OPEN_SECONDS)
        client.append(GROUP, 0, 1, 2, [3])
        assert await client.fetch([GROUP]) == []
        assert client.counters["absences"] >= 2
        await it.start()
        await eventually(lambda: it.held() == [1, 2, 3])


async def test_an_absent_dgds_holds_bounded_memory_and_drops_whole_requests():
    async with system(started=False) as it:
        client = it.client(max_retained_tokens=2 * OVERHEAD_TOKENS + 150)
        for index in range(3):
            client.append(GROUP, index, 1, 0, range(70))
        assert (client.counters["dropped_responses"], client.counters["dropped_tokens"]) == (1, 70)
        await it.start()
        await eventually(lambda: it.held(2) is not None)
        client.append(GROUP, 0, 1, 70, [70])
        client.append(GROUP, 2, 1, 70, [70])
        await eventually(lambda: client.counters["unfillable"] == 1)
        assert [it.held(index) for index in range(3)] == [None, list(range(70)), list(range(71))]
        client.begin(GROUP, 0, 2, array(*range(71)))
        client.append(GROUP, 0, 2, 71, [71])
        await eventually(lambda: it.held(0) == list(range(72)))


async def test_a_gap_is_filled_from_the_context_of_a_chunk_begun_elsewhere():
    async with system() as it:
        client = it.client()
        client.begin(GROUP, 0, 2, array(*range(100)))
        client.append(GROUP, 0, 2, 100, [100, 101])
        await eventually(lambda: it.held() == list(range(102)))
        assert (client.counters["gaps"], client.counters["tokens"]) == (1, 104)


async def test_the_next_chunk_on_the_same_engine_sends_what_the_last_left_unsent():
    async with system() as it:
        client = it.client(flush_seconds=1.0)
        client.begin(GROUP, 0, 1, array())
        client.append(GROUP, 0, 1, 0, [1, 2])
        client.begin(GROUP, 0, 2, array(1, 2))
        client.append(GROUP, 0, 2, 2, [3])
        await eventually(lambda: it.held() == [1, 2, 3])
        assert client.counters["gaps"] == 0


async def test_a_newer_attempt_elsewhere_replaces_what_differs_for_readers():
    async with system() as it:
        first, second, reader = it.client(), it.client(name="two"), it.client(name="three")
        first.append(GROUP, 0, 1, 0, [1, 2, 3, 4])
        await eventually(lambda: it.held() == [1, 2, 3, 4])
        assert [(d.previous, d.tokens.tolist()) for d in await reader.fetch([GROUP])] == [(0, [1, 2, 3, 4])]
        second.begin(GROUP, 0, 2, array(1, 2))
        second.append(GROUP, 0, 2, 2, [3, 7])
        await eventually(lambda: it.held() == [1, 2, 3, 7])
        first.append(GROUP, 0, 1, 4, [5])
        assert [(d.previous, d.tokens.tolist()) for d in await reader.fetch([GROUP])] == [(3, [7])]
        await asyncio.sleep(1)
        assert it.held() == [1, 2, 3, 7]
        assert await reader.fetch([GROUP]) == []


async def test_a_big_resend_is_split_and_fetched_in_parts():
    async with system() as it:
        writer, reader = it.client(), it.client(name="two")
        long = np.arange(MAX_BATCH_TOKENS + 5, dtype=np.int32)
        writer.begin(GROUP, 0, 1, long)
        writer.append(GROUP, 0, 1, len(long), [7])
        await eventually(lambda: it.held() is not None and len(it.held()) == len(long) + 1)
        deltas = await reader.fetch([GROUP])
        most = dgds_server.MAX_DELTA_TOKENS
        assert [len(delta.tokens) for delta in deltas] == [*[most] * (MAX_BATCH_TOKENS // most), 6]
        assert np.array_equal(np.concatenate([delta.tokens for delta in deltas]), [*long, 7])


async def test_readers_start_over_after_a_restart_of_the_dgds():
    async with system() as it:
        writer, reader = it.client(), it.client(name="two")
        writer.append(GROUP, 0, 1, 0, [1, 2])
        await eventually(lambda: it.held() == [1, 2])
        await reader.fetch([GROUP])
        await it.kill()
        await it.start()
        await eventually(lambda: it.held() == [1, 2])
        await asyncio.sleep(10)
        assert [(d.previous, d.tokens.tolist()) for d in await reader.fetch([GROUP])] == [(0, [1, 2])]


async def test_registered_groups_live_as_long_as_they_were_registered_for(monkeypatch):
    monkeypatch.setattr(dgds_server, "TTL_SECONDS", 5.0)
    async with system() as it:
        client = it.client()
        client.register(GROUP, array(1), 100.0)
        client.append(GROUP, 0, 1, 0, [1])
        client.append("r/b", 0, 1, 0, [1])
        await eventually(lambda: len(it.server.store) == 2)
        await asyncio.sleep(20)
        assert (it.held(), it.held(0, "r/b")) == ([1], None)


async def test_closing_flushes():
    async with system() as it:
        client = it.client(flush_seconds=1000.0)
        await asyncio.sleep(1)
        client.append(GROUP, 0, 1, 0, [1])
        it.tasks.pop().cancel()
        await client.close(1.0)
        await eventually(lambda: it.held() == [1])


async def test_closing_without_a_dgds_is_quick_and_quiet():
    client = client_of(MemoryTransport(MemoryNetwork()))
    client.append(GROUP, 0, 1, 0, [1])
    await client.close(1.0)
    assert LoopClock().now() <= 1.0


async def test_lossy_lines_only_delay():
    async with system() as it:
        plan = Faults(drop=0.2, duplicate=0.2, reorder=0.2, delay_seconds=0.2)
        faulty = FaultyTransport(MemoryTransport(it.network), 7, plan, LoopClock())
        client, reader, streams = it.client(transport=faulty), it.client(name="two"), {}
        for index in range(4):
            client.begin(GROUP, index, 1, array())
        for step in range(100):
            for index in range(4):
                client.append(GROUP, index, 1, step, [step % (index + 2)])
            await asyncio.sleep(0.05)
            for delta in await reader.fetch([GROUP]):
                stream = streams.setdefault(delta.index, [])
                assert delta.previous <= len(stream)
                stream[delta.previous :] = delta.tokens.tolist()
        faulty.plan = Faults()
        await asyncio.sleep(5)
        for index in range(4):
            client.append(GROUP, index, 1, 100, [100])
        whole = {index: [*(step % (index + 2) for step in range(100)), 100] for index in range(4)}
        await eventually(lambda: {index: it.held(index) for index in range(4)} == whole)
        for delta in await reader.fetch([GROUP]):
            streams[delta.index][delta.previous :] = delta.tokens.tolist()
        assert streams == whole
        assert client.counters["gaps"] > 0


async def test_malformed_batches_change_nothing_and_are_counted():
    async with system() as it:
        channel = await it.channel()
        group = group_digest(GROUP)
        good = wire.Append(group, 0, 1, 0, 1)
        undecodable = (
            wire.Append(group, 4096, 1, 0, 1),
            wire.Append(group, 0, -1, 0, 1),
            wire.Append(group, 0, 1, -1, 1),
            wire.Append(-1, 0, 1, 0, 1),
            wire.Append(group, 0, 1, 2**24 + 1, 1),
        )
        for bad in undecodable:
            await channel.send(wire.AppendBatch(appends=[good, bad], tokens=pack(array(1, 2))))
        answered = {
            "appends[1]": wire.AppendBatch(
                appends=[good, wire.Append(group, 0, 1, 2**24, 1)], tokens=pack(array(1, 2))
            ),
            "tokens": wire.AppendBatch(appends=[good], tokens=pack(array(1, 2))),
            "ttl_seconds": wire.RegisterGroups(groups=[wire.GroupEntry(group)], ttl_seconds=float("nan")),
        }
        for named, message in answered.items():
            await channel.send(message)
            refusal = await asyncio.wait_for(channel.recv(), 5)
            assert isinstance(refusal, wire.MessageRejected)
            assert refusal.problem.startswith(named)
        assert it.server._hub.counters["malformed"] == len(undecodable) + len(answered)
        assert len(it.server.store) == 0
        await channel.send(wire.AppendBatch(appends=[good], tokens=pack(array(1))))
        await eventually(lambda: it.held() == [1])
