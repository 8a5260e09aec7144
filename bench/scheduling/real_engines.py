"""Scheduling policies against each other on the real clock, in turns.

    python bench/scheduling/real_engines.py vllm --policies static,static/off,seer
    python bench/scheduling/real_engines.py vllm --weight 30 --kv 4 --n 16 --runs runs/heavier.jsonl
    python bench/scheduling/real_engines.py replay --policies static,seer

With `--weight` and `--kv` the model is heavier by these factors and generates the same
(examples/countdown/heavier.py). With `--runs` each run is kept in a file, and a comparison that was
interrupted goes on. bench/scheduling/heavier_engines.py makes a table of such comparisons.

`vllm`: two real engines with the shipped model and prompts, one core each. `replay`: 32 engines that
compute nothing and take the time of a modelled step; sockets, processes and services are the real ones.
Every run has a system of its own: nothing of an earlier run, whose tokens are the same, helps a later one.
On vLLM `bare` joins in (bench/scheduling/bare_vllm.py). The better of it and `static` is the baseline.

Efficiency is against `sim/bound.py`, at the batch that KV holds of these responses, averaged over their
tokens. On vLLM capacity is the best second that any warm-up showed at about that batch, drafts and all,
and a token alone the least time of one there; on replay both follow from the settings.
Policies must not change a token: exit code 1 if any response differs between runs of Seer. Bare vLLM
samples other tokens, so others are as many: there, compare tokens/s. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from bare_vllm import BareEngines
from lib.hardware import machine
from lib.paths import EXAMPLE, ROOT
from seer_run import CpuUse, Mode, Run, run_seer
from tokenizers import Tokenizer

from seer.common.config import Config, EngineConfig, load
from seer.common.policy.device_defaults import BLOCK_SIZE
from seer.local.hardware import plan_engines

sys.path.insert(0, str(EXAMPLE))
from heavier import heavier

BARE = "bare"


VLLM_KV_BLOCKS = 176
"""Blocks of 32 tokens an engine, between 160 and 192, at which `static` was preempted 2.0 and 1.6 times a
request (drafts and saves to the pool take blocks, too) and bare vLLM 1.2 and 0.95 times: on average
about the 1.4 of the paper's baseline on Qwen2-VL-72B (13,686 of 9,600 requests)."""

PULL_TOKENS = 32
"""A block: by default the pool is asked for 512 tokens or more, and most of these responses are shorter."""

REPLAY_KV_BLOCKS = 80
"""The same for replay engines: 1.38 preemptions a request under `static`."""

REPLAY_STEP_SECONDS = 0.015
"""So long that 32 engines keep two cores busy less than 60 % of the time: what is compared is schedules,
not how fast Python steps. `cpu_share` of each run says whether that held."""

VLLM = Mode(
    instances=2,
    warm_up=4,
    groups=16,
    n=8,
    max_tokens=1024,
    settings=(
        f"shared.model={EXAMPLE / 'model'}",
        "engine.max_num_seqs=32",
        "engine.max_model_len=1088",
        f"engine.kv_blocks={VLLM_KV_BLOCKS}",
        "buffer.chunk_size=256",  # the default; 128 computes contexts twice as often
        "pool.kind=mooncake",
        f"pool.pull_tokens={PULL_TOKENS}",
    ),
)

REPLAY = Mode(
    instances=32,
    warm_up=0,
    groups=192,
    n=8,
    max_tokens=1024,
    settings=(
        "engine.backend=replay",
        "engine.max_num_seqs=64",
        "engine.max_model_len=1088",
        f"engine.kv_blocks={REPLAY_KV_BLOCKS}",
        "engine.replay.mean_tokens=256",
        f"engine.replay.step_seconds={REPLAY_STEP_SECONDS}",
        "engine.replay.row_seconds=0.0005",
        "buffer.chunk_size=64",
        "drafts.source=off",  # replay engines draft nothing; their tokens need not travel
    ),
)
MODES = {"vllm": VLLM, "replay": REPLAY}


class KeptRuns:
    """Runs in a file, a line each; without a file, in memory. `cell` says what they are runs of."""

    def __init__(self, file: Path | None, cell: str) -> None:
        self._file, self._cell = file, cell
        self._runs: dict[tuple[int, str], Run] = {}
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        for line in lines:
            found, turn, name, run = msgspec.json.decode(line, type=tuple[str, int, str, Run])
            if found == cell:
                self._runs[turn, name] = run

    def __contains__(self, at: tuple[int, str]) -> bool:
        return at in self._runs

    def __getitem__(self, at: tuple[int, str]) -> Run:
        return self._runs[at]

    def add(self, at: tuple[int, str], run: Run) -> None:
        """Keep a run: its turn, and the name of the contestant."""
        self._runs[at] = run
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode((self._cell, *at, run)) + b"\n")


def bare_run(engines: BareEngines, mode: Mode, prompts: Sequence[list[int]]) -> Run:
    use = CpuUse(engines.pids)
    found = engines.run(prompts, mode.n, mode.max_tokens)
    return Run(BARE, found["lengths"], found["finish_times"], found["preemptions"], use.shares())


def batch_held(engine: EngineConfig, block_size: int, prompts: Sequence[list[int]], run: Run) -> float:
    """Return how many requests an engine's KV holds at a time, averaged over all steps.

    A token at context c occupies blocks for c + 1 tokens during its step.
    """
    contexts = [len(prompt) for prompt in prompts for _ in range(len(run.lengths) // len(prompts))]
    held = sum(
        int(np.ceil((context + 1 + np.arange(length)) / block_size).sum())
        for context, length in zip(contexts, run.lengths, strict=True)
    )
    assert engine.kv_blocks is not None
    return min(engine.max_num_seqs, engine.kv_blocks * sum(run.lengths) / held)


def speeds(engine: EngineConfig, mode: Mode, batch: float, runs: Sequence[Run]) -> tuple[float, float]:
    """Return the capacity in tokens/s of all instances, and the seconds of a token alone, by Seer's runs."""
    if engine.backend == "replay":
        step, row = engine.replay.step_seconds, engine.replay.row_seconds
        return mode.instances * batch / (step + batch * row), step + row
    capacity = max(sum(instance.stats.best_rate for instance in run.instances) for run in runs)
    seen = [instance.stats.token_seconds_alone for run in runs for instance in run.instances]
    return capacity, min(filter(None, seen))


def summary(runs: Sequence[Run], capacity: float, alone: float) -> dict[str, Any]:
    """Return medians by contestant, and ratios to the baseline's run of the same turn."""
    names = list(dict.fromkeys(run.name for run in runs))
    figures = {name: [run.figures(capacity, alone) for run in runs if run.name == name] for name in names}
    medians = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for name, found in figures.items()
    }
    candidates = [name for name in ("static", BARE) if name in medians] or names[:1]
    baseline = max(candidates, key=lambda name: medians[name]["tokens_per_s"])
    against = {}
    for name in names:
        pairs = list(zip(figures[name], figures[baseline], strict=True))
        ratios = [ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in pairs]
        tail = medians[name]["tail_seconds"] / max(medians[baseline]["tail_seconds"], 1e-3)
        against[name] = {
            "tokens_per_s": round(statistics.median(ratios), 3),
            "tokens_per_s_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "tail_seconds": round(tail, 3),
        }
    return {"baseline": baseline, "medians": medians, "over_baseline": against, "runs": figures}


def equality(runs: Sequence[Run]) -> dict[str, int]:
    """Count responses that are not what the first run's are."""
    first = runs[0].hashes
    differing = sum(run.hashes[name] != first[name] for run in runs for name in first)
    return {"runs": len(runs), "responses": len(first) * len(runs), "differing": differing}


async def runs_of(options: argparse.Namespace, mode: Mode, config: Config, kept: KeptRuns) -> list[Run]:
    """Return all runs, interleaved; those that are not kept are made."""
    prompts, others = workload(options.mode, mode)
    names = [*options.policies.split(","), *([BARE] if options.mode == "vllm" else [])]
    order = [(turn, name) for turn in range(options.repeats) for name in names[:: -1 if turn % 2 else 1]]
    with contextlib.ExitStack() as stack:
        bare = None
        if any(name == BARE and (turn, name) not in kept for turn, name in order):
            bare = bare_engines(config, mode)
            stack.callback(bare.close)
            bare_run(bare, mode, others)
        for turn, name in order:
            if (turn, name) in kept:
                continue
            if name == BARE and bare is not None:
                run = bare_run(bare, mode, prompts)
            else:
                run = await run_seer(name, mode, config, prompts, others, options.seed)
            kept.add((turn, name), run)
            say(f"{turn} {name}: {max(run.finish_times):.1f} s, {run.preemptions} preemptions")
    return [kept[at] for at in order]


async def compare(options: argparse.Namespace, mode: Mode, config: Config) -> dict[str, Any]:
    """Return the figures of all contestants."""
    cell = json.dumps([options.mode, *mode.settings, *options.overrides, mode.groups, mode.n, options.seed])
    runs = await runs_of(options, mode, config, KeptRuns(options.runs, cell))
    ours = [run for run in runs if run.hashes]
    prompts, _ = workload(options.mode, mode)
    batch = batch_held(config.engine, config.shared.block_size or BLOCK_SIZE, prompts, ours[0])
    capacity, alone = speeds(config.engine, mode, batch, ours)
    versions = ours[0].instances[0].versions
    return {
        "ran_on": {"backend": options.mode, "instances": mode.instances, **machine(), **versions},
        "workload": {"groups": mode.groups, "n": mode.n, "max_tokens": mode.max_tokens, "seed": options.seed},
        "model": {"weight": options.weight, "kv": options.kv},
        "settings": [*mode.settings, *options.overrides],
        "batch_that_kv_holds": round(batch, 1),
        "capacity_tokens_per_s": round(capacity, 1),
        "token_ms_alone": round(1e3 * alone, 3),
        "equality": equality(ours),
        **summary(runs, capacity, alone),
    }


def workload(name: str, mode: Mode) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of the prompts, and of those for warming up."""
    if name == "replay":
        return [[1 + number] * 32 for number in range(mode.groups)], []
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
    lines = (EXAMPLE / "prompts_512.jsonl").read_text().splitlines()[: mode.groups + mode.warm_up]
    ids = [tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False).ids for line in lines]
    return ids[: mode.groups], ids[mode.groups :]


def bare_engines(config: Config, mode: Mode) -> BareEngines:
    engine = config.engine
    assert engine.kv_blocks is not None
    settings = {
        "model": config.shared.model,
        "dtype": "float32",
        "max_num_seqs": engine.max_num_seqs,
        "max_model_len": engine.max_model_len,
        "block_size": config.shared.block_size or BLOCK_SIZE,
        "num_gpu_blocks_override": engine.kv_blocks + 1,  # vLLM's null block
        "use_tqdm_on_load": False,
    }
    return BareEngines(settings, [plan.config.cpu_cores for plan in plan_engines(engine, mode.instances)])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def model_of(weight: float, kv: int) -> Path:
    """Return the shipped model, heavier by these factors; it is made once."""
    if (weight, kv) == (1, 1):
        return EXAMPLE / "model"
    folder = ROOT / "build" / f"heavier-{weight:g}-{kv}"
    return folder if folder.exists() else heavier(folder, weight=weight, kv=kv)


def mode_of(options: argparse.Namespace) -> Mode:
    """Return the workload and the engines' settings; groups of another size have as many responses in all."""
    mode = MODES[options.mode]
    settings = mode.settings
    if options.mode == "vllm":
        settings += (f"shared.model={model_of(options.weight, options.kv)}",)
        settings += ("pool.kind=none",) if options.no_pool else ()
    if options.blocks is not None:
        settings += (f"engine.kv_blocks={options.blocks}",)
    n = options.n or mode.n
    groups, warm_up = mode.groups * mode.n // n, mode.warm_up * mode.n // n
    return replace(mode, n=n, groups=groups, warm_up=warm_up, settings=settings)


def parser() -> argparse.ArgumentParser:
    """Return the parser of what a comparison is of."""
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("mode", choices=MODES)
    known.add_argument("--policies", default="static,seer", help="names; with /off after one: no drafts")
    known.add_argument("--repeats", type=int, default=3)
    known.add_argument("--seed", type=int, default=0)
    known.add_argument("--weight", type=float, default=1, help="vllm: so many times the model's bytes")
    known.add_argument("--kv", type=int, default=1, help="vllm: so many times its KV a token")
    known.add_argument("--n", type=int, help="responses of a group")
    known.add_argument("--blocks", type=int, help="KV blocks of an engine: fewer of them, more preemptions")
    known.add_argument("--no-pool", action="store_true", help="vllm: engines share no KV")
    known.add_argument("--runs", type=Path, help="JSONL file that keeps every run")
    known.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    return known


def report_of(options: argparse.Namespace) -> dict[str, Any]:
    """Run a comparison, or what is missing of it, and return its figures."""
    mode = mode_of(options)
    config = load(None, {}, [*mode.settings, "log.level=warning", *options.overrides])
    return asyncio.run(compare(options, mode, config))


def main() -> int:
    report = report_of(parser().parse_args())
    print(json.dumps(report, indent=1))
    return 1 if report["equality"]["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
