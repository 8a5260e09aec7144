"""Shards over links: four ranks of a trainer that send a model side by side, against one that sends all.

As in `fan_out.py`, nodes are network namespaces of this machine. Each rank has one, whose link has `--mbit`
both ways; the link of the buffer's node, and those of engines' nodes, have `--wider` times as much. A turn
takes an update by the first rank alone and one by all ranks (`ShardedTensors`, torch.distributed over Gloo),
for one engine beside the buffer, which reads the buffer's file, and for eight nodes that copy the stream.
Seconds are from the call, digests and all, until the weights are live; `link_seconds` is what the model's
bytes take on a rank's link; `over_one` has the ranks' seconds as a share of one rank's in the same turn.
Models that left nodes are by their interfaces' counters. With `--write-ms` each write of the buffer takes so
much longer, so that its writes decide. Prints JSON. Needs root, for `ip netns`, and torch.

    python bench/weights/shards.py --mb 100 --mbit 80 --turns 3
    python bench/weights/shards.py --mb 100 --mbit 0 --write-ms 40
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import fan_out
from fan_out import HEAD, NODES, change, line_of, namespaces, one, sent, start
from lib.hardware import machine

from seer.client import RolloutClient, ShardedTensors, TorchRanks

RANKS = 4
TRAINERS = [f"seer-t{number}" for number in range(RANKS)]
ENGINES = {"beside the buffer": ["seer-head"], "eight nodes": [f"seer-n{number}" for number in range(NODES)]}
TENSORS = 64
STORE_PORT = 7191


# --- a rank ----------------------------------------------------------------------------------


async def rank(number: int, size: int, engines: int, turns: int, store: str) -> None:
    """Take turns with the other ranks; the first one prints what each update took."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://{store}:{STORE_PORT}", rank=number, world_size=RANKS)
    ranks, tensors, found = TorchRanks(), fan_out.random_tensors(size, TENSORS), []
    async with RolloutClient(f"tcp://{HEAD}:7101", deltas=False) as client:
        await fan_out.engines_there(client, engines)

        async def by_all(version: int) -> dict[str, Any]:
            before, started = sent(), time.perf_counter()
            shards = await asyncio.to_thread(ShardedTensors, tensors)
            await client.update_weights(version, shards)
            seconds, after = time.perf_counter() - started, sent()
            return {"seconds": seconds, "left": {name: after[name] - before[name] for name in after}}

        async def by_one(version: int) -> dict[str, Any]:
            return await one(client, version, tensors) if number == 0 else {}

        ways: dict[str, Callable[[int], Awaitable[dict[str, Any]]]] = {"one": by_one, "all": by_all}
        for turn in range(turns + 1):  # the first one is to warm up
            took = {}
            for place, (way, update) in enumerate(ways.items()):
                change(tensors, 1.0, spread=False)
                await asyncio.to_thread(ranks.gather, None)  # all begin together
                took[way] = await update(2 * turn + place + 1)
            found.append(took)
    if number == 0:
        print(json.dumps(found[1:]), flush=True)
    dist.destroy_process_group()


# --- all of them -----------------------------------------------------------------------------


def updates(
    places: dict[str, str], engines: list[str], size: int, turns: int, write_ms: int
) -> list[dict[str, Any]]:
    """Return what updates took and sent, by turn and way."""
    beside = ["--here"] if engines == ["seer-head"] else []
    given = [str(size), str(len(engines)), str(turns), places[TRAINERS[0]]]
    with fan_out.serving(engines, "--digested", *beside, buffer=[f"--write-ms={write_ms}"]) as processes:
        trainers = [
            start(name, "rank", str(number), *given, script=__file__) for number, name in enumerate(TRAINERS)
        ]
        processes += trainers
        found: list[dict[str, Any]] = line_of(trainers[0])
        for trainer in trainers:
            trainer.wait()
    return [{way: figures(each, size) for way, each in turn.items()} for turn in found]


def figures(found: dict[str, Any], size: int) -> dict[str, float]:
    left = {name: count / size for name, count in found["left"].items() if name.startswith("seer-")}
    trainers = [left[name] for name in TRAINERS]
    return {
        "seconds": found["seconds"],
        "first_rank_models": trainers[0],
        "most_of_a_rank": max(trainers),
        "buffer_node_models": left["seer-head"],
    }


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of all turns, and the ranks' seconds over one rank's, turn by turn."""
    ratios = sorted(turn["all"]["seconds"] / turn["one"]["seconds"] for turn in turns)
    return {
        way: {key: round(statistics.median(turn[way][key] for turn in turns), 3) for key in turns[0][way]}
        for way in ("one", "all")
    } | {"over_one": [round(each, 3) for each in (statistics.median(ratios), ratios[0], ratios[-1])]}


def measure(mb: int, turns: int, mbit: int, wider: int, write_ms: int) -> None:
    size = mb * 10**6 // 128 * 128
    links = dict.fromkeys(["seer-head", *ENGINES["eight nodes"]], wider * mbit) | dict.fromkeys(
        TRAINERS, mbit
    )
    with namespaces(links) as places:
        found = {name: updates(places, engines, size, turns, write_ms) for name, engines in ENGINES.items()}
    report = {
        "machine": machine("zmq", "numpy", "torch"),
        "model_mb": mb,
        "mbit": {"rank": mbit, "others": wider * mbit},
        "write_ms": write_ms,
        "link_seconds": round(8 * mb / mbit, 2) if mbit else 0,
        "engines": {name: summary(each) for name, each in found.items()},
        "turns": found,
    }
    print(json.dumps(report, indent=1))


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "rank":
        number, size, engines, turns = map(int, sys.argv[2:6])
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        asyncio.run(rank(number, size, engines, turns, sys.argv[6]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=80, help="of each rank's link; 0: no bounds")
    parser.add_argument("--wider", type=int, default=4, help="times as much have all other links")
    parser.add_argument("--write-ms", type=int, default=0, help="how much longer the buffer's writes take")
    given = parser.parse_args()
    if os.geteuid():
        parser.error("run it as root: network namespaces need that")
    measure(given.mb, given.turns, given.mbit, given.wider, given.write_ms)


if __name__ == "__main__":
    main()
