"""A stream of weights to eight nodes: who sends how much, and how fast, against eight bare copies at once.

Nodes are network namespaces of this machine, joined by a bridge; one more has trainer and buffer. Each node
runs a replay engine, which fetches and digests weights as any engine does, and has no model. Each turn takes:
- eight bare copies: one process sends a block of memory over eight TCP connections at once, and a process on
  each node writes it into a new file;
- an update whose digests are skipped on both sides: the transport alone;
- an update as it is, and deltas: 1 % and 10 % of all elements changed, `spread` or `clustered`.
`trainer_node_models` is what left the trainer's node in an update, by its interface's counter, in models;
`most_models` what left any engine's node. MB/s are the model's bytes, times eight, per second. With `--mbit`
each node sends and receives no more than that, so that links decide and not this machine's cores.
`over_whole` has seconds and bytes of deltas as shares of the whole update's in the same turn. Prints JSON.
Needs root, for `ip netns`.

    python bench/weights/fan_out.py --mb 200 --turns 3
    python bench/weights/fan_out.py --mb 200 --turns 3 --mbit 160
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from blake3 import blake3
from lib.hardware import machine

from seer.client import RolloutClient, sent_weights
from seer.common import blobs
from seer.common.blobs import Asked, write_at
from seer.common.config import load
from seer.common.process.service import run_process
from seer.services.buffer import server as buffer_server
from seer.services.buffer.weights import spool
from seer.services.engine import server as engine_server
from seer.services.engine.weights import manifest

NODES = 8
NAMES = [*(f"seer-n{number}" for number in range(NODES)), "seer-head"]
HEAD = "10.77.0.100"
PART = 2**21
PORT = 7190
KINDS = {
    f"{share:.0%} {name}": (share, name == "spread")
    for share in (0.01, 0.1)
    for name in ("spread", "clustered")
}
SWITCH = "seer-switch"
SERVERS = {"buffer": buffer_server.make, "engine": engine_server.make}


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def namespaces(mbit: Mapping[str, int]) -> Iterator[dict[str, str]]:
    """Make namespaces; give their addresses by name. `mbit` bounds what goes in and out of each, if not 0."""
    numbers = {name: number for number, name in enumerate(sorted(mbit.keys() - {"seer-head"}), 1)}
    places = {name: f"10.77.0.{number}" for name, number in numbers.items()} | {"seer-head": HEAD}
    try:
        run("ip", "netns", "add", SWITCH)  # apart from this machine's own rules for what is forwarded
        run("ip", "-n", SWITCH, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "switch", "up")
        for name, address in places.items():
            run("ip", "netns", "add", name)
            run(
                "ip", "-n", SWITCH, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name
            )
            run("ip", "-n", SWITCH, "link", "set", name, "master", "switch", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for place, device in ((name, "eth0"), (SWITCH, name)) if mbit[name] else ():
                bucket = ("rate", f"{mbit[name]}mbit", "burst", "256kb", "latency", "50ms")
                run("tc", "-n", place, "qdisc", "add", "dev", device, "root", "tbf", *bucket)
        yield places
    finally:
        for name in (*places, SWITCH):
            subprocess.run(("ip", "netns", "del", name), check=False)


def sent() -> dict[str, int]:
    """Return the bytes that left each namespace so far: what the switch's end of its cable received."""
    shown = subprocess.run(("ip", "-n", SWITCH, "-j", "-s", "link"), check=True, capture_output=True).stdout
    return {each["ifname"]: each["stats64"]["rx"]["bytes"] for each in json.loads(shown)}


def start(place: str, *arguments: str, script: str = __file__) -> subprocess.Popen[bytes]:
    """Start a part of a benchmark, by default of this one, in a namespace."""
    command = ("ip", "netns", "exec", place, sys.executable, script, *arguments)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


def line_of(process: subprocess.Popen[bytes]) -> Any:  # noqa: ANN401 - JSON
    if process.stdout is None or not (line := process.stdout.readline()):
        raise SystemExit("a process of the benchmark ended: see above")
    return json.loads(line)


# --- bare copies -----------------------------------------------------------------------------


def receive(address: str) -> None:
    """Write what one connection brings into a new file."""
    with socket.create_server((address, PORT)) as listener, tempfile.TemporaryDirectory() as scratch:
        print(json.dumps("ready"), flush=True)
        connection, _ = listener.accept()
        buffer, whole = bytearray(PART), 0
        with connection, (Path(scratch) / "copy").open("wb", buffering=0) as file:
            while count := connection.recv_into(buffer):
                file.write(memoryview(buffer)[:count])
                whole += count
        print(json.dumps(whole), flush=True)


def send(addresses: list[str], size: int) -> None:
    """Send a block of memory to all addresses at once; print when all have it and how long that took."""
    data = np.random.default_rng(0).bytes(size)

    def to(address: str) -> None:
        with socket.create_connection((address, PORT), timeout=600) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # until the receiver has written all and closes

    threads = [threading.Thread(target=to, args=[address]) for address in addresses]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(time.perf_counter() - started), flush=True)


def bare(places: dict[str, str], size: int) -> float:
    nodes = {name: address for name, address in places.items() if address != HEAD}
    receivers = [start(name, "receive", address) for name, address in nodes.items()]
    for receiver in receivers:
        line_of(receiver)
    sender = start("seer-head", "send", str(size), *nodes.values())
    seconds = float(line_of(sender))
    assert all(line_of(receiver) == size for receiver in receivers)
    for process in (*receivers, sender):
        process.wait()
    return seconds


# --- updates ---------------------------------------------------------------------------------


def serve(kind: str, name: str, *, digested: bool, here: bool = False, write_ms: int = 0) -> None:
    """Run one service, as if each node had disks of its own, unless it is `here`, where the buffer is.

    `write_ms`: how much longer each of its writes takes.
    """
    if not here:
        mock.patch.object(Asked, "here", return_value=False).start()
    for module in (blobs, spool) if write_ms else ():

        def slow(*given: Any) -> None:  # noqa: ANN401 - those of `write_at`
            time.sleep(write_ms / 1000)
            write_at(*given)

        mock.patch.object(module, "write_at", slow).start()
    if not digested:
        skip_digests()
    config = load(
        None,
        {},
        [
            f"endpoints.engines=tcp://{HEAD}:7102",
            f"endpoints.trainers=tcp://{HEAD}:7101",
            f"endpoints.events=tcp://{HEAD}:7103",
            f"endpoints.event_snapshots=tcp://{HEAD}:7104",
            f"engine.name={name}",
            "engine.backend=replay",
            "engine.kv_blocks=100",
            "drafts.source=off",
            "security.insecure=true",
            "log.level=error",
        ],
    )
    run_process(name, SERVERS[kind], config, 1)


def skip_digests() -> None:
    """Have all weights of the same names be the same, on both sides."""

    def hashes(tensors: list[Any], *_: object, **__: object) -> dict[str, bytes]:
        return {each.name: each.name.encode() for each in tensors}

    manifest.hashes_of = hashes  # type: ignore[assignment]
    sent_weights.hash_of = lambda entry, *_: entry.name.encode()


async def updates(size: int, *, digested: bool) -> None:
    """Update to a whole model, then by deltas if digests count; print what each took."""
    if not digested:
        skip_digests()
    tensors, found = random_tensors(size, 16), {}
    endpoint = f"tcp://{HEAD}:7101"
    async with RolloutClient(endpoint, deltas=False) as whole, RolloutClient(endpoint) as client:
        await engines_there(client, NODES)
        await one(whole, 1, tensors)  # to warm up
        change(tensors, 1.0, spread=False)
        found["whole"] = await one(whole, 2, tensors)
        if digested:
            await one(client, 3, tensors)  # the base of what follows
            for version, (kind, (share, spread)) in enumerate(KINDS.items(), 4):
                change(tensors, share, spread=spread)
                found[kind] = await one(client, version, tensors)
    print(json.dumps(found), flush=True)


def random_tensors(size: int, count: int) -> dict[str, np.ndarray]:
    """Return so many float16 tensors that have `size` bytes together."""
    seeds = np.random.default_rng(0)
    return {
        f"layer.{number}": seeds.integers(1, 2**14, size // 2 // count, np.uint16).view(np.float16)
        for number in range(count)
    }


async def engines_there(client: RolloutClient, count: int) -> None:
    """Wait for so many engines."""
    while (await client.status()).engines < count:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.1)


def change(tensors: dict[str, np.ndarray], share: float, *, spread: bool) -> None:
    """Change the last bit of this share of all elements, of all tensors alike or of the first ones."""
    left = round(share * sum(map(len, tensors.values())))
    for tensor in tensors.values():
        bits = tensor.view(np.uint16)
        if spread:
            bits[:: round(1 / share)] ^= 1
        else:
            bits[: max(0, left)] ^= 1
            left -= len(bits)


async def one(client: RolloutClient, version: int, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the seconds of an update, and what left each node."""
    before = sent()
    started = time.perf_counter()
    live = await client.update_weights(version, tensors)
    seconds = time.perf_counter() - started
    assert not live.quarantined, live.quarantined
    after = sent()
    left = {name: after[name] - before[name] for name in after if name.startswith("seer-")}
    return {"seconds": seconds, "left": left}


@contextlib.contextmanager
def serving(
    engines: Sequence[str], *flags: str, buffer: Sequence[str] = ()
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Have a buffer and replay engines in these namespaces; what is added to the list ends with them."""
    processes = [start("seer-head", "serve", "buffer", "buffer", *flags, *buffer)]
    try:
        line_of(processes[0])
        processes += [start(name, "serve", "engine", name, *flags) for name in engines]
        for process in processes[1:]:
            line_of(process)
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def update(
    places: dict[str, str], size: int, write_ms: int, *, digested: bool
) -> dict[str, dict[str, float]]:
    flag = ["--digested"] if digested else []
    nodes = [name for name, address in places.items() if address != HEAD]
    with serving(nodes, *flag, f"--write-ms={write_ms}") as processes:
        processes.append(trainer := start("seer-head", "update", str(size), *flag))
        found = line_of(trainer)
        trainer.wait()
    return {
        kind: {
            "seconds": each["seconds"],
            "trainer_node_models": each["left"].pop("seer-head") / size,
            "most_models": max(each["left"].values()) / size,
        }
        for kind, each in found.items()
    }


def turn(places: dict[str, str], size: int, write_ms: int) -> dict[str, Any]:
    copies = bare(places, size)
    transport = update(places, size, write_ms, digested=False)["whole"]
    found = update(places, size, write_ms, digested=True)
    whole = found["whole"]
    return {
        "bare_seconds": copies,
        "transport": transport,
        "update": whole,
        "deltas": {kind: found[kind] for kind in KINDS},
        "transport_over_bare": copies / transport["seconds"],
        "over_whole": {
            kind: {
                key: found[kind][key] / whole[key]
                for key in ("seconds", "trainer_node_models", "most_models")
            }
            for kind in KINDS
        },
    }


def digest_speed() -> dict[str, float]:
    """Return GB/s of one core by digest."""
    data = np.random.default_rng(0).bytes(2**26)
    makes = {"blake2b": hashlib.blake2b, "sha256": hashlib.sha256, "blake3": blake3}
    speeds = {}
    for name, make in makes.items():
        times = []
        for _ in range(5):
            started = time.perf_counter()
            make(data).digest()
            times.append(time.perf_counter() - started)
        speeds[name] = round(len(data) / statistics.median(times) / 1e9, 2)
    return speeds


def measure(mb: int, turns: int, mbit: int, write_ms: int) -> None:
    size = mb * 10**6 // 64 * 64
    with namespaces(dict.fromkeys(NAMES, mbit)) as places:
        found = [turn(places, size, write_ms) for _ in range(turns)]

    def median(*keys: str) -> float:
        values = []
        for each in found:
            value: Any = each
            for key in keys:
                value = value[key]
            values.append(value)
        return round(statistics.median(values), 3)

    report = {
        "machine": machine("zmq", "numpy"),
        "model_mb": mb,
        "mbit": mbit,
        "write_ms": write_ms,
        "nodes": NODES,
        "bare_mb_per_s": round(NODES * mb / median("bare_seconds")),
        "transport_mb_per_s": round(NODES * mb / median("transport", "seconds")),
        "update_mb_per_s": round(NODES * mb / median("update", "seconds")),
        "transport_over_bare": median("transport_over_bare"),
        "digest_seconds": round(median("update", "seconds") - median("transport", "seconds"), 3),
        "trainer_node_models": median("update", "trainer_node_models"),
        "most_models": median("update", "most_models"),
        "over_whole": {
            kind: {key: median("over_whole", kind, key) for key in found[0]["over_whole"][kind]}
            for kind in KINDS
        },
        "digest_gb_per_s_a_core": digest_speed(),
        "turns": found,
    }
    print(json.dumps(report, indent=1))


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "receive":
        receive(sys.argv[2])
    elif len(sys.argv) > 1 and sys.argv[1] == "send":
        send(sys.argv[3:], int(sys.argv[2]))
    elif len(sys.argv) > 1 and sys.argv[1] == "serve":
        flags = {"digested": "--digested" in sys.argv, "here": "--here" in sys.argv}
        slow = sum(int(each.partition("=")[2]) for each in sys.argv if each.startswith("--write-ms="))
        serve(sys.argv[2], sys.argv[3], **flags, write_ms=slow)
    elif len(sys.argv) > 1 and sys.argv[1] == "update":
        asyncio.run(updates(int(sys.argv[2]), digested="--digested" in sys.argv))
    else:
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--mb", type=int, default=200)
        parser.add_argument("--turns", type=int, default=3)
        parser.add_argument("--mbit", type=int, default=0, help="of each node's link, both ways; 0: no bound")
        parser.add_argument("--write-ms", type=int, default=0, help="how much longer each write takes")
        given = parser.parse_args()
        if os.geteuid():
            parser.error("run it as root: network namespaces need that")
        measure(given.mb, given.turns, given.mbit, given.write_ms)


if __name__ == "__main__":
    main()
