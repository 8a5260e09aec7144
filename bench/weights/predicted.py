"""How long updates of large models take on many nodes: a model's figures, and its error on eight nodes here.

The model is `update_model.py`. This script measures its constants: costs of hashes, checks, comparisons and
deltas on one thread each; and those of messages by the kernel's account of the processes' threads, while a
stream goes to one node and to three, which are network namespaces as in `fan_out.py`. Then it predicts
updates to eight nodes here, whole ones and deltas, of two sizes over links of two speeds, and runs them.
`error` is predicted seconds over measured ones, less 1. The model is told how many cores an update has:
those that threads with nothing but work to do get before it and after it. In the end it predicts clusters
nobody measured. Prints JSON. Needs root, for `ip netns`.

    python bench/weights/predicted.py --turns 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fan_out
import numpy as np
from fan_out import HEAD, KINDS, change, line_of, namespaces, start
from lib.hardware import machine
from update_model import Cluster, Costs, Update, bounds, from_folder, part_of, phases

from seer.client import RolloutClient
from seer.client.tensor_stream import TensorStream, hash_of
from seer.common.blobs import Blob
from seer.common.weights import delta
from seer.common.weights.digest import BLAKE3, hashes_of
from seer.common.weights.safetensors import stored
from seer.common.wire import SPOOL_BYTES

TICKS = os.sysconf("SC_CLK_TCK")


# --- costs on one thread ---------------------------------------------------------------------


def thread_seconds(work: Callable[[], object], turns: int = 5) -> float:
    """Return the seconds of a core that some work takes on this thread: the median."""
    times = []
    for _ in range(turns):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return statistics.median(times)


def bare_costs(size: int = 2**26) -> dict[str, Any]:
    """Return the costs of what threads do with a tensor: see `Costs`."""
    old = np.random.default_rng(0).integers(1, 2**14, size // 2, np.uint16).view(np.float16)
    gb = size / 1e9
    target = np.empty_like(old)
    compare, apply = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base.safetensors"
        written(TensorStream({"layer": old}), base)
        check = in_one_thread(lambda: hashes_of(stored(base.parent), finite=True))
        for kind, (share, spread) in KINDS.items():
            new = old.copy()
            change({"layer": new}, share, spread=spread)
            was, now = old.view(np.uint8), new.view(np.uint8)
            compare[kind] = thread_seconds(lambda was=was, now=now: delta.changes(was, now, 2)) / gb
            found = delta.changes(was, now, 2)
            assert found is not None
            parts = {delta.GAPS + "layer": found.gaps, delta.VALUES + "layer": found.values}
            file, result = Path(scratch) / "delta", Path(scratch) / "result"
            written(TensorStream(parts, {delta.BASE: "base"}), file)
            result.write_bytes(base.read_bytes())
            apply[kind] = in_one_thread(lambda f=file, r=result: delta.apply(base, f, r, "base")) / gb
    [entry] = TensorStream({"layer": old}).entries
    return {
        "hash": thread_seconds(lambda: hash_of(entry, old.view(np.uint8), BLAKE3)) / gb,
        "keep": thread_seconds(lambda: np.copyto(target, old)) / gb,
        "check": check / gb,
        "compare": compare,
        "apply": apply,
        "give": give_cost(),
        "handover": asyncio.run(handover()),
    }


def give_cost(count: int = 8) -> float:
    """Return what it costs to read a message's bytes, and to sum them."""
    with tempfile.TemporaryDirectory() as scratch:
        blob = Blob("v0", count * SPOOL_BYTES, Path(scratch))
        np.random.default_rng(0).integers(0, 255, blob.size, np.uint8).tofile(blob.file)
        seconds = thread_seconds(
            lambda: [blob.read(each * SPOOL_BYTES, SPOOL_BYTES) for each in range(count)]
        )
    return seconds / blob.size * 1e9


def in_one_thread(work: Callable[[], object]) -> float:
    """Return the seconds of a core that some work with one tensor takes, which a pool of threads does."""
    times = []
    for _ in range(5):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return statistics.median(times)


def written(stream: TensorStream, file: Path) -> None:
    file.write_bytes(stream.read(0, stream.size).tobytes())


async def handover() -> float:
    """Return the seconds until a thread that does nothing is heard of: a low one, as others use the cores."""
    times = []
    for _ in range(2000):
        started = time.perf_counter()
        await asyncio.to_thread(int)
        times.append(time.perf_counter() - started)
    return statistics.quantiles(times, n=10)[0]


# --- a trainer that accounts for all processes -----------------------------------------------


def used(pid: int) -> dict[str, float]:
    """Return the seconds of a core that a process used: on its event loop, on its IO thread, in all."""
    loop = io = 0.0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            spent = int((thread / "schedstat").read_text().split()[0]) / 1e9
            loop += spent if thread.name == str(pid) else 0
            io += spent if (thread / "comm").read_text().startswith("ZMQbg/IO") else 0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    whole = (int(fields[11]) + int(fields[12])) / TICKS
    return {"loop": loop, "io": io, "all": whole}


def cores_here(seconds: float = 0.3) -> float:
    """Return how many cores threads with nothing but work to do get now, beside what else runs here."""
    data, started, began = bytes(2**20), time.perf_counter(), time.process_time()

    def work(_: int) -> None:
        while time.perf_counter() - started < seconds:
            hashlib.blake2b(data)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, range(os.cpu_count() or 1)))
    return (time.process_time() - began) / (time.perf_counter() - started)


async def trainer(size: int, nodes: int, pids: list[int], *, digested: bool) -> None:
    """Update: whole, then by deltas if digests count; print what each took, and what processes used."""
    if not digested:
        fan_out.skip_digests()
    tensors, found = fan_out.random_tensors(size, 32), {}
    async with RolloutClient(f"tcp://{HEAD}:7101", deltas=digested) as client:
        await fan_out.engines_there(client, nodes)
        # The buffer's third stream overwrites the first one's file, as all later ones do.
        for version in () if digested else (1, 2):
            await client.update_weights(version, tensors)
            await asyncio.sleep(2)  # the buffer looks twice a second for files that nobody needs
        for version, kind in enumerate(["", *(KINDS if digested else ())], 3):
            if kind:
                share, spread = KINDS[kind]
                change(tensors, share, spread=spread)
            cores, before = cores_here(), [used(pid) for pid in pids]
            started = time.perf_counter()
            await client.update_weights(version, tensors)
            seconds = time.perf_counter() - started
            after = [used(pid) for pid in pids]
            spent = [{key: b[key] - a[key] for key in a} for a, b in zip(before, after, strict=True)]
            sent = client.deltas.last.sent / size if digested else 1.0
            cores = (cores + cores_here()) / 2
            found[kind] = {"seconds": seconds, "cores": cores, "used": spent, "bytes": sent}
    print(json.dumps(found), flush=True)


def run(places: dict[str, str], size: int, nodes: int, *, digested: bool) -> dict[str, Any]:
    """Return what updates of some nodes took, by kind; the trainer is beside the buffer."""
    flag = ["--digested"] if digested else []
    with fan_out.serving([f"seer-n{number}" for number in range(nodes)], *flag) as processes:
        pids = [str(process.pid) for process in processes]
        own = start("seer-head", "trainer", str(size), str(nodes), *pids, *flag, script=__file__)
        processes.append(own)
        found: dict[str, Any] = line_of(own)
        own.wait()
    return found


# --- costs of messages -----------------------------------------------------------------------


def message_costs(size: int, give: float) -> dict[str, float]:
    """Return the costs of passing a stream on, which explain best what all processes used."""
    np.ones(2**32, np.uint8)  # a virtual machine's host gives memory slowly, when it is first touched
    gb = size / 1e9
    equations: dict[str, list[tuple[list[int], float]]] = {"loop": [], "io": [], "workers": []}
    for nodes in (1, 3):
        with namespaces(dict.fromkeys(fan_out.NAMES, 0)) as places:
            spent = run(places, size, nodes, digested=False)[""]["used"]
        for each in spent:
            each["workers"] = each["all"] - each["loop"] - each["io"]
        engines = {key: sum(each[key] for each in spent[1:-1]) for key in spent[0]}
        fed = min(2, nodes)
        spent[0]["workers"] -= fed * give * gb
        engines["workers"] -= (nodes - fed) * give * gb
        for key, (sender, spool, engine) in {
            "loop": ([1, 0, 0], [0, 1, fed], [0, nodes, nodes - fed]),  # sends takes serves
            "io": ([0, 1], [1, fed], [nodes, nodes - fed]),  # into out
            "workers": ([1, 0], [0, 1], [0, nodes]),  # make store
        }.items():
            equations[key] += [
                (sender, spent[-1][key]), (spool, spent[0][key]), (engine, engines[key]),
            ]  # fmt: skip
    found = {}
    for key, names in {
        "loop": ("sends", "takes", "serves"),
        "io": ("into", "out"),
        "workers": ("make", "store"),
    }.items():
        left, right = zip(*equations[key], strict=True)
        values = np.linalg.lstsq(np.array(left, float), np.array(right) / gb, rcond=None)[0]
        found |= dict(zip(names, np.maximum(values, 0).tolist(), strict=True))
    for name in ("sends", "takes", "serves"):
        found[name] *= part_of(gb)
    return found


def measured_costs(size: int, turns: int) -> Costs:
    """Return medians of each cost."""
    found = []
    for _ in range(turns):
        bare = bare_costs()
        found.append(bare | message_costs(size, bare["give"]))

    def median(values: list[Any]) -> Any:  # noqa: ANN401 - a number, or several by name
        if isinstance(values[0], dict):
            return {key: median([each[key] for each in values]) for key in values[0]}
        return float(f"{statistics.median(values):.3g}")

    return Costs(**median(found))


# --- eight nodes here ------------------------------------------------------------------------


def validated(costs: Costs, sizes: list[int], links: list[int], turns: int) -> list[dict[str, Any]]:
    """Return predicted and measured seconds of each kind of update."""
    rows = []
    for mbit in links:
        for size in sizes:
            found = []
            for _ in range(turns):
                with namespaces(dict.fromkeys(fan_out.NAMES, mbit)) as places:
                    found.append(run(places, size, fan_out.NODES, digested=True))
            for kind in found[0]:
                each = [row_of(turn[kind], kind, costs, size, mbit) for turn in found]
                errors = sorted(one["error"] for one in each)
                middle = next(one for one in each if one["error"] == errors[len(errors) // 2])
                rows.append({"mb": size // 10**6, "mbit": mbit, **middle, "errors": errors})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def row_of(found: dict[str, Any], kind: str, costs: Costs, size: int, mbit: int) -> dict[str, Any]:
    gbs = mbit / 8000 if mbit else 1e3
    cluster = Cluster(fan_out.NODES, gbs, found["cores"], beside_buffer=True, one_machine=True)
    share, spread = KINDS.get(kind, (1.0, True))
    update = Update(size / 1e9, kind, found["bytes"], 1.0 if spread else share)
    took, bound = phases(update, costs, cluster)
    predicted, seconds = sum(took.values()), found["seconds"]
    return {
        "kind": kind or "whole", "bytes": round(found["bytes"], 3), "cores": round(found["cores"], 2),
        "bound": bound,
        "predicted": round(predicted, 2), "measured": round(seconds, 2),
        "error": round(predicted / seconds - 1, 2),
    }  # fmt: skip


# --- clusters that nobody measured -----------------------------------------------------------


def table(costs: Costs, cores: int) -> list[dict[str, Any]]:
    """Return predictions for models on nodes with links of 400 Gbit/s and eight GPUs."""
    rows = []
    for name, gb, nodes in (("72B, BF16", 145, 16), ("1T, FP8", 1000, 32), ("1T, BF16", 2000, 32)):
        cluster = Cluster(nodes, 50.0, cores, gpus=8)
        ways = {
            "whole, one rank": (Update(gb, keeps=False), cluster),
            "whole, 8 ranks": (Update(gb, keeps=False), replace(cluster, ranks=8)),
        }
        if "BF16" in name:  # of which costs and bytes of deltas were measured
            ways |= {
                "1 % spread": (Update(gb, "1% spread", 0.016), cluster),
                "10 % spread": (Update(gb, "10% spread", 0.143), cluster),
                "1 % clustered": (Update(gb, "1% clustered", 0.015, 0.01), cluster),
            }
        for way, (update, where) in ways.items():
            took, bound = phases(update, costs, where)
            rows.append({"model": name, "nodes": nodes, "way": way, **rounded(took), "bound": bound})
        for disk in (2.0, 20.0):
            took = from_folder(gb, disk, costs, cluster)
            way = f"a folder, {disk:g} GB/s a node"
            rows.append({"model": name, "nodes": nodes, "way": way, **rounded(took), "bound": ""})
    return rows


def rounded(took: dict[str, float]) -> dict[str, float]:
    return {"seconds": round(sum(took.values()), 1)} | {key: round(each, 1) for key, each in took.items()}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "trainer":
        digested = "--digested" in sys.argv
        size, nodes, *pids = (int(each) for each in sys.argv[2:] if each != "--digested")
        asyncio.run(trainer(size, nodes, [*pids, os.getpid()], digested=digested))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[40, 120])
    parser.add_argument(
        "--mbit", type=int, nargs="+", default=[80, 160, 0], help="of each node's link; 0: no bound"
    )
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--cores", type=int, default=64, help="of each node of the clusters")
    given = parser.parse_args()
    if os.geteuid():
        parser.error("run it as root: network namespaces need that")
    costs = measured_costs(160 * 2**20, 3)
    print(json.dumps(asdict(costs)), file=sys.stderr)
    sizes = [mb * 10**6 // 64 * 64 for mb in given.mb]
    report = {
        "machine": machine("zmq", "numpy", "uvloop"),
        "costs": asdict(costs),
        "bounds_seconds_a_gb": {
            name: round(each, 3)
            for name, each in bounds(145, costs, Cluster(16, 50.0, given.cores, gpus=8)).items()
        },
        "eight_nodes_here": validated(costs, sizes, given.mbit, given.turns),
        "cores_a_node": given.cores,
        "clusters": table(costs, given.cores),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
