"""Tokens per second of Seer's engine backend against bare vLLM, on one machine, in turns.

Each measurement is a fresh process pinned to the same cores; the contestants take turns, so that
a slow minute of the machine hits all of them. Both sides return a logprob per token. Prints JSON.

    python bench/engine.py --model examples/countdown/model --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 32)
TOKENS = 256
PROMPT = (1, 9, 7, 5, 3)
REPEATS = 3
"""Runs inside one process after a warm-up; the fastest counts (the slower ones were disturbed)."""


def prompt(index: int) -> list[int]:
    return [*PROMPT, 6 + index % 48]


def bare(model: str, cores: str, **engine: object) -> Callable[[int], None]:
    """Return a run of `vllm.LLM.generate` at a batch size."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", max_num_seqs=64, max_model_len=1024, **engine)
    params = SamplingParams(temperature=1.0, logprobs=0, ignore_eos=True, max_tokens=TOKENS, detokenize=False)

    def run(batch: int) -> None:
        prompts = [{"prompt_token_ids": prompt(i)} for i in range(batch)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == batch * TOKENS

    return run


def tuned(model: str, cores: str) -> Callable[[int], None]:
    """Bare vLLM with the settings that Seer gives it: the fastest shape known on CPUs."""
    _quiet(cores)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_USE_V2_MODEL_RUNNER="0"
    )
    return bare(model, cores, enforce_eager=True, block_size=32, skip_tokenizer_init=True)


def default(model: str, cores: str) -> Callable[[int], None]:
    """Bare vLLM with its own defaults: a separate engine process, its own compilation and threads."""
    _quiet(cores)
    return bare(model, cores, skip_tokenizer_init=True)


def seer(model: str, cores: str) -> Callable[[int], None]:
    """Return a run of Seer's backend at a batch size."""
    from seer.common.config import EngineConfig, SharedConfig
    from seer.common.types import SamplingParams
    from seer.services.engine.backend import Chunk
    from seer.services.engine.vllm.backend import VllmBackend

    config = EngineConfig(max_num_seqs=64, max_model_len=1024, kv_cache_gib=1.0, cpu_cores=cores)
    backend = VllmBackend(config, SharedConfig(model=model))
    backend.start()
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def run(batch: int) -> None:
        for i in range(batch):
            tokens = prompt(i)
            backend.add(
                Chunk(
                    request_id=str(i),
                    group_id="",
                    attempt=0,
                    key=i,
                    prompt_len=len(tokens),
                    max_new_tokens=TOKENS,
                    sampling=sampling,
                    tokens=tokens,
                )
            )
        total = 0
        while backend.has_work():
            total += sum(len(generated.token_ids) for generated in backend.step().generated)
        assert total == batch * TOKENS

    return run


CONTESTANTS = {"seer": seer, "vllm": tuned, "vllm_default": default}


def measure(name: str, model: str, cores: str) -> dict[str, dict[str, float]]:
    """Return tokens per second, and CPU milliseconds per token, at each batch size."""
    run = CONTESTANTS[name](model, cores)
    result: dict[str, dict[str, float]] = {}
    for batch in BATCHES:
        run(batch)
        walls, cpus = [], []
        for _ in range(REPEATS):
            wall, cpu = time.perf_counter(), time.process_time()
            run(batch)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        tokens = batch * TOKENS
        result[str(batch)] = {
            "tokens_per_s": tokens / min(walls),
            "cpu_ms_per_token": 1e3 * min(cpus) / tokens,
        }
    return result


def _quiet(cores: str) -> None:
    threads = len(os.sched_getaffinity(0))
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1",
        OMP_NUM_THREADS=str(threads), VLLM_CPU_OMP_THREADS_BIND=cores,
    )  # fmt: skip


def _child(name: str, model: str, cores: str) -> dict[str, dict[str, float]]:
    command = [
        "taskset",
        "-c",
        cores,
        sys.executable,
        __file__,
        "--child",
        name,
        "--model",
        model,
        "--cores",
        cores,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def compare(model: str, cores: str, rounds: int, names: list[str]) -> dict[str, Any]:
    """Run all contestants in turns and relate each to Seer by the median of per-round ratios."""
    rows: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names if index % 2 == 0 else names[::-1]:
            rows[name].append(_child(name, model, cores))
            print(f"round {index} {name}: {json.dumps(rows[name][-1])}", file=sys.stderr)
    report: dict[str, Any] = {}
    for batch in map(str, BATCHES):
        entry: dict[str, Any] = {
            name: {
                key: round(statistics.median(row[batch][key] for row in rows[name]), 4)
                for key in rows[name][0][batch]
            }
            for name in names
        }
        for name in names:
            if name != "seer" and "seer" in names:
                ratios = [
                    ours[batch]["tokens_per_s"] / theirs[batch]["tokens_per_s"]
                    for ours, theirs in zip(rows["seer"], rows[name], strict=True)
                ]
                entry[f"seer_over_{name}"] = {
                    "median": round(statistics.median(ratios), 3),
                    "range": [round(min(ratios), 3), round(max(ratios), 3)],
                }
        report[f"batch_{batch}"] = entry
    return report


def machine() -> dict[str, Any]:
    """Describe what a figure depends on."""
    import torch
    import vllm

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
        "cores": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model folder of at least 64 tokens of vocabulary")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", default="0", help="cores for every contestant, as 0-3")
    parser.add_argument("--contestants", default="seer,vllm", help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.model, options.cores)))
        return
    names = options.contestants.split(",")
    report = compare(options.model, options.cores, options.rounds, names)
    print(json.dumps({"machine": machine(), "tokens": TOKENS, "rounds": options.rounds, **report}, indent=1))


if __name__ == "__main__":
    main()
