"""Weight updates of two instances, streamed and from a folder, against a raw TCP copy of the same bytes.

A whole local system with the vLLM backend. Each turn copies the file over a TCP connection on
loopback into a file (the peer), streams the tensors in an update, updates from the folder, and, where
Mooncake is installed, has the engines read the tensors from here over TCP; then in place, from shared
memory and by a broadcast. `over_streamed_update` has seconds as shares of those of a streamed update.
`mooncake_mb_per_s` is one reader's copy into a file, the start of its process included.
`stream_mb_per_s` is what reached the spool while the update ran, digests apart; only for models of 50 MB
or more, since a smaller one is there before it was looked for twice. `pause_seconds` is what
a rollout in flight sees of an update: from its last token until the new weights are live.
`finite_check` is what it costs to look for NaN and infinities: seconds more of an engine's check of a
folder, and seconds before an update in place is offered, as shares of those updates too. Prints JSON.

    python bench/weights/update.py --model examples/countdown/model --turns 5
    python bench/weights/update.py --synthetic 1000 --turns 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lib.hardware import machine
from lib.random_model import random_llama
from safetensors.torch import load_file, save_file

from seer.client import (
    Broadcast,
    InvalidField,
    MooncakeSource,
    RolloutClient,
    SamplingParams,
    SharedTensors,
)
from seer.common.blobs import Blob
from seer.common.config import load
from seer.common.weights.digest import hashes_of
from seer.common.weights.mooncake import SCHEME
from seer.common.weights.safetensors import stored
from seer.local.system import LocalSystem
from seer.services.buffer.weights import spool_folder
from seer.services.engine.weights.mooncake_reader import TrainerMemory

PART = 2**21
LARGE = 50e6


def raw_copy(source: Path, target: Path) -> float:
    """Send a file over TCP on loopback into another file; return seconds."""
    listener = socket.create_server(("127.0.0.1", 0))

    def receive() -> None:
        connection, _ = listener.accept()
        # Written over, as the spool's file is: the pages of a new file cost more than the copy.
        with connection, target.open("r+b" if target.exists() else "wb") as file:
            buffer = bytearray(PART)
            while count := connection.recv_into(buffer):
                file.write(memoryview(buffer)[:count])

    receiver = threading.Thread(target=receive)
    receiver.start()
    data = source.read_bytes()
    started = time.perf_counter()
    with socket.create_connection(listener.getsockname()) as connection:
        connection.sendall(data)
    receiver.join()
    listener.close()
    return time.perf_counter() - started


def watch_spool(folder: Path, size: int) -> tuple[float, float]:
    """Return when the first and the last bytes of the next stream are in the spool."""
    known = set(folder.glob("*/*.safetensors"))
    first = 0.0
    while True:
        now = time.perf_counter()
        for file in set(folder.glob("*/*.safetensors")) - known:
            have = file.stat().st_size
            if have and not first:
                first = now
            if have >= size:
                return first, now
        time.sleep(0.002)


async def with_mooncake(
    client: RolloutClient, source: MooncakeSource, folder: Path, size: int, version: int
) -> dict[str, float]:
    """Measure one reader's copy into a folder, and an update; nothing without Mooncake."""
    try:
        place, _ = await asyncio.to_thread(source.offer, "bench")
    except InvalidField as error:
        print(error, file=sys.stderr)
        return {}
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    started = time.perf_counter()
    memory = TrainerMemory(place.removeprefix(SCHEME))
    await memory.fetch(Blob("bench", memory.size, folder))
    copied = time.perf_counter()
    await client.update_weights(version, source)
    return {
        "mooncake_mb_per_s": size / (copied - started) / 1e6,
        "mooncake_update_seconds": time.perf_counter() - copied,
    }


async def in_place(client: RolloutClient, tensors: dict[str, torch.Tensor], version: int) -> dict[str, float]:
    """Measure an update from shared memory, and one by a broadcast."""
    measured = {}
    sources = {"shared": SharedTensors(tensors), "broadcast": Broadcast(tensors)}
    for number, (name, source) in enumerate(sources.items()):
        started = time.perf_counter()
        live = await client.update_weights(version + number, source)
        measured[f"{name}_update_seconds"] = time.perf_counter() - started
        if live.quarantined:
            raise RuntimeError(f"{name}: {live.quarantined}")
    return measured


def finite_check(model: Path, turns: int) -> tuple[float, float]:
    """Return seconds more of a check of all bytes, and seconds of that before an update in place."""
    tensors = stored(model)

    def seconds(finite: bool) -> float:
        started = time.perf_counter()
        hashes_of(tensors, finite=finite)
        return time.perf_counter() - started

    more = statistics.median(seconds(True) - seconds(False) for _ in range(turns))
    source = load_file(model / "model.safetensors")

    def offered(finite: bool) -> float:
        shared = SharedTensors(source, finite=finite)
        started = time.perf_counter()
        shared.offer("bench")
        taken = time.perf_counter() - started
        shared.end()
        return taken

    return more, statistics.median(offered(True) - offered(False) for _ in range(turns))


async def turn(
    client: RolloutClient, model: Path, spool: Path, version: int, held: MooncakeSource
) -> dict[str, float]:
    """Measure one of each kind."""
    file = model / "model.safetensors"
    tensors = {name: tensor + version * 1e-3 for name, tensor in load_file(file).items()}
    folder = spool.parent / "folder"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    size = file.stat().st_size

    raw = await asyncio.to_thread(raw_copy, file, spool.parent / "raw")
    started = time.perf_counter()
    watching = asyncio.create_task(asyncio.to_thread(watch_spool, spool / spool_folder.NAME, size))
    await client.update_weights(version, {name: tensor * 1.001 for name, tensor in tensors.items()})
    streamed = time.perf_counter() - started
    first, last = await watching

    started = time.perf_counter()
    await client.update_weights(version + 1, folder)
    from_folder = time.perf_counter() - started

    held.tensors = {name: tensor * 1.002 for name, tensor in tensors.items()}
    by_mooncake = await with_mooncake(client, held, spool.parent / "read", size, version + 2)

    updated_in_place = await in_place(client, tensors, version + 3)

    rollout = await client.submit([[1, 5, 9]], n=8, sampling=SamplingParams(max_tokens=32, ignore_eos=True))
    update = asyncio.create_task(client.update_weights(version + 5, tensors | {}))
    await rollout.result()
    ended = time.perf_counter()
    await update
    # The first part is under way when its bytes are seen.
    return {
        "raw_tcp_mb_per_s": size / raw / 1e6,
        **({"stream_mb_per_s": (size - PART) / (last - first) / 1e6} if size >= LARGE else {}),
        "streamed_update_seconds": streamed,
        "folder_update_seconds": from_folder,
        **by_mooncake,
        **updated_in_place,
        "pause_seconds": time.perf_counter() - ended,
    }


async def measure(model: Path, turns: int) -> list[dict[str, float]]:
    """Run a system of two instances and take turns."""
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as scratch:
        spool = Path(scratch) / "spool"
        settings = [f"shared.model={model}", "engine.max_model_len=256", "engine.kv_blocks=100"]
        config = load(None, {}, [*settings, f"buffer.spool={spool}", "engine.in_place_updates=true"])
        async with LocalSystem(config, 2) as system, RolloutClient(system.endpoint) as client:
            held = MooncakeSource({})
            await turn(client, model, spool, 1, held)
            return [await turn(client, model, spool, 10 + 6 * number, held) for number in range(turns)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="model folder with one model.safetensors")
    parser.add_argument("--synthetic", type=int, metavar="MB", help="a random model of this size instead")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    if (given.model is None) == (given.synthetic is None):
        parser.error("give either --model or --synthetic")
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as scratch:
        model = given.model or random_llama(Path(scratch), given.synthetic)
        size = (model / "model.safetensors").stat().st_size
        turns = asyncio.run(measure(model.absolute(), given.turns))
        checked, offered = finite_check(model, max(5, given.turns))
    medians = {key: statistics.median(each[key] for each in turns) for key in turns[0]}
    ratios = [each["stream_mb_per_s"] / each["raw_tcp_mb_per_s"] for each in turns if size >= LARGE]
    over_stream = {
        name: [each[f"{name}_update_seconds"] / each["streamed_update_seconds"] for each in turns]
        for name in ("folder", "shared", "broadcast")
    }
    report: dict[str, Any] = {
        "machine": machine("torch", "vllm"),
        "model_mb": round(size / 1e6, 2),
        "instances": 2,
        "medians": {key: round(value, 3) for key, value in medians.items()},
        **({"stream_over_raw_tcp": {"median": statistics.median(ratios), "all": ratios}} if ratios else {}),
        "over_streamed_update": {
            name: {"median": statistics.median(each), "all": each} for name, each in over_stream.items()
        },
        "finite_check": {
            "seconds": checked,
            "over_folder_update": checked / medians["folder_update_seconds"],
            "over_streamed_update": checked / medians["streamed_update_seconds"],
            "in_place_seconds": offered,
            "over_shared_update": offered / medians["shared_update_seconds"],
        },
        "turns": turns,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
