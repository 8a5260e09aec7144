"""Fetches large and small, groups spread over several dgds, and what earlier groups left."""

import asyncio
import threading

import pytest
from dgds_system import GROUP, array, system
from memory_transport import MemoryNetwork, MemoryTransport
from msgspec.structs import replace
from virtual_time import VIRTUAL, eventually

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import Config, DgdsConfig, Endpoints
from seer.common.errors import ConfigError
from seer.services.dgds import connection, past_groups_file
from seer.services.dgds import server as dgds_server
from seer.services.dgds.packing import group_digest, pack, prompt_digest
from seer.services.dgds.server import make

pytestmark = VIRTUAL

PROMPT, OTHER_PROMPT = array(1, 2, 3), array(4)
REMEMBERING = Config(dgds=DgdsConfig(remember_tokens=10**6))
THREE = Config(endpoints=Endpoints(dgds="tcp://127.0.0.1:1, tcp://127.0.0.1:2,tcp://127.0.0.1:3"))


def applied(streams, deltas):
    """Apply deltas to streams by (group, index)."""
    for delta in deltas:
        stream = streams.setdefault((delta.group_id, delta.index), [])
        assert delta.previous <= len(stream)
        stream[delta.previous :] = delta.tokens.tolist()
    return streams


# --- what is fetched ---------------------------------------------------------------------


async def test_responses_that_run_here_are_left_out_until_they_run_elsewhere():
    async with system() as it:
        here, there = it.client(), it.client(name="two")
        for index in range(2):
            here.append(GROUP, index, 1, 0, [index])
        there.append(GROUP, 2, 1, 0, [2])
        await eventually(lambda: it.held(1) == [1] and it.held(2) == [2])
        own = {GROUP: {0, 1}}
        assert [d.index for d in await here.fetch([GROUP], own)] == [2]
        assert await here.fetch([GROUP], own) == []
        assert [d.index for d in await here.fetch([GROUP], {GROUP: {1}})] == [0]
        assert [d.index for d in await here.fetch([GROUP])] == [1]


async def test_a_late_joiner_gets_everything_in_parts_also_from_a_dgds_that_was_restarted():
    async with system() as it:
        writer, early, late = (
            it.client(max_retained_tokens=10**7),
            it.client(name="two"),
            it.client(name="three"),
        )
        length = dgds_server.MAX_DELTA_TOKENS // 4
        whole = {(GROUP, index): list(range(index, index + length)) for index in range(16)}
        for (_, index), tokens in whole.items():
            writer.append(GROUP, index, 1, 0, tokens)
        await eventually(lambda: it.held(15) is not None)
        sent = it.server._hub.counters["sent"]
        streams = applied({}, await early.fetch([GROUP]))
        assert streams == whole
        assert it.server._hub.counters["sent"] - sent >= 4
        await it.kill()
        await it.start()
        await eventually(lambda: it.held(15) is not None)
        await asyncio.sleep(5)
        assert applied({}, await late.fetch([GROUP])) == whole
        assert applied(streams, await early.fetch([GROUP])) == whole


async def test_ten_thousand_groups_are_answered_in_parts_and_nobody_else_waits():
    async with system() as it:
        client, channel = it.client(), await it.channel()
        names = [f"r/{number}" for number in range(10_000)]
        for name in names[::1000]:
            client.append(name, 0, 1, 0, [7])
        await eventually(lambda: it.held(0, names[9000]) == [7])
        raw = [wire.FetchGroup(group_digest(name), {}) for name in names]
        found, missing, answers = [], 0, 0
        while raw:
            await channel.send(wire.Fetch(groups=raw, call_id=answers))
            other = asyncio.create_task(client.fetch(names[:1]))
            answer = await channel.recv()
            assert isinstance(answer, wire.Deltas)
            assert answer.call_id == answers
            assert 0 < answer.done <= dgds_server.MAX_VISITED
            found += answer.deltas
            missing += len(answer.missing)
            raw, answers = raw[answer.done :], answers + 1
            await other
        assert [delta.group for delta in found] == [group_digest(name) for name in names[::1000]]
        assert (missing, answers) == (10_000 - 10, 3)
        client.forget(names)
        assert [d.group_id for d in await client.fetch(names)] == names[::1000]
        assert client.counters["unanswered_fetches"] == 0


async def test_late_and_false_answers_end_no_question_and_change_nothing(monkeypatch):
    monkeypatch.setattr(connection, "MAX_FETCH_GROUPS", 2)
    async with system() as it:
        client = it.client()
        names = [f"r/{number}" for number in range(5)]
        for name in names:
            client.append(name, 0, 1, 0, [7])
        await eventually(lambda: it.held(0, names[-1]) == [7])
        assert {delta.group_id for delta in await client.fetch(names)} == set(names)
        it.shards[0].serving.cancel()
        asking = asyncio.create_task(client.fetch(names))
        await asyncio.sleep(0.1)
        unasked = wire.Delta(group_digest("r/unasked"), 0, 10**6, 0, 1)
        lying = wire.Delta(group_digest(names[0]), 0, 10**6, 0, 5)
        late = wire.Deltas(deltas=[unasked, lying], tokens=pack(array(3)), call_id=0, done=5)
        for address in list(it.server._hub._peers):
            await it.server._hub.send(address, late)
        assert await asking == []
        assert client.counters["unanswered_fetches"] == 1
        it.shards[0].serving = asyncio.create_task(it.server.run())
        client.append(names[0], 0, 1, 1, [8])
        await eventually(lambda: it.held(0, names[0]) == [7, 8])
        (delta,) = await client.fetch(names)
        assert (delta.group_id, delta.previous, delta.tokens.tolist()) == (names[0], 1, [8])


async def test_what_comes_late_is_part_of_the_next_fetch_unless_it_was_forgotten():
    async with system() as it:
        client = it.client()
        for name in (GROUP, "r/b", "r/c"):
            client.append(name, 0, 1, 0, [7])
        await eventually(lambda: it.held(0, "r/c") == [7])
        assert await client.fetch([GROUP, "r/b", "r/c"], seconds=0.0) == []
        client.forget([GROUP])
        await asyncio.sleep(1)
        client.forget(["r/b"])
        assert [delta.group_id for delta in await client.fetch(["r/none"])] == ["r/c"]
        assert [delta.group_id for delta in await client.fetch([GROUP, "r/b"])] == [GROUP, "r/b"]


async def test_a_token_that_cannot_be_packed_ends_its_response_and_nothing_else():
    async with system() as it:
        client = it.client()
        client.begin(GROUP, 0, 1, array())
        client.append(GROUP, 0, 1, 0, [1, 2])
        client.append(GROUP, 1, 1, 0, [5])
        await eventually(lambda: it.held(1) == [5])
        for bad in (-1, 2**24, 2**40):
            client.append(GROUP, 0, 1, 2, [3, bad])
        client.begin(GROUP, 2, 1, array(-5))
        client.append(GROUP, 0, 1, 4, [4])
        client.append(GROUP, 1, 1, 1, [2**24 - 1])
        await eventually(lambda: it.held(1) == [5, 2**24 - 1])
        assert client.counters["unpackable"] == 4
        await eventually(lambda: client.counters["unfillable"] == 1)
        assert it.held(0) == [1, 2]


# --- several dgds ------------------------------------------------------------------------


async def test_groups_are_spread_and_all_clients_agree_where():
    async with system(config=THREE) as it:
        writer, reader = it.client(), it.client(name="two")
        names = [f"r/{number}" for number in range(60)]
        for number, name in enumerate(names):
            for client in (writer, reader):
                client.register(name, array(number // 2))
            writer.append(name, 0, 1, 0, [number])
        await eventually(lambda: all(it.held(0, name) for name in names))
        groups = [len(shard.server.store) for shard in it.shards]
        assert sum(groups) == 60
        assert min(groups) >= 10
        streams = applied({}, await reader.fetch(names))
        assert streams == {(name, 0): [number] for number, name in enumerate(names)}
        for one, two in zip(names[::2], names[1::2], strict=True):  # two groups of one prompt
            homes = [
                [shard.server.store.tokens(group_digest(name), 0) is not None for shard in it.shards]
                for name in (one, two)
            ]
            assert homes[0] == homes[1]


async def test_a_dead_dgds_costs_only_its_own_groups_until_it_is_back():
    async with system(config=THREE) as it:
        client, reader = it.client(), it.client(name="two")
        names = [f"r/{number}" for number in range(30)]
        for name in names:
            client.append(name, 0, 1, 0, [1])
        await eventually(lambda: all(it.held(0, name) for name in names))
        lost = {name for name in names if it.shards[1].server.store.tokens(group_digest(name), 0)}
        assert 0 < len(lost) < 30
        await it.kill(1)
        for name in names:
            client.append(name, 0, 1, 1, [2])
        await eventually(lambda: all(it.held(0, name) == [1, 2] for name in set(names) - lost))
        started = LoopClock().now()
        found = await reader.fetch(names, seconds=0.5)
        assert {delta.group_id for delta in found} == set(names) - lost
        assert LoopClock().now() - started <= 0.51
        await it.start(1)
        await eventually(lambda: all(it.held(0, name) == [1, 2] for name in names))
        await asyncio.sleep(10)
        assert {delta.group_id for delta in await reader.fetch(names)} == lost


def test_a_shard_that_no_endpoint_names_is_refused():
    config = replace(THREE, dgds=DgdsConfig(shard=3))
    with pytest.raises(ConfigError, match=r"dgds\.shard = 3: endpoints\.dgds names 3; count from 0"):
        make(config, MemoryTransport(MemoryNetwork()), LoopClock())


def test_a_file_for_nothing_is_refused():
    config = Config(dgds=DgdsConfig(remember_path="x", remember_tokens=0))
    with pytest.raises(ConfigError, match=r"dgds\.remember_path = 'x': nothing is remembered; set dgds"):
        make(config, MemoryTransport(MemoryNetwork()), LoopClock())


# --- earlier groups of the same prompt -----------------------------------------------------


async def test_the_next_group_of_a_prompt_gets_what_its_last_one_said():
    config = replace(REMEMBERING, endpoints=THREE.endpoints)
    async with system(config=config) as it:
        client, reader = it.client(), it.client(name="two")
        client.register("1/a", PROMPT)
        client.append("1/a", 0, 1, 0, [1, 2])
        client.append("1/a", 1, 1, 0, [5])
        await eventually(lambda: it.held(1, "1/a") == [5])
        for each in (client, reader):
            each.register("2/x", PROMPT)
            each.register("2/y", OTHER_PROMPT)
        client.append("2/x", 0, 1, 0, [1, 1])
        client.append("2/y", 0, 1, 0, [9])
        await eventually(lambda: it.held(0, "2/y") == [9])
        streams = applied({}, await reader.fetch(["2/x", "2/y"]))
        past = {("2/x", wire.MAX_GROUP_SIZE): [1, 2], ("2/x", wire.MAX_GROUP_SIZE + 1): [5]}
        assert streams == {("2/x", 0): [1, 1], ("2/y", 0): [9]} | past
        assert await reader.fetch(["2/x", "2/y"]) == []
        await asyncio.sleep(700)
        client.register("3/x", PROMPT)
        await asyncio.sleep(1)
        assert applied({}, await client.fetch(["3/x"])) == {("3/x", wire.MAX_GROUP_SIZE): [1, 1]}


async def test_a_group_that_was_registered_by_the_digest_is_found_by_the_prompt_and_the_last_digest_counts():
    async with system(config=replace(REMEMBERING, endpoints=THREE.endpoints)) as it:
        client, other = it.client(), it.client(name="two")
        for number in range(20):
            client.register(f"named/{number}", prompt_digest(PROMPT))
            client.register(f"named/{number}", prompt_digest(array(number)))
            client.append(f"named/{number}", 0, 1, 0, [number])
        await eventually(lambda: all(it.held(0, f"named/{number}") for number in range(20)))
        for number in range(20):
            other.register(f"r/{number}", array(number))
        await asyncio.sleep(1)
        streams = applied({}, await other.fetch([f"r/{number}" for number in range(20)]))
        assert streams == {(f"r/{number}", wire.MAX_GROUP_SIZE): [number] for number in range(20)}


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_dgds_that_forgot_a_group_hears_of_its_prompt_again(restarted):
    async with system(config=REMEMBERING) as it:
        client = it.client()
        client.register(GROUP, PROMPT)
        client.begin(GROUP, 0, 1, array())
        client.append(GROUP, 0, 1, 0, [1, 2])
        await eventually(lambda: it.held() == [1, 2])
        it.server.store._drop(group_digest(GROUP))  # as when its memory is full
        client.append(GROUP, 0, 1, 2, [3])
        await eventually(lambda: it.held() == [1, 2, 3])
        if restarted:
            await it.kill()
            await it.start()
            await eventually(lambda: it.held() == [1, 2, 3])
        client.register("r/next", PROMPT)
        await asyncio.sleep(1)
        assert applied({}, await client.fetch(["r/next"])) == {("r/next", wire.MAX_GROUP_SIZE): [1, 2, 3]}


@pytest.mark.real_time
async def test_a_drained_dgds_leaves_its_memory_to_the_next(tmp_path):
    path = tmp_path / "memory"
    remembering = DgdsConfig(remember_tokens=10**6, remember_path=str(path))
    config = Config(dgds=remembering)
    for incarnation in range(3):
        server = make(config, MemoryTransport(MemoryNetwork()), LoopClock())
        await server.start()
        now, prompt = LoopClock().now(), prompt_digest(PROMPT)
        server.store.register(incarnation, 0.0, now, prompt)
        past = server.store.deltas(incarnation, {}, 100, now)
        if incarnation == 2:
            assert past.deltas == []  # the file was damaged in between
            break
        assert [bytes(delta.tokens) for delta in past.deltas] == [bytes(pack(array(7)))] * incarnation
        server.store.append(incarnation, 0, 1, 0, pack(array(7)).data, now)
        server.drain()
        await server.run()
        assert past_groups_file.load(path, server._shared) == [(prompt, (bytes(pack(array(7))),))]
        if incarnation == 1:
            path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.real_time
async def test_a_dgds_that_is_drained_while_it_saves_saves_what_came_since_after_that(tmp_path, monkeypatch):
    saving, may_go_on, save = threading.Event(), threading.Event(), past_groups_file.save

    def slow(path, shared, entries):
        if not saving.is_set():
            saving.set()
            may_go_on.wait(10)
        save(path, shared, entries)

    monkeypatch.setattr(dgds_server, "SAVE_SECONDS", 0.01)
    monkeypatch.setattr(past_groups_file, "save", slow)
    path = tmp_path / "memory"
    config = Config(dgds=DgdsConfig(remember_tokens=10**6, remember_path=str(path)))
    server = make(config, MemoryTransport(MemoryNetwork()), LoopClock())
    await server.start()
    server.store.restore(1, (b"abc",))
    running = asyncio.create_task(server.run())
    assert await asyncio.to_thread(saving.wait, 10)
    server.store.restore(2, (b"def",))
    server.drain()
    await asyncio.sleep(0.1)
    may_go_on.set()
    await running
    await asyncio.sleep(0.1)
    assert past_groups_file.load(path, server._shared) == [(1, (b"abc",)), (2, (b"def",))]


@pytest.mark.real_time
async def test_each_shard_has_a_file_of_its_own_and_a_foreign_one_stays(tmp_path):
    path = tmp_path / "memory"
    remembering = DgdsConfig(remember_tokens=10**6, remember_path=str(path))
    (tmp_path / "memory.1-of-3").write_bytes(b"something else")
    for shard in range(3):
        config = replace(THREE, dgds=replace(remembering, shard=shard))
        server = make(config, MemoryTransport(MemoryNetwork()), LoopClock())
        await server.start()
        server.store.register(1, 0.0, 0.0, 5)
        server.store.append(1, 0, 1, 0, pack(array(shard)).data, 0.0)
        server.drain()
        await server.run()
        loaded = (
            [] if shard == 1 else past_groups_file.load(tmp_path / f"memory.{shard}-of-3", server._shared)
        )
        assert loaded == ([] if shard == 1 else [(5, (bytes(pack(array(shard))),))])
    assert (tmp_path / "memory.1-of-3").read_bytes() == b"something else"
