"""Keys on real sockets: who gets in, as what, and what everybody else hears."""

import asyncio
import contextlib

import pytest
import zmq
from msgspec.structs import replace

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import SecurityConfig
from seer.common.errors import ConfigError, Unauthorized
from seer.common.net.channel import Channel
from seer.common.net.hub import Hub
from seer.common.net.identity import Identity
from seer.common.net.keys import Keys, User, load_keys, parse_user, split_key, with_key
from seer.common.net.transport import curve
from seer.common.net.transport.zmq import ZmqTransport

HELD = ("server:head", "trainer:run", "engine:node", "service:ctx", "observer:grafana", "operator:me")


def pair():
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Folder:
    """Keys by user, and the list of those that are admitted."""

    def __init__(self, path):
        self.path = path
        self.pairs = {user: pair() for user in HELD}
        self.write(*HELD[1:])
        (path / "server.key").write_text(f"server:head {self.pairs['server:head'][1]}\n")
        (path / "server.key").chmod(0o600)

    def write(self, *users):
        lines = [f"{user} {self.pairs[user][0]}\n" for user in users]
        new = self.path / "peers.new"
        new.write_text("".join(lines))
        new.replace(self.path / "peers")

    def server(self):
        return load_keys(SecurityConfig(key=str(self.path / "server.key"), peers=str(self.path / "peers")))

    def of(self, user):
        public, secret = self.pairs[user]
        return Keys(parse_user(user, ""), public, secret, self.pairs["server:head"][0], None)


class World:
    """A server with keys, what it hears, and channels to it."""

    def __init__(self, folder, stack):
        self.folder = folder
        self.heard = []
        self._stack = stack

    async def start(self, roles=None):
        transport = self.transport(self.folder.server())
        router = await transport.router("tcp://127.0.0.1:0")
        me = Identity(role="buffer", name="buffer", incarnation=1)
        self.hub = Hub(router, me, wire.TrainerToBuffer, False, roles)
        self.endpoint = router.endpoint
        task = asyncio.create_task(self._listen())
        self._stack.callback(task.cancel)

    def transport(self, keys):
        made = ZmqTransport(keys=keys)
        self._stack.push_async_callback(made.close)
        return made

    async def _listen(self):
        while True:
            _, message = await self.hub.recv()
            if not isinstance(message, wire.Hello):
                self.heard.append(message)

    async def channel(self, keys, role="trainer", name="run", incarnation=7):
        me = Identity(role=role, name=name, incarnation=incarnation)
        channel = Channel(self.transport(keys), self.endpoint, me, wire.BufferToTrainer, LoopClock())
        self._stack.callback(channel.close)
        await channel.open(8.0)
        return channel

    async def refused(self, keys, match, **claims):
        with pytest.raises(Unauthorized, match=match):
            await self.channel(keys, **claims)


@contextlib.asynccontextmanager
async def world(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        made = World(Folder(tmp_path), stack)
        await made.start()
        yield made


async def heard(world, count):
    for _ in range(200):
        if len(world.heard) >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"heard {world.heard}")


async def test_who_is_in_the_list_gets_in_and_nobody_else_does(tmp_path):
    async with world(tmp_path) as here:
        channel = await here.channel(here.folder.of("trainer:run"))
        await channel.send(wire.StatusRequest())
        await heard(here, 1)
        public, secret = pair()
        server = here.folder.pairs["server:head"][0]
        await here.refused(Keys(User("trainer", "run"), public, secret, server, None), "does not admit")
        await here.refused(replace(here.folder.of("trainer:run"), server=pair()[0]), "another key")
        await here.refused(None, "keys are used at one end alone")
        assert len(here.heard) == 1


async def test_with_keys_nobody_talks_to_a_server_without(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        folder = Folder(tmp_path)
        here = World(folder, stack)
        plain = here.transport(None)
        here.endpoint = (await plain.router("tcp://127.0.0.1:0")).endpoint
        await here.refused(folder.of("trainer:run"), "keys are used at one end alone")


@pytest.mark.parametrize(
    ("user", "role", "name", "match"),
    [
        ("trainer:run", "engine", "run", "not for the role 'engine'"),
        ("trainer:run", "trainer", "runner", "not for the name 'runner'"),
        ("observer:grafana", "engine", "grafana", "not for the role"),
        ("service:ctx", "engine", "e0", "not for the role"),
        ("engine:node", "engine", "other", "not for the name 'other'"),
    ],
)
async def test_a_key_is_for_its_role_and_name(tmp_path, user, role, name, match):
    async with world(tmp_path) as here:
        await here.refused(here.folder.of(user), match, role=role, name=name)
        await here.channel(here.folder.of("trainer:run"), name="run-2")
        await here.channel(here.folder.of("operator:me"), name="whoever")


@pytest.mark.parametrize(("user", "name"), [("observer:grafana", "grafana"), ("engine:node", "node-7")])
async def test_who_is_no_trainer_asks_and_changes_nothing(tmp_path, user, name):
    async with world(tmp_path) as here:
        channel = await here.channel(here.folder.of(user), name=name)
        await channel.send(wire.StatusRequest())
        await heard(here, 1)
        await channel.send(wire.Sleep(asleep=True))
        with pytest.raises(Unauthorized, match="may only read"):
            await channel.recv()
        assert [type(message) for message in here.heard] == [wire.StatusRequest]


async def test_a_revoked_key_is_refused_from_the_next_message_on(tmp_path):
    async with world(tmp_path) as here:
        channel = await here.channel(here.folder.of("trainer:run"))
        await channel.send(wire.StatusRequest())
        await heard(here, 1)
        here.folder.write("engine:node")
        await channel.send(wire.StatusRequest())
        with pytest.raises(Unauthorized, match="not admitted any more"):
            await channel.recv()
        await here.refused(here.folder.of("trainer:run"), "does not admit")
        here.folder.write("trainer:run")
        await (await here.channel(here.folder.of("trainer:run"))).send(wire.StatusRequest())
        await heard(here, 2)
        assert len(here.heard) == 2


async def test_another_key_cannot_speak_for_a_peer_whose_address_it_takes(tmp_path):
    async with world(tmp_path) as here:
        await here.channel(here.folder.of("trainer:run"))
        thief = here.transport(here.folder.of("engine:node"))
        address = Identity(role="trainer", name="run", incarnation=7).address()
        socket = await thief.dealer(here.endpoint, address)
        await socket.send(wire_frames(wire.StatusRequest()))
        for _ in range(100):
            await asyncio.sleep(0.01)
            if here.hub.counters["strangers"]:
                break
        assert here.hub.counters["strangers"] == 1
        assert here.heard == []


def wire_frames(message):
    from seer.common.wire.codec import encode

    return encode(message)


async def test_only_services_hear_what_is_published(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        folder = Folder(tmp_path)
        here = World(folder, stack)
        publisher = await here.transport(folder.server()).publisher("tcp://127.0.0.1:0")
        ears = {
            user: await here.transport(folder.of(user)).subscriber(publisher.endpoint)
            for user in ("service:ctx", "trainer:run")
        }
        listening = {user: asyncio.create_task(ear.recv()) for user, ear in ears.items()}
        for _ in range(100):
            await publisher.send([b"news"])
            await asyncio.sleep(0.01)
        assert listening["service:ctx"].result() == [b"news"]
        assert not listening["trainer:run"].done()
        listening["trainer:run"].cancel()


async def test_the_authenticator_goes_on_when_a_check_fails(tmp_path, monkeypatch):
    async with world(tmp_path) as here:
        find, failures = curve.Peers.find, []

        def broken(self, public):
            if len(failures) < 2:
                failures.append(public)
                raise RuntimeError("broken")
            return find(self, public)

        monkeypatch.setattr(curve.Peers, "find", broken)
        for incarnation in (8, 9):
            await here.refused(here.folder.of("trainer:run"), "does not admit", incarnation=incarnation)
        assert len(failures) == 2
        await here.channel(here.folder.of("trainer:run"))


async def test_without_keys_nothing_is_bound_where_strangers_reach_it():
    transport = ZmqTransport(bind_host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"security.insecure = true"):
        await transport.router("tcp://127.0.0.1:0")
    await transport.close()
    transport = ZmqTransport(bind_host="0.0.0.0", insecure=True)
    (await transport.router("tcp://127.0.0.1:0")).close()
    await transport.close()


async def test_keys_without_a_list_bind_nothing(tmp_path):
    transport = ZmqTransport(keys=Folder(tmp_path).of("engine:node"))
    with pytest.raises(ConfigError, match=r"security.peers is empty"):
        await transport.router("tcp://127.0.0.1:0")
    await transport.close()


def test_an_endpoint_can_say_whose_key_answers_there():
    public = pair()[0]
    assert split_key(with_key("tcp://a:1", public)) == ("tcp://a:1", public)
    assert split_key("tcp://a:1") == ("tcp://a:1", "")
    with pytest.raises(ConfigError, match="no key"):
        split_key("tcp://a:1#xyz")


async def test_one_handshake_that_ends_without_a_reason_is_no_problem():
    """As when the server dies while a client connects."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        transport = ZmqTransport()
        dealer = await transport.dealer(f"tcp://127.0.0.1:{server.getsockname()[1]}", b"me")
        loop = asyncio.get_running_loop()
        problems = []
        for _ in range(curve.FAILURES + 1):
            accepted, _ = await loop.sock_accept(server)
            accepted.close()
            await asyncio.sleep(0.05)
            problems.append(dealer.problem)
        dealer.close()
        await transport.close()
    assert problems[0] == ""
    assert "keys are used at one end alone" in problems[-1]
