"""What early stop of surplus groups does to response lengths, and the time it saves; prints JSON.

Whole systems on virtual time with replay engines. Lengths are log-normal and partly shared by siblings
(`services/engine/replay/responses.py`), or those of a real rollout: `--responses` takes what `seer rollout`
wrote.
Per factor, `target` groups of target * factor prompts are kept as they finish. `all` is every response of
these prompts at its full length, what an unbiased choice has on average; long ones are the longest tenth.

    python bench/trainers/early_stop.py --trials 10
    python bench/trainers/early_stop.py --trials 10 --responses runs/demo/responses.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lib.paths import TESTS

sys.path.insert(0, str(TESTS))

import virtual_time
from chaos.virtual import quiet
from cluster_harness import running

from seer.client import DynamicSampling, Group, Prompt, SamplingParams
from seer.common.config import BufferConfig, EngineConfig, ReplayConfig

FACTORS = (1.0, 1.25, 1.5, 2.0)
LONG = 0.1


@dataclass(frozen=True)
class Trial:
    """One factor of one trial: lengths of responses; `at_random` is the share an unbiased choice keeps."""

    kept: list[int]
    all: list[int]
    at_random: float
    seconds: float


def lengths(groups: Sequence[Group]) -> list[int]:
    return [len(response.token_ids) for group in groups for response in group.responses]


def recorded(path: Path, trace: Path) -> tuple[list[Prompt], int]:
    """Write a rollout's responses as a replay engine's trace; return its prompts and n."""
    prompts, rows = [], [json.loads(line) for line in path.read_text().splitlines()]
    with trace.open("w") as file:
        for row in rows:
            prompts.append(Prompt(row["id"], token_ids=row["prompt_token_ids"]))
            for response in row["responses"]:
                file.write(json.dumps({"id": row["id"], "token_ids": response["token_ids"]}) + "\n")
    return prompts, len(rows[0]["responses"])


def made_up(count: int) -> list[Prompt]:
    return [Prompt(str(i), token_ids=[1 + i, 2, 3]) for i in range(count)]


async def trial(
    prompts: list[Prompt], n: int, target: int, engine: EngineConfig, max_tokens: int, seed: int
) -> dict[float, Trial]:
    """Return every factor's figures on the same prompts, keys and system."""
    sampling, trials = SamplingParams(max_tokens=max_tokens), {}
    async with (
        running(engines=2, engine=engine, buffer=BufferConfig()) as cluster,
        cluster.client() as client,
    ):
        clock = virtual_time.asyncio.get_running_loop().time
        rollout = await client.submit(prompts, n=n, sampling=sampling, seed=seed, rollout_number=0)
        groups = await rollout.result()
        for factor in FACTORS:
            drawn = math.ceil(target * factor)
            start = clock()
            async with DynamicSampling(
                client,
                prompts[:drawn],
                lambda group: [0.0] * n,
                target=target,
                oversample=factor,
                keep=lambda scored: True,
                first_finished_biased=True,
                n=n,
                sampling=sampling,
                seed=seed,
                rollout_number=0,
                repeat=True,
            ) as sampled:
                kept = [scored.group for scored in await sampled.result()]
            trials[factor] = Trial(lengths(kept), lengths(groups[:drawn]), target / drawn, clock() - start)
    return trials


def summary(trials: list[Trial], plain: list[Trial]) -> dict[str, float]:
    """Pool trials of one factor; `plain` are those of factor 1."""
    everything = sorted(length for one in trials for length in one.all)
    kept = sorted(length for one in trials for length in one.kept)
    # Ties at the threshold (max_tokens, say) count in the share in which they belong to the longest tenth.
    threshold = everything[math.ceil(len(everything) * (1 - LONG)) - 1]
    above, at = (sum(x > threshold for x in everything), sum(x == threshold for x in everything))
    weight = (len(everything) * LONG - above) / at
    long_kept = sum(x > threshold for x in kept) + weight * sum(x == threshold for x in kept)
    seconds, before = (statistics.mean(one.seconds for one in group) for group in (trials, plain))
    mean_all, mean_kept = statistics.mean(everything), statistics.mean(kept)
    return {
        "mean_all": round(mean_all, 1),
        "mean_kept": round(mean_kept, 1),
        "mean_change": round(mean_kept / mean_all - 1, 3),
        "p99_all": round(float(np.percentile(everything, 99))),
        "p99_kept": round(float(np.percentile(kept, 99))),
        "long_lost": round(1 - long_kept / (LONG * len(everything) * trials[0].at_random), 3),
        "seconds": round(seconds, 2),
        "time_saved": round(1 - seconds / before, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--target", type=int, default=32)
    parser.add_argument("--responses", type=Path, help="output of `seer rollout`; made-up lengths without")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, quiet():
        engine = EngineConfig(backend="replay", max_num_seqs=64)
        n, max_tokens = 8, 4096
        prompts = made_up(math.ceil(arguments.target * max(FACTORS)))
        if arguments.responses:
            trace = Path(folder) / "trace.jsonl"
            prompts, n = recorded(arguments.responses, trace)
            engine = EngineConfig(backend="replay", max_num_seqs=64, replay=ReplayConfig(trace=str(trace)))
        runs = []
        for seed in range(arguments.trials):
            random.Random(seed).shuffle(prompts)
            runs.append(virtual_time.run(trial(prompts, n, arguments.target, engine, max_tokens, seed)))
    figures = {
        "lengths": str(arguments.responses or "log-normal"),
        "trials": arguments.trials,
        "target": arguments.target,
        "n": n,
        "factors": {str(f): summary([run[f] for run in runs], [run[1.0] for run in runs]) for f in FACTORS},
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
