"""What the KV pool gives and costs: each part against its peer in the same run. Prints JSON.

- `overhead`: tokens/s of one engine with the pool against none, in chunks of 256 up to 1,024 tokens, all
  of them saved; in turns, on the same core.
- `migration`: an engine generates, another one goes on: seconds to its first token and the share of the
  context that it did not compute, with the pool and without; for the shipped model and a random one.
- `pressure`: a rollout on two engines with little KV: `static`, which preempts; every chunk on another
  engine than the one before, with the pool and without (context computed again); and `divided`, which
  moves what it must, with and without.
- `ssd`: the same with pool memory for a fraction of the KV and a disk below it.

    python bench/kv_pool/costs.py --only overhead migration pressure ssd
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from lib.hardware import machine
from lib.paths import EXAMPLE
from lib.random_model import random_llama

from seer.client import Progress, RolloutClient, SamplingParams
from seer.common.config import Config, EngineConfig, PoolConfig, SharedConfig, load
from seer.common.pool_metrics import PoolFigures, ask_master, read_figures
from seer.local.system import LocalSystem
from seer.services.engine.backend import Chunk
from seer.services.engine.server import STATUS_SECONDS
from seer.services.engine.vllm.backend import VllmBackend

MODEL = EXAMPLE / "model"
BATCH, LENGTH, CHUNK = 32, 1024, 256
CONTEXTS = (512, 1024, 1536)
RANDOM_MB = 600

NONE = PoolConfig(kind="none")


# --- one engine in a process of its own ------------------------------------------------------


class Engine:
    """An engine that does one thing at a time."""

    def __init__(self, model: Path, pool: PoolConfig, core: int, weights: str) -> None:
        engine = EngineConfig(max_num_seqs=BATCH, max_model_len=2048, kv_blocks=1300, cpu_cores=str(core))
        given = {"model": str(model), "engine": engine, "pool": pool, "weights": weights}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", msgspec.json.encode(given).decode()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
        )  # fmt: skip

    def ready(self) -> None:
        """Wait until it is."""
        assert self._process.stdout is not None
        while self._process.stdout.readline() != "ready\n":
            assert self._process.poll() is None

    def ask(self, **order: object) -> dict[str, Any]:
        """Have it do something; return what it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class _Given(msgspec.Struct):
    model: str
    engine: EngineConfig
    pool: PoolConfig
    weights: str


def be_engine(text: str) -> None:
    given = msgspec.json.decode(text, type=_Given)
    backend = VllmBackend(given.engine, SharedConfig(model=given.model), given.pool)
    backend.start()
    backend.bind_weights(given.weights)
    time.sleep(1)  # until it is connected
    vocabulary = backend.core.vocab_size
    serial = 0

    def chunk(name: int, tokens: list[int], prompt_len: int, most: int) -> Chunk:
        nonlocal serial
        serial += 1
        return Chunk(
            request_id=f"{name}#0", group_id=str(name), attempt=serial, key=name, prompt_len=prompt_len,
            max_new_tokens=most, tokens=tokens, wait_for_room=True,
            sampling=SamplingParams(max_tokens=1900, ignore_eos=True),
        )  # fmt: skip

    def batch(seed: int) -> dict[str, object]:
        """Run a batch in chunks; return tokens/s, of wall time and of all threads' CPU time."""
        outputs = {
            name: [5 + (seed + name * 7 + i) % (vocabulary - 5) for i in range(64)] for name in range(BATCH)
        }
        started, cpu = time.perf_counter(), time.process_time()
        for name, tokens in outputs.items():
            backend.add(chunk(name, tokens, 64, CHUNK))
        while backend.has_work():
            out = backend.step()
            for each in out.generated:
                outputs[int(each.request_id[:-2])] += each.token_ids
            for end in out.ended:
                name = int(end.request_id[:-2])
                if len(outputs[name]) < LENGTH:
                    backend.add(chunk(name, outputs[name], 64, CHUNK))
        count = sum(len(tokens) - 64 for tokens in outputs.values())
        return {
            "per_s": count / (time.perf_counter() - started),
            "per_cpu_s": count / (time.process_time() - cpu),
        }

    def one(tokens: list[int], most: int) -> dict[str, object]:
        """Run one chunk; return its tokens, seconds to the first, and how many were not computed."""
        started, first, new, cached = time.perf_counter(), 0.0, list[int](), 0
        backend.add(chunk(0, tokens, 16, most))
        while backend.has_work():
            out = backend.step()
            first = first or (time.perf_counter() - started if out.generated else 0.0)
            new += [token for each in out.generated for token in each.token_ids]
            cached = sum((end.cached_tokens for end in out.ended), cached)
        return {"tokens": new, "first_seconds": first, "cached": cached}

    print("ready", flush=True)
    does: dict[str, Callable[..., dict[str, object]]] = {"batch": batch, "one": one}
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(does[order.pop("do")](**order)), flush=True)


# --- the parts -------------------------------------------------------------------------------


def overhead(pool: PoolConfig, turns: int) -> dict[str, Any]:
    saving = msgspec.structs.replace(pool, pull_tokens=0)
    contestants = {"none": NONE, "default": pool, "saving": saving}
    engines = {name: Engine(MODEL, kind, 0, uuid.uuid4().hex) for name, kind in contestants.items()}
    try:
        for engine in engines.values():
            engine.ready()
            engine.ask(do="batch", seed=0)
        runs = [
            {n: engine.ask(do="batch", seed=turn) for n, engine in engines.items()}
            for turn in range(1, turns)
        ]
    finally:
        for engine in engines.values():
            engine.close()
    ratios = {
        f"{name}_{unit}": [run[name][unit] / run["none"][unit] for run in runs]
        for name in ("default", "saving")
        for unit in ("per_s", "per_cpu_s")
    }
    medians = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    return {"batch": BATCH, "over_none": medians, "all": ratios, "runs": runs}


def migration(model: Path, pool: PoolConfig, turns: int) -> dict[str, Any]:
    weights = uuid.uuid4().hex
    pulling = msgspec.structs.replace(pool, pull_tokens=0)
    engines = {
        "source": Engine(model, pulling, 0, weights),
        "pool": Engine(model, pulling, 1, weights),
        "none": Engine(model, NONE, 1, weights),
    }
    found = []
    try:
        for engine in engines.values():
            engine.ready()
        for context in CONTEXTS:
            runs = [_move(engines, context, turn) for turn in range(turns)]
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            found.append({"context": context, **{key: round(value, 4) for key, value in medians.items()}})
    finally:
        for engine in engines.values():
            engine.close()
    return {"model_mb": round((model / "model.safetensors").stat().st_size / 1e6), "contexts": found}


def _move(engines: dict[str, Engine], context: int, turn: int) -> dict[str, float]:
    """Generate the last quarter of a context on one engine, go on on others."""
    start = [5 + (turn * 131 + i * 7 + context) % 55 for i in range(context * 3 // 4)]
    begun = start + engines["source"].ask(do="one", tokens=start, most=context - len(start))["tokens"]
    time.sleep(1)
    pulled = engines["pool"].ask(do="one", tokens=begun, most=8)
    computed = engines["none"].ask(do="one", tokens=begun, most=8)
    assert pulled["tokens"] == computed["tokens"]
    return {
        "share_from_pool": pulled["cached"] / context,
        "pulled_first_seconds": pulled["first_seconds"],
        "computed_first_seconds": computed["first_seconds"],
        "computed_over_pulled": computed["first_seconds"] / pulled["first_seconds"],
    }


def settings(**given: object) -> Config:
    usual = {
        "shared.model": MODEL, "engine.max_model_len": 1100, "engine.max_num_seqs": 32,
        "engine.kv_blocks": 160, "buffer.chunk_size": 128, "buffer.policy": "migrate",
        "pool.kind": "mooncake", "pool.pull_tokens": 0, "pool.dram_gib": 1.0,
    }  # fmt: skip
    usual |= {key.replace("__", "."): value for key, value in given.items()}
    return load(None, {}, [f"{key}={value}" for key, value in usual.items()])


async def roll(config: Config, prompts: int, n: int) -> dict[str, Any]:
    """Run the rollout on two engines."""
    figures: list[PoolFigures] = []
    async with LocalSystem(config, 2) as system, RolloutClient(system.endpoint, tokenizer=MODEL) as client:
        lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:prompts]
        texts = [json.loads(line)["prompt"] for line in lines]
        started = time.perf_counter()
        sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
        rollout = await client.submit(texts, n=n, sampling=sampling, rollout_number=0)
        times: list[float] = []

        def progressed(progress: Progress) -> None:
            times.extend(progress.finish_times)

        rollout.on_progress = progressed
        work = asyncio.create_task(rollout.result())
        while not work.done():
            await asyncio.wait([work], timeout=1)
            if config.pool.kind == "mooncake":
                figures.append(read_figures(await ask_master(system.config.pool.metrics)))
        seconds = time.perf_counter() - started
        await asyncio.sleep(2 * STATUS_SECONDS)
        stats = [instance.stats for instance in (await client.status()).instances]
    groups = work.result()
    total = {name: sum(getattr(each, name) for each in stats) for name in stats[0].__struct_fields__}
    tokens = [r.token_ids.tolist() for group in groups for r in group.responses]
    return {
        "tokens_per_s": round(sum(map(len, tokens)) / seconds),
        "preemptions": total["preemptions"],
        "migrations": sum(group.migrations for group in groups),
        "prompt_tokens": total["prompt_tokens"],
        "own_cache_share": round((total["cached_tokens"] - total["pool_tokens"]) / total["prompt_tokens"], 3),
        "pool_share": round(total["pool_tokens"] / total["prompt_tokens"], 3),
        "pool_failures": total["pool_failures"],
        "pool_dropped_blocks": total["pool_dropped_blocks"],
        "pool_saved_blocks": total["pool_saved_blocks"],
        "dram_used_mib": round(max((f.dram_used for f in figures), default=0) / 2**20),
        "ssd_used_mib": round(max((f.ssd_used for f in figures), default=0) / 2**20),
        "evicted_keys": max((f.evicted_keys for f in figures), default=0),
        "tokens": tokens,
    }


def compared(contestants: dict[str, Config], turns: int, prompts: int, n: int) -> dict[str, Any]:
    """Run all in turns; all must give the same tokens."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    expected = None
    for _ in range(turns):
        for name, config in contestants.items():
            run = asyncio.run(roll(config, prompts, n))
            tokens = run.pop("tokens")
            expected = expected or tokens
            run["same_tokens"] = tokens == expected
            runs[name].append(run)
    first = next(iter(runs))
    return {
        "over_first": {
            name: round(
                statistics.median(
                    a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(its, runs[first], strict=True)
                ),
                3,
            )
            for name, its in runs.items()
        },
        "runs": runs,
    }


def pressure(turns: int) -> dict[str, Any]:
    return compared(
        {
            "static": settings(pool__kind="none", buffer__policy="static"),
            "migrate_recompute": settings(pool__kind="none"),
            "migrate_pool": settings(),
            "divided": settings(pool__kind="none", buffer__policy="divided"),
            "divided_pool": settings(buffer__policy="divided"),
        },
        turns, prompts=16, n=4,
    )  # fmt: skip


def ssd(turns: int) -> dict[str, Any]:
    return compared(
        {"dram": settings(), "ssd": settings(pool__dram_gib=0.0625, pool__ssd_gib=2.0)},
        turns, prompts=24, n=4,
    )  # fmt: skip


async def with_pool(work: Callable[[PoolConfig], dict[str, Any]]) -> dict[str, Any]:
    """Do something beside a pool, of a system that does nothing else."""
    config = load(None, {}, ["pool.kind=mooncake", "engine.backend=replay", "pool.dram_gib=3"])
    async with LocalSystem(config, 1) as system:
        return await asyncio.to_thread(work, system.config.pool)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("overhead", "migration", "pressure", "ssd")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        be_engine(given.engine)
        return
    report: dict[str, Any] = {
        "machine": machine("torch", "vllm"),
        "turns": given.turns,
    }
    if "overhead" in given.only:
        report["overhead"] = asyncio.run(with_pool(lambda pool: overhead(pool, given.turns + 1)))
    if "migration" in given.only:
        with tempfile.TemporaryDirectory(prefix="seer-bench-") as scratch:
            large = random_llama(Path(scratch), RANDOM_MB)
            report["migration"] = [
                asyncio.run(with_pool(lambda pool, model=model: migration(model, pool, given.turns)))
                for model in (MODEL, large)
            ]
    if "pressure" in given.only:
        report["pressure"] = pressure(given.turns)
    if "ssd" in given.only:
        report["ssd"] = ssd(1)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
