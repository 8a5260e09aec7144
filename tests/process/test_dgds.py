"""Real dgds processes over real sockets: readers that do not read, and shards that die."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import zmq
import zmq.asyncio
from living import resident
from msgspec.structs import replace

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import Config, DgdsConfig, Endpoints, SharedConfig, shared_hash
from seer.common.ids import new_incarnation
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.wire.codec import encode
from seer.local.child import Child
from seer.services.dgds import server as dgds_server
from seer.services.dgds.packing import group_digest, pack

GROUP = group_digest("r/a")
MUTE_FETCHES = 1500
ANSWER_BYTES = dgds_server.MAX_DELTA_TOKENS * wire.TOKEN_BYTES


def identity(name):
    shared = shared_hash(SharedConfig())
    return Identity(role="engine", name=name, incarnation=new_incarnation(), config_hash=shared)


async def spawned(config, folder, name="dgds"):
    child = await Child.spawn("dgds", name, config, {}, folder, logged=True)
    await child.ready(120)
    return child


@asynccontextmanager
async def running(folder, count):
    """Yield the configuration and the processes of several dgds."""
    at = ",".join(f"ipc://{folder}/dgds-{shard}" for shard in range(count))
    config = Config(endpoints=Endpoints(dgds=at))
    children = []
    try:
        for shard in range(count):
            mine = replace(config, dgds=DgdsConfig(shard=shard))
            children.append(await spawned(mine, folder, f"dgds-{shard}"))
        yield config, children
    finally:
        for child in children:
            child.kill_group()
            await child.gone(10)


async def idle(pid, seconds=60):
    """Wait until a process has used no CPU for two seconds: a busy machine may starve it for less."""

    def used():
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    async with asyncio.timeout(seconds):
        before = None
        while (now := used()) != before:
            before = now
            await asyncio.sleep(2)


async def test_a_client_that_never_reads_costs_a_bounded_queue(tmp_path):
    context = zmq.asyncio.Context()
    transport = ZmqTransport()
    try:
        async with running(tmp_path, 1) as (config, (child,)):
            at = config.endpoints.dgds
            channel = Channel(transport, at, identity("reads"), wire.DgdsToEngine, LoopClock())
            await channel.open(60)
            tokens = pack(np.zeros(dgds_server.MAX_DELTA_TOKENS, dtype=np.int32))
            appends = [wire.Append(GROUP, 0, 1, 0, dgds_server.MAX_DELTA_TOKENS)]
            await channel.send(wire.AppendBatch(appends=appends, tokens=tokens))
            question = wire.Fetch(groups=[wire.FetchGroup(GROUP, {})])
            await channel.send(question)
            assert len((await channel.recv()).tokens) == ANSWER_BYTES

            me = identity("mute")
            mute = context.socket(zmq.DEALER)
            mute.setsockopt(zmq.IDENTITY, me.address())
            mute.setsockopt(zmq.RCVHWM, 1)
            mute.setsockopt(zmq.LINGER, 0)
            mute.connect(at)
            await mute.send_multipart(encode(me.hello()))
            await mute.recv_multipart()
            before = resident(child.process.pid)
            for _ in range(MUTE_FETCHES):
                await asyncio.wait_for(mute.send_multipart(encode(question)), 60)

            for _ in range(5):
                await channel.send(question)
                assert len((await asyncio.wait_for(channel.recv(), 60)).tokens) == ANSWER_BYTES
            await idle(child.process.pid)
            grown = resident(child.process.pid) - before
            assert grown < MUTE_FETCHES * ANSWER_BYTES / 4  # its queue, and what the allocator keeps

            reading = 0
            while True:
                try:
                    await asyncio.wait_for(mute.recv_multipart(), 1)
                except TimeoutError:
                    break
                reading += 1
            assert 0 < reading < 4 * dgds_server.QUEUE_ANSWERS  # the kernel and the reader hold some, too
            await mute.send_multipart(encode(question))  # it is served as soon as it reads
            assert len((await asyncio.wait_for(mute.recv_multipart(), 60))[1]) == ANSWER_BYTES
    finally:
        context.destroy(linger=0)
        await transport.close()
