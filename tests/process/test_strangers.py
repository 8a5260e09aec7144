"""What strangers try at a system with keys, over every socket that answers: each is refused, and logged.

Their messages are those of honest peers, so that nothing but the key tells them apart: to be an engine, to be
a later incarnation of a trainer, new weights, sleep, rollouts of others, sources of weights elsewhere.
"""

import asyncio
import contextlib
import random

import pytest
import zmq
from process.fuzz_messages import UNIONS, Maker
from process.test_keys import rolled, running

from seer.common.net.identity import Identity

ROLES = {"trainers": "trainer", "engines": "engine", "dgds": "engine"}
FROZEN = ("weight_version", "weights_digest", "asleep", "quarantined", "rollouts", "requests_waiting")


def later_incarnation(socket):
    """An honest peer of a socket, started again."""
    role = ROLES.get(socket, "buffer")
    name = {"trainer": "run", "engine": "e0"}.get(role, "buffer")
    return Identity(role=role, name=name, incarnation=1 << 62)


def connected(context, system, socket, key, who):
    """A DEALER of a peer that calls itself `who`."""
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.IDENTITY, who.address())
    if key is not None:
        public, secret = zmq.curve_keypair()
        if key != "unknown":
            secret = (system.keys / f"{key}.key").read_text().split()[1].encode()
            public = zmq.curve_public(secret)
        made.setsockopt(zmq.CURVE_SECRETKEY, secret)
        made.setsockopt(zmq.CURVE_PUBLICKEY, public)
        made.setsockopt(zmq.CURVE_SERVERKEY, (system.keys / "public" / "server.pub").read_bytes().strip())
    made.connect(getattr(system.config.endpoints, socket))
    return made


def say(socket, frames):
    """Send if there is room: whose key is not admitted has no connection any more."""
    with contextlib.suppress(zmq.Again):
        socket.send_multipart(frames, zmq.NOBLOCK)


def answered(socket):
    """The types of what was said to it."""
    types = []
    while socket.poll(50, zmq.POLLIN):
        header = socket.recv_multipart()[0]
        types.append(next(name for name in ("Refused", "Welcome", "") if name.encode() in header))
    return types


@pytest.mark.parametrize("key", [None, "unknown", "observer-top"], ids=["none", "unknown", "observer"])
async def test_whatever_a_stranger_says_changes_nothing(tmp_path, key):
    context = zmq.Context()
    async with running(tmp_path) as system, system.client("operator-owner") as client:
        before = await client.status()
        rolling = asyncio.create_task(rolled(client, 0, 200))
        await asyncio.sleep(0.2)
        maker, made = Maker(random.Random(0), ["run/0#0", "run/0"], whole=True), []
        for socket in UNIONS:
            who = later_incarnation(socket)
            stranger = connected(context, system, socket, key, who)
            made.append((socket, stranger))
            for cls in maker.members[socket]:
                say(stranger, maker.hello(who))
                say(stranger, maker.message(cls))
            for _ in range(20):
                say(stranger, maker.sound(socket))
        await asyncio.sleep(1.5)
        heard = {socket: await asyncio.to_thread(answered, stranger) for socket, stranger in made}
        for said in heard.values():
            assert "Welcome" not in said
            assert key != "observer-top" or "Refused" in said, "it learns why"
        assert len(await rolling) == 8
        after = await client.status()
        assert {each.name for each in after.instances} == {"e0", "e1"}
        for name in FROZEN:
            assert getattr(after, name) == getattr(before, name), name
        for _, stranger in made:
            stranger.close()
    context.term()
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("buffer", "context", "dgds")}
    for service, text in logs.items():
        assert ("peer refused" if key == "observer-top" else "peers were not let in") in text, service
