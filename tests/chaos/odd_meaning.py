"""Peers whose messages are well-formed and make no sense, beside an honest trainer of a whole system.

`python tests/chaos/odd_meaning.py --runs 1000 --seed 1` prints what was sent, and exits with 1 when a service
failed, the honest trainer got no or other responses, or something was left over. A run is a function of its seed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
import invariants
from cluster_harness import Cluster, folder
from memory_transport import MemoryTransport
from msgspec import structs
from virtual_time import run as run_virtual

from chaos.census import leftovers
from chaos.odd_messages import NAMES, OddMessages
from chaos.virtual import EPOCH_NS, quiet
from seer.client import BufferLost, RolloutClient, SamplingParams
from seer.common import wire
from seer.common.config import BufferConfig, Config, EngineConfig, ReplayConfig, SharedConfig
from seer.common.errors import RequestRefused, SeerError
from seer.common.net.identity import Identity
from seer.common.net.keys import ANYONE, User
from seer.common.wire import codec
from seer.services.buffer.log.log_folder import incarnations
from seer.services.buffer.log.replay import replay_incarnation

MESSAGES, PEERS = 1000, 4
"""Of a run; hostile ones at a time."""

BOUND_SECONDS = 400.0
"""Longest time that the honest trainer waits once the others are gone: leases, updates and waits for engines."""

SETTLE_SECONDS = 200.0
"""Longest time until nothing is held."""

HONEST = "honest"
SERVICES = ("buffer", "context", "dgds", "e0", "e1")
AT = Config().endpoints
SOCKETS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "trainers": (AT.trainers, wire.TrainerToBuffer, ("trainer",)),
    "events": (AT.event_snapshots, wire.SnapshotAsked, ("context", "status", "ping")),
    "estimates": (AT.estimate_snapshots, wire.SnapshotAsked, ("buffer", "status", "ping")),
    "dgds": (AT.dgds, wire.EngineToDgds, ("engine", "status", "ping")),
}
"""Endpoints, what they take, and roles to come as."""

USERS = (ANYONE, ANYONE, *(User(role, "*") for role in ("trainer", "generator", "gateway", "observer")))
OFTEN = {"Submit": 10, "NextPrompts": 4, "Acknowledge": 5, "Cancel": 5, "ImageData": 8, "OpenSpool": 4}
PROMPTS = [[1, 2, 3], [4], [5, 6]]
ARRIVED: dict[tuple[str, int], list[list[int]]] = {}
"""What the honest trainer got, by digest of the weights, and rollout number: the same in all runs."""


class Peer:
    """A hostile connection to a socket. It says Hello first, mostly."""

    def __init__(self, world: World, socket: str) -> None:
        rng, self.world = world.rng, world
        endpoint, self.union, roles = SOCKETS[socket]
        self.who = Identity(
            role=rng.choice(roles), name=rng.choice(NAMES), incarnation=rng.choice((0, 1, 2, 2**62, -1))
        )
        self.transport = MemoryTransport(world.cluster.network, user=rng.choice(USERS))
        self.endpoint, self.sent, self.greeted = endpoint, 0, False

    async def connect(self) -> None:
        self.dealer = await self.transport.dealer(self.endpoint, self.who.address())
        reads = self.world.rng.random() < 0.9
        self.reading = asyncio.create_task(self._read() if reads else asyncio.sleep(0))

    async def _read(self) -> None:
        decoder: codec.Decoder[Any] = codec.Decoder(
            wire.BufferToTrainer | wire.DgdsToEngine | wire.BufferSnapshotReply | wire.ContextSnapshotReply
        )  # fmt: skip
        while True:
            message = decoder.decode(await self.dealer.recv())
            why = f" {message.code} {message.message[:70]}" if isinstance(message, wire.Refused) else ""
            self.world.answers[type(message).__name__ + why] += 1

    async def say(self, message: wire.Message) -> None:
        """Send a message if there is room."""
        self.world.types[type(message).__name__] += 1
        if isinstance(message, wire.Hello | wire.Goodbye):
            self.greeted = isinstance(message, wire.Hello) and message.incarnation == self.who.incarnation
        self.sent += not isinstance(message, wire.Hello)
        with contextlib.suppress(SeerError, TimeoutError):
            async with asyncio.timeout(0):
                await self.dealer.send(codec.encode(message))

    async def act(self) -> None:
        """Send something odd."""
        rng = self.world.rng
        if rng.random() < (0.1 if self.greeted else 0.8):
            others = [structs.replace(self.who, name=name) for name in NAMES]
            alike = [other for other in others if other.address() == self.who.address()]
            await self.say(rng.choice(alike).hello(rng.choice((self.sent, self.sent, 0))))
        else:
            await self.say(self.world.odd.any_of(self.union, OFTEN))

    async def leave(self) -> None:
        if self.world.rng.random() < 0.5:
            await self.say(wire.Goodbye())
        self.reading.cancel()
        await self.transport.close()


class World:
    """One system under the messages of a seed. `types` and `answers` count messages by type."""

    def __init__(self, seed: int, home: str) -> None:
        self.rng = random.Random(seed)
        model = str(folder(Path(home) / "model", 1.0))
        self.odd = OddMessages(self.rng, model)
        self.types, self.answers = Counter(), Counter()
        self.problems: list[str] = []
        self.kept = kept = home if self.rng.random() < 0.5 else ""
        self.cluster = Cluster(
            engine=EngineConfig(
                backend="replay", kv_blocks=40, max_num_seqs=8, in_place_updates=True,
                replay=ReplayConfig(vocab_size=1000, mean_tokens=20),
            ),
            buffer=BufferConfig(
                chunk_size=16, engine_wait_seconds=60.0, engine_silence_seconds=5.0, result_ttl_seconds=30.0,
                update_seconds=20.0, trainer_lease_seconds=20.0, log=kept, keep_chunks=bool(kept),
                spool=kept, images=kept,
            ),
            shared=SharedConfig(block_size=32, model=model),
        )  # fmt: skip

    async def play(self) -> None:
        """Run it all, and note what is wrong."""
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        for name in SERVICES:
            await self.cluster.start(name)
        self.stopping = asyncio.Event()
        honest = asyncio.create_task(self._honest())
        try:
            await asyncio.sleep(1.0)
            await self._disturb()
            self.stopping.set()
            if await self._holds("the honest trainer is done", BOUND_SECONDS, honest.done):
                honest.result()
                await self._holds("nothing is left", SETTLE_SECONDS, lambda: not self._left())
        finally:
            honest.cancel()
            await self.cluster.stop()
        for paths in incarnations(Path(self.kept)) if self.kept else ():
            deque(replay_incarnation(paths), maxlen=0)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context['message']} {_told(context.get('exception'))}")

    def _ended(self) -> bool:
        """Note services that have ended."""
        ended = {name: task for name, task in self.cluster._tasks.items() if task.done()}
        self.problems += [f"{name} ended: {_told(task.exception())}" for name, task in ended.items()]
        return bool(ended)

    def _left(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for service in self.cluster.services.values():
            found |= leftovers(service, len(SERVICES) + 2)
        found.pop("BufferServer._out.trainers._addresses", None)  # bounded as peers are
        return found

    async def _holds(self, what: str, seconds: float, holds: Callable[[], bool]) -> bool:
        """Wait until something holds, or a service has ended, or note that it does not."""
        for _ in range(int(seconds)):
            if self._ended():
                return False
            if holds():
                return True
            await asyncio.sleep(1.0)
        self.problems.append(f"not within {seconds:g} s: {what}; held: {self._left()}")
        return False

    async def _disturb(self) -> None:
        """Send the messages, and leave."""
        rng, peers = self.rng, []
        for _ in range(MESSAGES):
            if self._ended():
                return
            if len(peers) < PEERS:
                (socket,) = rng.choices(list(SOCKETS), (85, 5, 5, 5))
                peers.append(Peer(self, socket))
                await peers[-1].connect()
            peer = rng.choice(peers)
            await peer.act()
            invariants.check(self.cluster.services["buffer"].machine)
            if rng.random() < 0.05:
                peers.remove(peer)
                await peer.leave()
            if rng.random() < 0.004:
                name = rng.choice(SERVICES)
                await self.cluster.kill(name)
                await self.cluster.start(name)
            await asyncio.sleep(rng.choices((0.0, 0.02, 1.0, 6.0, 31.0), (75, 22, 2, 0.5, 0.3))[0])
        for peer in peers:
            await peer.leave()

    async def _honest(self) -> None:
        """Have rollouts until the others are gone, and one more from another client."""
        for last in (False, True):
            async with self.cluster.client(name=HONEST) as client:
                number = 0
                while await self._roll(client, number) and not (last or self.stopping.is_set()):
                    number = (number + 1) % 4
                    await asyncio.sleep(10.0)

    async def _roll(self, client: RolloutClient, number: int) -> bool:
        """Run a rollout under an id that others use, too; what fails begins again under another."""
        sampling, rollout_id = SamplingParams(max_tokens=40), "r"
        while True:
            try:
                rollout = await client.submit(
                    PROMPTS, n=2, sampling=sampling, rollout_number=number, repeat=True, rollout_id=rollout_id
                )
                groups = await rollout.result()
            except (RequestRefused, BufferLost) as error:
                rollout_id = f"r-{self.answers.total()}"
                self.answers[f"honest: {str(error)[:60]}"] += 1
                await asyncio.sleep(1.0)
                continue
            got = [each.token_ids.tolist() for group in groups for each in group.responses]
            digests = {group.weights_digest for group in groups}
            if len(digests) > 1 or got != ARRIVED.setdefault((min(digests), number), got):
                self.problems.append(f"the honest trainer got other responses: {digests}, {number}, {got}")
            self.answers["honest rollouts"] += 1
            return True


def _told(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error else ""


def _wall() -> int:
    return EPOCH_NS + int(asyncio.get_running_loop().time() * 1e9)


def play(seed: int) -> World:
    """Run a seed; return what came of it."""
    rand = random.Random(f"secrets {seed}")
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="odd-", dir=memory) as home,
        mock.patch.object(secrets, "randbits", rand.getrandbits),
        mock.patch.object(time, "time_ns", _wall),
        mock.patch.object(secrets, "token_hex", lambda size=32: rand.randbytes(size).hex()),
        quiet(),
    ):
        world = World(seed, home)
        try:
            run_virtual(world.play())
        except Exception:  # noqa: BLE001 - all that a run can end with
            world.problems.append(traceback.format_exc())
    return world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    types, answers = Counter(), Counter()
    harm: defaultdict[str, list[int]] = defaultdict(list)
    for seed in range(options.seed, options.seed + options.runs):
        world = play(seed)
        types, answers = types + world.types, answers + world.answers
        for problem in world.problems:
            harm[problem].append(seed)
    print(json.dumps({"types": types, "answers": answers, "harm": harm}, indent=1))
    return int(bool(harm))


if __name__ == "__main__":
    sys.exit(main())
