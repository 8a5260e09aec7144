"""A live fuzzer: hostile peers on every socket of a running system, while an honest rollout goes on.

`python tests/process/fuzz.py --frames 1000000 --seed 1` prints what it did and saw as JSON and exits
with 1 when anything came to harm. A frame here is a whole message, as it leaves a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import zmq

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from living import wait_for
from process.fuzz_messages import MUTE, UNIONS, Maker
from process.fuzz_system import DEADLINE, OWNERS, SERVICES, Honest, System

from seer.common import wire
from seer.common.net.identity import Identity
from seer.common.types import InstanceStats
from seer.common.wire.codec import encode

KINDS = {
    "random": 10, "hostile": 20, "sound": 12, "truncated": 10, "flipped": 15, "wrong union": 8, "replayed": 12,
    "bad hello": 5, "mute": 8, "oversized": 0.01,
}  # fmt: skip
"""Kinds of messages and how often each comes; `mute` asks for answers that nobody reads."""

MOST_EVENTS = 5
"""Warnings of one kind about one engine: a hostile one comes and goes a few times."""

WARM_UP = 20_000
"""Messages before memory is measured first."""

BURST = 50
STRETCH = 1500
"""Messages on one socket at a stretch, and of one peer."""

MOST_MIB = 256.0
"""Growth of a service that is called harm: a thousand answers may wait for each peer that does not read."""


class Peer:
    """One hostile connection. It says Hello first, mostly; a mute one never reads."""

    def __init__(
        self, context: zmq.Context, maker: Maker, name: str, endpoint: str, number: int, keys: Path | None
    ) -> None:
        rng = maker.rng
        self.socket_name = name
        stale = rng.random() < 0.1  # an earlier incarnation of an honest peer
        role, real = {"trainers": ("trainer", "background")}.get(name, ("engine", "e0"))
        self.who = Identity(
            role=role,
            name=real if stale else f"f{number}",
            incarnation=number if stale else (1 << 62) + number,
        )
        self.mute = rng.random() < 0.1
        self.left = rng.randrange(STRETCH // 10, STRETCH)
        self.patience = 5_000
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, self.who.address())
        self.socket.setsockopt(zmq.RCVHWM, 1 if self.mute else 1000)
        if keys is not None:
            self._present(keys, "trainer" if role == "trainer" else "engine", rng)
        self.socket.connect(endpoint)
        self.greeted = rng.random() < 0.8
        if self.greeted:
            self.say(maker.hello(self.who))

    def _present(self, keys: Path, role: str, rng: random.Random) -> None:
        """Take a key: mostly the right one, else that of another role, an unknown one, or none."""
        which = rng.choices(("right", "other", "unknown", "other server", "none"), (70, 10, 8, 4, 8))[0]
        if which != "right":
            self.left, self.patience = min(self.left, 2 * BURST), 0  # most are not let in, and get no room
        if which == "none":
            return
        other = rng.choice(("observer", "generator", "engine" if role == "trainer" else "trainer"))
        file = keys / f"{role if which == 'right' else other}.key"
        secret = file.read_text().split()[1].encode()
        public, unknown = zmq.curve_keypair()
        server = (keys / "public" / "server.pub").read_bytes().strip()
        secret = unknown if which == "unknown" else secret
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, public if which == "other server" else server)

    def send(self, frames: list[bytes]) -> bool:
        """Send one message; False when there is no room for long: this peer is stuck."""
        if not self.mute:
            self.read()
        if not self.socket.poll(0 if self.mute else self.patience, zmq.POLLOUT) or not self.say(frames):
            return False
        self.left -= 1
        return self.left > 0

    def say(self, frames: list[bytes]) -> bool:
        """Send one message if there is room: whose key is not admitted loses its connection at any moment."""
        try:
            self.socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def read(self) -> None:
        while self.socket.poll(0, zmq.POLLIN):
            self.socket.recv_multipart()


class Fuzzer:
    """Sends `frames` messages to `sockets`; `counts` has them by kind."""

    def __init__(self, system: System, maker: Maker, sockets: Sequence[str] = tuple(UNIONS)) -> None:
        self.system = system
        self.keys = system.keys if system.keys.exists() else None
        self.sockets = sockets
        self.maker = maker
        self.rng = self.maker.rng
        self.context = zmq.Context(2)
        self.counts: Counter[str] = Counter()
        self.peers: list[Peer] = []
        self.made = 0

    def run(self, frames: int) -> None:
        while self.counts.total() < frames and self.system.alive:
            if self.rng.random() < 0.03:
                self._subscribe(self.rng.choice(("events", "estimates")))
            if self.rng.random() < 0.03:
                self._raw(self.rng.choice(list(OWNERS)))
            if len(self.peers) < 12:
                name = self.rng.choice(self.sockets)
                self.made += 1
                self.peers.append(
                    Peer(self.context, self.maker, name, self.system.at[name], self.made, self.keys)
                )
            peer = self.rng.choice(self.peers)
            if not self._burst(peer):
                self.peers.remove(peer)
                peer.socket.close(self.rng.choice((0, 2_000, 2_000, 2_000)))

    def close(self) -> None:
        self.context.destroy(linger=2_000)

    def _burst(self, peer: Peer) -> bool:
        (kind,) = self.rng.choices(list(KINDS), list(KINDS.values()))
        if peer.greeted:  # again: what it said last may have cost it the connection
            peer.say(self.maker.hello(peer.who))
            self.counts["hello"] += 1
        asking = MUTE.get(peer.socket_name, wire.SnapshotRequest)
        for _ in range(1 if kind == "oversized" else BURST):
            if kind == "mute":
                question = {wire.Fetch: {"groups": []}, wire.EngineStatus: {"stats": InstanceStats()}}.get(
                    asking, {}
                )
                frames = [bytes(frame) for frame in encode(asking(**question))]
            elif kind == "sound":
                frames = self.maker.sound(peer.socket_name)
            else:
                frames = self.maker.made(kind, peer.socket_name, peer.who)
            if not peer.send(frames):
                return False
            self.counts[kind if peer.greeted else f"{kind}, no hello"] += 1
        if self.rng.random() < 0.05:  # what follows is out of order
            peer.say([b"\x81\xa4type\xa7Goodbye"])
            self.counts["goodbye"] += 1
        return True

    def _subscribe(self, name: str) -> None:
        subscriber = self.context.socket(zmq.XSUB)
        subscriber.setsockopt(zmq.LINGER, 200)
        subscriber.connect(self.system.at[name])
        for _ in range(BURST):
            subscriber.send(self.rng.choice((b"\x01", b"\x00", b"\x02", b"")) + self.rng.randbytes(20))
            self.counts["subscription"] += 1
        subscriber.close()

    def _raw(self, name: str) -> None:
        """Say something that is no ZMTP, or stops being it half-way."""
        port = int(self.system.at[name].rpartition(":")[2])
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
        start = self.rng.choice(
            (b"", b"GET / HTTP/1.1\r\n\r\n", greeting[: self.rng.randrange(64)], greeting)
        )
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
                raw.sendall(start + self.rng.randbytes(self.rng.randrange(2000)))
        except OSError:
            self.counts["raw, cut off"] += 1
        self.counts["raw"] += 1


def fuzz(frames: int, seed: int, *, keys: bool = False) -> dict[str, object]:
    """Run it all; the report's `harm` lists whatever went wrong. With `keys`, some peers have the right ones."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/tmp"))
    system = System(folder, keys=keys)
    known = ["nobody/0#0"]
    honest = Honest(system, known)
    try:
        honest.start()
        wait_for(lambda: honest.rollouts > 0 or bool(honest.error), DEADLINE)
        undisturbed = honest.rollouts
        with contextlib.closing(Fuzzer(system, Maker(random.Random(seed), known))) as fuzzer:
            fuzzer.run(max(frames // 10, min(frames, WARM_UP)))
            before, started = system.rss_mib() if system.alive else {}, time.monotonic()
            sent = fuzzer.counts.total()
            fuzzer.run(frames)
            seconds = time.monotonic() - started
        honest.stopping.set()
        if not system.alive:
            ends = {
                name: (code, system.log(name).read_bytes()[-3000:].decode(errors="replace"))
                for name, process in system.processes.items()
                if (code := process.poll()) is not None
            }
            return {"seed": seed, "frames": fuzzer.counts.total(), "harm": {"died": ends}}
        honest.join(DEADLINE)
        after = system.rss_mib()
        newcomer = Honest(system, [])
        asyncio.run(_one(newcomer))
        codes = system.stop()
        served = {name: _served(system.lines(name)) for name in SERVICES[:3]}
        report: dict[str, object] = {
            "seed": seed,
            "frames": fuzzer.counts.total(),
            "frames_per_second": round((fuzzer.counts.total() - sent) / seconds),
            "peers": fuzzer.made,
            "messages_that_arrived": sum(map(_arrived, served.values())),
            "by_kind": dict(sorted(fuzzer.counts.items())),
            "by_type": dict(sorted(fuzzer.maker.types.items())),
            "rollouts": honest.rollouts - undisturbed,
            "slowest_rollout_seconds": round(honest.slowest, 2),
            "rss_mib": {name: [before[name], after[name]] for name in SERVICES},
            "messages": served,
        }
        harm = {
            "not drained": any(codes.values()),
            "an honest rollout failed": honest.error,
            "no honest rollout finished meanwhile": honest.rollouts == undisturbed,
            "an honest response changed": honest.wrong,
            "a new client got something else": newcomer.expected != honest.expected,
            "memory grew": {name: after[name] for name in SERVICES if after[name] - before[name] > MOST_MIB},
            **{f"{name} logged": _noise(system.lines(name)) for name in SERVICES},
        }
        return report | {"harm": {what: value for what, value in harm.items() if value}}
    finally:
        system.kill()
        shutil.rmtree(folder)


async def _one(newcomer: Honest) -> None:
    async with newcomer.client("background-new") as client:
        newcomer.expected = await asyncio.wait_for(newcomer.once(client), DEADLINE)


def _served(lines: list[dict]) -> dict[str, object]:
    """Return the counters that a service logs when it ends."""
    (served,) = [line for line in lines if line["event"] == "served"]
    return {
        key: value for key, value in served.items() if key not in ("event", "level", "timestamp", "service")
    }


def _arrived(counters: dict) -> int:
    """Return how many messages came to the sockets of a service."""
    inner = sum(_arrived(value) for value in counters.values() if isinstance(value, dict))
    return inner + sum(counters.get(name, 0) for name in ("received", "malformed", "strangers", "refused"))


def _noise(lines: list[dict]) -> str:
    """Return what a service should not have logged: errors, or one complaint twice."""
    complaints = Counter(
        (line["event"], line["peer"]) for line in lines if line["level"] == "warning" and "peer" in line
    )
    twice = [str(what) for what, count in complaints.items() if count > 1]
    errors = [str(line) for line in lines if line["level"] not in ("info", "warning")]
    unnamed = Counter(
        # Each socket tells once a minute, a buffer of failed prompts a line per rollout and reason, and of what
        # is beyond its bound on these a line, without a rollout, every ten seconds.
        (line["event"], line.get("engine", line.get("endpoint", line.get("rollout", ""))))
        for line in lines
        if line["level"] == "warning" and "peer" not in line and line.get("rollout") != ""
    )
    often = [f"{what} {count} times" for what, count in unnamed.items() if count > MOST_EVENTS]
    return "; ".join([*errors[:3], *twice[:3], *often])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keys", action="store_true", help="CURVE keys for all, and for some hostile peers")
    options = parser.parse_args()
    report = fuzz(options.frames, options.seed, keys=options.keys)
    print(json.dumps(report, indent=2))
    return int(bool(report["harm"]))


if __name__ == "__main__":
    sys.exit(main())
