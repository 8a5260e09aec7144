"""One engine on several nodes: a leader and its followers, in virtual time, with ranks that only take notes."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cluster_harness import folder
from memory_transport import MemoryTransport
from msgspec import structs
from virtual_nodes import ENGINE, buffer_alone, running, said
from virtual_time import VIRTUAL, eventually

from seer.common import wire
from seer.common.blobs import FILE, Blob
from seer.common.clock import LoopClock
from seer.common.config import Config, DraftsConfig, SharedConfig
from seer.common.errors import ConfigError, EngineBroken, Unreachable
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.common.weights import safetensors
from seer.services.engine.nodes import same_settings
from seer.services.engine.nodes.leader import SILENT_SECONDS, UNCONNECTED_SECONDS
from seer.services.engine.nodes.same_settings import check_nodes, difference
from seer.services.engine.nodes.shares import RankReads, layout_of
from seer.services.engine.weights.manifest import read_manifest

pytestmark = VIRTUAL


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"nodes": 3}, "engine.nodes = 3: give a number that divides engine.tensor_parallel = 2"),
        ({"node_rank": 2}, "engine.node_rank = 2: give 0 to engine.nodes - 1 = 1"),
        ({"leader": ""}, "engine.leader = '': give where the nodes meet, tcp://host:port"),
        ({}, "backend 'replay' has no ranks"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes, why):
    engine = structs.replace(ENGINE, **({"backend": "vllm"} if changes else {}), **changes)
    with pytest.raises(ConfigError) as refused:
        check_nodes(engine)
    assert why in str(refused.value)


def test_what_nodes_must_have_in_common_leaves_out_what_is_of_one_node():
    settings = same_settings.settings_of(Config(engine=ENGINE))
    assert {"engine.tensor_parallel", "engine.dtype", "drafts.source", "vllm", "torch", "devices"} <= set(
        settings
    )
    own = structs.replace(
        ENGINE, name="x", node_rank=1, cpu_cores="3", weights_root="/w", weights_endpoint="off"
    )
    cache = DraftsConfig(cache="/elsewhere")
    assert difference(settings, same_settings.settings_of(Config(engine=own, drafts=cache))) == ""
    for changed in ({"max_num_seqs": 7}, {"batch_invariant": True}, {"tensor_parallel": 4}):
        other = same_settings.settings_of(Config(engine=structs.replace(ENGINE, **changed)))
        assert f"engine.{next(iter(changed))} is" in difference(settings, other)
    assert difference({}, {}) == ""
    assert difference({"a": "1"}, {}).startswith("a is nothing on this node, and 1 at the engine's leader")


async def test_ranks_start_once_all_nodes_have_joined():
    async with buffer_alone(nodes=3) as system:
        system.leader()
        system.follower(1)
        await asyncio.sleep(20)
        assert system.ranks[0].meeting is None
        system.follower(2)
        await eventually(lambda: all(ranks.meeting is not None for ranks in system.ranks))
        (port,) = {ranks.meeting.port for ranks in system.ranks}
        assert port
        assert {ranks.meeting.host for ranks in system.ranks} == {"127.0.0.1"}
        assert not any(process.task.done() for process in system.processes)


async def test_a_node_with_other_settings_is_refused_and_the_others_wait():
    async with buffer_alone() as system:
        system.leader()
        why = str(await system.follower(max_num_seqs=3).ended())
        assert "engine.max_num_seqs is 3 on this node, and null at the engine's leader" in why
        assert "engine.node_rank = 2" in str(await system.follower(rank=2).ended())
        system.follower()
        await said(system.buffer, wire.Register)
        assert system.ranks[0].meeting is None


async def test_two_nodes_of_one_rank_are_told_of_it():
    async with buffer_alone(nodes=3) as system:
        system.leader()
        earlier = system.follower(1)
        await asyncio.sleep(5)
        later = system.follower(1)
        assert "another process has joined with engine.node_rank = 1" in str(await earlier.ended(10))
        assert not later.task.done()


async def test_a_leader_waits_so_long_for_its_nodes_and_they_for_it():
    async with buffer_alone() as system:
        problem = await system.leader().ended(seconds=70)
        assert "nodes [1] of this engine did not join within engine.load_seconds = 60" in str(problem)
        assert isinstance(await system.follower().ended(seconds=70), Unreachable)


async def test_a_node_that_is_killed_ends_the_engine_soon():
    async with running() as (system, first, (other,)):
        await other.kill()
        problem = await first.ended(2 * UNCONNECTED_SECONDS)
        assert isinstance(problem, EngineBroken)
        assert "node 1 of this engine was not connected" in str(problem)
        assert system.given_up  # its thread may wait for that node for ever
        assert (await said(system.buffer, wire.Goodbye)).problem


async def test_a_node_that_stands_still_ends_the_engine():
    async with running() as (system, first, (other,)):
        asyncio.get_running_loop().freeze("node 1")
        problem = await first.ended(SILENT_SECONDS + 5)
        assert "sent nothing for 30 s" in str(problem)
        assert system.given_up
        asyncio.get_running_loop().thaw("node 1")
        assert await other.ended(5) is not None


async def test_a_node_whose_rank_ends_tells_why_and_so_does_the_leader():
    async with running() as (system, first, (other,)):
        system.ranks[0].ended()
        assert "a rank of this node has ended" in str(await other.ended(5))
        assert "node 1 of this engine has ended: has lost a rank" in str(await first.ended(5))
        assert system.ranks[0].closed == 1


async def test_a_node_ends_with_a_leader_that_is_killed_or_stands_still():
    async with running() as (system, first, (other,)):
        await first.kill()
        assert "sent nothing for 30 s" in str(await other.ended(SILENT_SECONDS + 5))
        assert system.ranks[0].closed == 1


async def test_a_node_of_an_earlier_leader_makes_room_for_one_of_the_next():
    async with running() as (system, first, (other,)):
        await first.kill()
        system.leader()
        assert "the leader has started again" in str(await other.ended(15))
        system.follower()
        await said(system.buffer, wire.Register, 2)


async def test_a_new_process_of_a_node_waits_until_the_engine_has_ended():
    async with running() as (system, first, (other,)):
        new = system.follower()
        await asyncio.sleep(SILENT_SECONDS + 5)
        assert system.ranks[1].meeting is None
        assert not any(process.task.done() for process in (first, new))
        await other.kill()
        await first.ended(2 * UNCONNECTED_SECONDS)
        system.leader()
        await eventually(lambda: new.task.done() or system.ranks[1].meeting is not None)


async def test_told_to_stop_on_any_node_all_end_in_order():
    for drained in (0, 1):
        async with running() as (system, first, (other,)):
            await system.buffer.run(0, new=2000)
            await asyncio.sleep(1)
            (first, other)[drained].service.drain()
            assert await first.ended(10) is None
            assert await other.ended(10) is None
            assert system.buffer.heard(wire.Goodbye) == [wire.Goodbye()]
            (done,) = system.buffer.heard(wire.ChunksDone)
            assert len(done.tokens) > 0
            assert not system.given_up


async def test_a_node_that_cannot_load_its_ranks_says_so():
    async with buffer_alone() as system:
        first, other = system.leader(), system.follower(problem="no memory")
        assert str(await other.ended()) == "no memory"
        assert "has ended: no memory" in str(await first.ended())


def made(path):
    path.mkdir()
    return path


async def update(system, version, source, digest=""):
    """Have the engine check and load weights, as a buffer does; return its two answers."""
    before = len(system.buffer.heard(wire.WeightsPrepared)), len(system.buffer.heard(wire.WeightsLoaded))
    await system.buffer.send(wire.PrepareWeights(version=version, source=source, call_id=version))
    prepared = await said(system.buffer, wire.WeightsPrepared, before[0] + 1, 200.0)
    order = wire.LoadWeights(version=version, digest=prepared.digest, source=source, call_id=version)
    await system.buffer.send(order)
    return prepared, await said(system.buffer, wire.WeightsLoaded, before[1] + 1, 200.0)


async def test_all_nodes_read_weights_before_any_loads(tmp_path):
    model = folder(tmp_path / "model", 1.0)
    async with running(model, followers=2) as (system, *_):
        new = folder(tmp_path / "new", 2.0)
        prepared, loaded = await update(system, 1, str(new))
        assert prepared.digest == read_manifest(new).digest
        assert (prepared.problem, loaded.problem) == ("", "")
        assert system.backend.loaded == [(new, str(new), str(new))]
        _, back = await update(system, 2, "")
        assert back.problem == ""
        assert system.backend.loaded[-1] == (model, str(model), str(model))


async def test_a_node_that_has_another_model_ends_the_start(tmp_path):
    model = folder(made(tmp_path / "one") / "model", 1.0)
    theirs = folder(made(tmp_path / "two") / "model", 2.0)
    async with buffer_alone(model) as system:
        first = system.leader()
        system.config = structs.replace(system.config, shared=SharedConfig(model=str(theirs)))
        other = system.follower()
        problem = str(await first.ended())
        assert "node 1 of this engine: " in problem
        assert "now has digest" in problem
        await other.ended()


async def test_a_node_without_the_folder_refuses_the_update_by_name(tmp_path, monkeypatch):
    model, new = folder(tmp_path / "model", 1.0), folder(tmp_path / "new", 2.0)
    async with running(model) as (system, _, (other,)):
        real = other.service._fetcher.folder

        async def elsewhere(source, holders=(), spare=()):
            return await real(source.replace("new", "gone"), holders)

        monkeypatch.setattr(other.service._fetcher, "folder", elsewhere)
        prepared, _ = await update(system, 1, str(new))
        assert "node 1 of this engine: " in prepared.problem
        assert "gone" in prepared.problem
        assert system.backend.loaded == []
        monkeypatch.undo()
        assert (await update(system, 2, str(new)))[1].problem == ""


async def test_files_that_change_on_one_node_alone_make_no_weights(tmp_path, monkeypatch):
    model, new = folder(tmp_path / "model", 1.0), folder(tmp_path / "new", 2.0)
    theirs = folder(tmp_path / "theirs", 2.0)
    async with running(model) as (system, _, (other,)):

        async def there(source, holders=(), spare=()):
            return theirs

        monkeypatch.setattr(other.service._fetcher, "folder", there)
        system.backend.meanwhile = lambda: folder(theirs, 3.0)
        prepared, loaded = await update(system, 1, str(new))
        assert prepared.problem == ""
        assert system.backend.loaded == [(new, str(theirs))]
        assert "changed while it was loaded" in loaded.problem
        system.backend.meanwhile = lambda: None
        folder(theirs, 2.0)
        await system.buffer.send(wire.PrepareWeights(version=2, source=str(new), call_id=2))
        await said(system.buffer, wire.WeightsPrepared, 2)
        folder(theirs, 3.0)  # after it was checked, before it is loaded
        order = wire.LoadWeights(version=2, digest=prepared.digest, source=str(new), call_id=2)
        await system.buffer.send(order)
        assert "now has digest" in (await said(system.buffer, wire.WeightsLoaded, 2)).problem
        assert len(system.backend.loaded) == 1


async def test_streams_come_from_the_leader_and_are_deleted(tmp_path, monkeypatch):
    model, new = folder(tmp_path / "model", 1.0, (900, 1000)), folder(tmp_path / "new", 2.0, (900, 1000))
    async with running(model) as (system, first, (other,)):

        async def there(source, holders=(), spare=()):
            return new

        monkeypatch.setattr(first.service._updater.fetcher, "folder", there)
        read, damaged = Blob.read, []

        def read_or_damage(stream, offset, length):
            part = read(stream, offset, length)
            if len(damaged) < 3:
                damaged.append(offset)
                part.checksum += 1
            return part

        monkeypatch.setattr(Blob, "read", read_or_damage)
        prepared, loaded = await update(system, 1, "spool:x")
        assert (prepared.problem, loaded.problem) == ("", "")
        ((own, theirs),) = system.backend.loaded
        assert own == new
        assert len(damaged) == 3
        assert set(damaged) == {0, wire.SHORT_SPOOL_BYTES}
        assert not await asyncio.to_thread(Path(theirs).exists)
        assert system.backend.digests == [prepared.digest]
        await system.buffer.send(wire.PrepareWeights(version=2, source="spool:y", call_id=2))
        await said(system.buffer, wire.WeightsPrepared, 2)
        copied = other.service._fetcher._copy.folder
        await system.buffer.send(wire.DiscardWeights(version=2, call_id=2))
        await eventually(lambda: not copied.exists())


SHAPE = (2500, 1000)
COLUMNS = (2000, 2000, 4000, 2500)
"""The second half of each row of `SHAPE`, in bytes: what rank 1 reads of `w`."""


@asynccontextmanager
async def with_shares(tmp_path, monkeypatch, followers=1):
    """Yield a system whose rank 1 is known to read `COLUMNS`, and a new model that the leader has as a stream."""
    model, new = folder(tmp_path / "model", 1.0, SHAPE), folder(tmp_path / "new", 2.0, SHAPE)
    async with running(model, followers) as (system, first, _):

        async def there(source, holders=(), spare=()):
            return new

        monkeypatch.setattr(first.service._updater.fetcher, "folder", there)
        layout = layout_of(safetensors.stored(new))
        reads = [RankReads(0, layout, {"w": [(0, 2000, 4000, 2500)]}), RankReads(1, layout, {"w": [COLUMNS]})]
        system.backend.meeting.proofs = [reads]
        yield system, first, new


def sent_by(first, monkeypatch, drop=lambda message: False):
    """Return the bytes that a leader sends from now on, of parts by name; drop what a test says."""
    hub, sent = first.service._nodes._hub, Counter()
    reply = hub.reply

    async def counted(address, message):
        if isinstance(message, wire.SpoolData):
            sent[message.name] += len(message.data)
        if not drop(message):
            await reply(address, message)

    monkeypatch.setattr(hub, "reply", counted)
    return sent


async def test_a_node_reads_the_slices_that_its_ranks_use_and_no_more(tmp_path, monkeypatch):
    async with with_shares(tmp_path, monkeypatch) as (system, first, new):
        whole, lost, damaged, kept = (new / "model.safetensors").read_bytes(), [], [], []

        def drop(message):
            kind = type(message).__name__
            if kind in ("SpoolData", "CheckWeights") and lost.count(kind) < 2:
                lost.append(kind)
                return True
            if kind == "SpoolData" and len(damaged) < 2:
                damaged.append(message.offset)
                message.checksum += 1
            return False

        sent = sent_by(first, monkeypatch, drop)
        system.backend.meanwhile = lambda: kept.append(
            (Path(system.backend.loaded[-1][1]) / FILE).read_bytes()
        )
        prepared, loaded = await update(system, 1, "spool:x")
        assert (prepared.problem, loaded.problem) == ("", "")
        assert sorted(lost) == ["CheckWeights"] * 2 + ["SpoolData"] * 2
        assert len(damaged) == 2
        (name,) = sent
        header = len(whole) - 2500 * 4000
        assert sent[name] > header + 2500 * 2000
        (holed,) = kept
        assert len(holed) == len(whole)
        assert holed[:header] == whole[:header]
        for row in range(header, len(whole), 4000):
            assert holed[row : row + 4000] == bytes(2000) + whole[row + 2000 : row + 4000]
        assert not await asyncio.to_thread(Path(system.backend.loaded[-1][1]).exists)
        system.backend.meanwhile = lambda: None
        sent.clear()
        _, loaded = await update(system, 2, "spool:y")  # nothing is lost: each byte is sent once
        assert loaded.problem == ""
        assert list(sent.values()) == [header + 2500 * 2000]


async def test_nodes_have_shares_of_their_own_or_all(tmp_path, monkeypatch):
    async with with_shares(tmp_path, monkeypatch, followers=3) as (system, first, new):
        sent, whole, kept = sent_by(first, monkeypatch), (new / FILE).read_bytes(), []
        rows, layout = (4000, 40_000, 0, 1), system.backend.meeting.proofs[0][0].layout
        system.backend.meeting.proofs[0] += [
            RankReads(2, layout, {"w": [rows]}),
            RankReads(
                2, layout, {"w": [(0, 8000, 0, 1)]}
            ),  # of which a part is the other's, too: it comes once
            RankReads(3, layout, {"w": [(0, 10**7, 0, 1)]}),
        ]
        system.backend.meanwhile = lambda: kept.extend(
            (Path(each) / FILE).read_bytes() for each in system.backend.loaded[-1][1:]
        )
        assert (await update(system, 1, "spool:x"))[1].problem == ""
        header = len(whole) - 2500 * 4000
        assert sorted(sent.values()) == [header + 44_000, header + 2500 * 2000, len(whole)]
        assert kept[0][header : header + 8000] == (bytes(2000) + whole[-2000:]) * 2
        assert kept[1] == whole[: header + 44_000] + bytes(len(whole) - header - 44_000)
        assert kept[2] == whole


async def test_a_share_of_which_a_part_came_before_the_update_was_cancelled_is_of_no_use(
    tmp_path, monkeypatch
):
    async with with_shares(tmp_path, monkeypatch) as (system, first, new):
        late, whole, kept = [], (new / FILE).read_bytes(), []

        def drop(message):
            if isinstance(message, wire.SpoolData) and not late and message.offset:
                late.append(message)
            return isinstance(message, wire.SpoolData) and message in late

        sent = sent_by(first, monkeypatch, drop)
        await system.buffer.send(wire.PrepareWeights(version=1, source="spool:x", call_id=1))
        await eventually(lambda: late != [])
        await system.buffer.send(wire.DiscardWeights(version=1, call_id=1))
        halves = [(0, 2000, 4000, 2500)]
        system.backend.meeting.proofs[0][1].slices["w"] = halves  # as of a load since
        system.backend.meanwhile = lambda: kept.append(
            (Path(system.backend.loaded[-1][1]) / FILE).read_bytes()
        )
        loading = asyncio.create_task(update(system, 2, "spool:x"))
        await eventually(lambda: len(sent) == 2)
        hub = first.service._nodes._hub
        await hub.reply(next(iter(first.service._nodes._nodes.values())).address, late.pop())
        assert (await loading)[1].problem == ""
        header = len(whole) - 2500 * 4000
        for row in range(header, len(whole), 4000):
            assert kept[0][row : row + 4000] == whole[row : row + 2000] + bytes(2000)


async def test_slices_that_are_not_the_leaders_are_refused_by_name(tmp_path, monkeypatch):
    async with with_shares(tmp_path, monkeypatch) as (system, *_):
        put = Blob.put

        def flipped(blob, part):
            data = part.data.copy()
            data[-1] ^= 1
            put(blob, wire.SpoolData(name=part.name, offset=part.offset, checksum=0, data=data))

        monkeypatch.setattr(Blob, "put", flipped)
        prepared, loaded = await update(system, 1, "spool:x")
        assert "node 1 of this engine: its share has digest blake3-" in prepared.problem
        assert loaded.problem
        assert system.backend.loaded == []
        monkeypatch.setattr(Blob, "put", put)
        assert (await update(system, 2, "spool:x"))[1].problem == ""


async def test_a_stream_of_other_shapes_is_read_whole_and_so_is_one_of_unknown_reads(tmp_path, monkeypatch):
    async with with_shares(tmp_path, monkeypatch) as (system, first, new):
        size, [reads] = (new / FILE).stat().st_size, system.backend.meeting.proofs
        other_layout = [RankReads(each.node, "other", each.slices) for each in reads]
        for version, known in enumerate(([], [other_layout], [[reads[0], other_layout[1]]]), 1):
            sent, system.backend.meeting.proofs = sent_by(first, monkeypatch), known
            prepared, loaded = await update(system, version, f"spool:{version}")
            assert (prepared.problem, loaded.problem) == ("", "")
            assert sent == {str(version): size}
            assert system.backend.digests[-1] == prepared.digest
            assert system.backend.meeting.prove  # so the load finds out
        system.backend.meeting.proofs = [other_layout, reads]
        sent = sent_by(first, monkeypatch)
        await update(system, 4, "spool:4")
        assert sum(sent.values()) < size
        assert not system.backend.meeting.prove
        system.backend.meeting.proofs, sent = (
            None,
            sent_by(first, monkeypatch),
        )  # as after a proof that failed
        await update(system, 5, "spool:5")
        assert sent == {"5": size}
        assert not system.backend.meeting.prove


async def test_slices_are_never_taken_for_the_whole(tmp_path, monkeypatch):
    async with with_shares(tmp_path, monkeypatch) as (system, first, new):
        sent = sent_by(first, monkeypatch, lambda message: isinstance(message, wire.DiscardWeights))
        await update(system, 1, "spool:x")
        assert len(sent) == 1
        system.backend.meeting.proofs = []  # the next question about the same stream is about all of it
        prepared, loaded = await update(system, 2, "spool:x")
        assert (prepared.problem, loaded.problem) == ("", "")
        assert sent["x"] == (new / FILE).stat().st_size
        assert system.backend.digests[-1] == prepared.digest


async def test_adapters_and_plans_are_read_whole(tmp_path, monkeypatch):
    async with with_shares(tmp_path, monkeypatch) as (_, first, new):
        leader, asked = first.service._nodes, []

        async def ask(_, questions):
            asked.extend(questions.values())
            return []

        monkeypatch.setattr(leader, "_ask", ask)
        for source in ("spool:x", "lora::spool:x", "lora:blake3-1:spool:x", "inplace:spool:x", str(new)):
            leader._meeting.prove = True
            await leader.check(source, "", new)
            assert not leader._meeting.prove
        assert [bool(each.slices) for each in asked] == [True, False, False, False, False]


async def test_a_node_whose_slices_change_before_they_are_loaded_makes_no_weights(tmp_path, monkeypatch):
    async with with_shares(tmp_path, monkeypatch) as (system, *_):

        def write():
            (Path(system.backend.loaded[-1][1]) / FILE).write_bytes(b"x")

        system.backend.meanwhile = write
        _, loaded = await update(system, 1, "spool:x")
        assert "changed while it was loaded" in loaded.problem


async def test_slices_that_cannot_be_are_refused_by_name(tmp_path, monkeypatch):
    async with with_shares(tmp_path, monkeypatch) as (system, *_):
        system.backend.meeting.proofs[0][1].slices["w"] = [(0, 10**9, 0, 1), (4, 1, 10**9, 2)]
        prepared, _ = await update(system, 1, "spool:x")
        assert prepared.problem == ""  # more than the tensor has: all of it
        system.backend.meeting.proofs[0][1].slices["w"] = [(4, 1, 10**9, 2)]
        prepared, _ = await update(system, 2, "spool:x")
        assert "cannot be read: has no 2 runs of 1 bytes" in prepared.problem


async def test_messages_that_are_lost_are_sent_again(tmp_path, monkeypatch):
    model, new = folder(tmp_path / "model", 1.0), folder(tmp_path / "new", 2.0)
    async with running(model) as (system, first, _):
        hub, dropped = first.service._nodes._hub, []
        reply = hub.reply

        async def lossy(address, message):
            if isinstance(message, wire.CheckWeights) and len(dropped) < 2:
                dropped.append(message)
            else:
                await reply(address, message)

        monkeypatch.setattr(hub, "reply", lossy)
        _, loaded = await update(system, 1, str(new))
        assert loaded.problem == ""
        assert len(dropped) == 2


async def test_a_node_that_never_ends_its_check_refuses_the_update(tmp_path, monkeypatch):
    model, new = folder(tmp_path / "model", 1.0), folder(tmp_path / "new", 2.0)
    async with running(model) as (system, _, (other,)):

        async def never(source, holders=(), spare=()):
            await asyncio.Event().wait()

        monkeypatch.setattr(other.service._fetcher, "folder", never)
        prepared, _ = await update(system, 1, str(new))
        assert "node 1 of this engine: did not answer within engine.load_seconds = 60" in prepared.problem
        monkeypatch.undo()
        assert (await update(system, 2, str(new)))[1].problem == ""


async def test_a_stranger_reads_nothing_from_the_leader(tmp_path):
    async with running(folder(tmp_path / "model", 1.0)) as (system, *_):
        for role, config_hash in (("node", "other"), ("engine", "")):
            me = Identity(role=role, name="x", incarnation=1, config_hash=config_hash)
            channel = Channel(
                MemoryTransport(system.network), ENGINE.leader, me, wire.LeaderToNode, LoopClock()
            )
            with pytest.raises(Exception, match=r"settings|this socket"):
                await channel.open(5.0)
        me = Identity(
            role="node", name="x", incarnation=1,
            config_hash=system.buffer.me.config_hash,
        )  # fmt: skip
        channel = Channel(MemoryTransport(system.network), ENGINE.leader, me, wire.LeaderToNode, LoopClock())
        await channel.open(5.0)
        await channel.send(wire.ReadSpool(name="", offset=0))
        await channel.send(wire.OpenSpool(name="x"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await channel.recv()
