"""Tokens per second of Seer's engine backend against bare vLLM, on one machine, in turns.

Each contestant is a process of its own, pinned to the same cores; they take turns, one run each, so
that a slow moment of the machine hits all of them, and a figure is the median over the turns of the
ratio to Seer's run of the same turn. All return a logprob per token. Prints JSON.

A cell is tokens of a response x responses at once, which begin together. A run is so many of such rounds that
512 tokens follow each other, or that there are 16,384 in all.

    python bench/engine/throughput.py --model examples/countdown/model --turns 15
    python bench/engine/throughput.py --model examples/countdown/model --cells 16x64 512x8 --cores 0-1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from lib.hardware import machine

CELLS = tuple(f"{tokens}x{batch}" for tokens in (16, 64, 512) for batch in (1, 8, 64, 256))
MOST_AT_ONCE, MOST_TOKENS, IN_A_ROW, RUN_TOKENS = 256, 2_048, 512, 16_384
MODEL_LEN = MOST_TOKENS + 256
PROMPT = (1, 9, 7, 5, 3)
READY = "ready"


def prompt(index: int) -> list[int]:
    return [*PROMPT, 6 + index % 48]


Round = Callable[[int, int], None]
"""Generates so many tokens for each of so many prompts at once."""


def bare(model: str, cores: str, **engine: object) -> Round:
    """Return a round of `vllm.LLM.generate`."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", max_num_seqs=MOST_AT_ONCE, max_model_len=MODEL_LEN, **engine)

    def run(tokens: int, batch: int) -> None:
        params = SamplingParams(
            temperature=1.0, logprobs=0, ignore_eos=True, max_tokens=tokens, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt(i)} for i in range(batch)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == batch * tokens

    return run


def tuned(model: str, cores: str) -> Round:
    """Bare vLLM with the settings that Seer gives it: the fastest shape known on CPUs."""
    _quiet(cores)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_USE_V2_MODEL_RUNNER="0"
    )
    return bare(model, cores, enforce_eager=True, block_size=32, skip_tokenizer_init=True)


def default(model: str, cores: str) -> Round:
    """Bare vLLM with its own defaults: a separate engine process, its own compilation and threads."""
    _quiet(cores)
    return bare(model, cores, skip_tokenizer_init=True)


def seer(model: str, cores: str) -> Round:
    """Return a round of Seer's backend."""
    from seer.common.config import EngineConfig, SharedConfig
    from seer.common.types import SamplingParams
    from seer.services.engine.backend import Chunk
    from seer.services.engine.vllm.backend import VllmBackend

    config = EngineConfig(
        max_num_seqs=MOST_AT_ONCE, max_model_len=MODEL_LEN, kv_cache_gib=1.0, cpu_cores=cores
    )
    backend = VllmBackend(config, SharedConfig(model=model))
    backend.start()

    def run(tokens: int, batch: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        for i in range(batch):
            start = prompt(i)
            backend.add(
                Chunk(
                    request_id=str(i),
                    group_id="",
                    attempt=0,
                    key=i,
                    prompt_len=len(start),
                    max_new_tokens=tokens,
                    sampling=sampling,
                    tokens=start,
                )
            )
        total = 0
        while backend.has_work():
            total += sum(len(generated.token_ids) for generated in backend.step().generated)
        assert total == batch * tokens

    return run


CONTESTANTS = {"seer": seer, "vllm": tuned, "vllm_default": default}


def serve(name: str, model: str, cores: str) -> None:
    """Run as a contestant: for each cell on stdin, answer seconds of wall and CPU time."""
    run = CONTESTANTS[name](model, cores)
    print(READY, flush=True)
    for line in sys.stdin:
        tokens, batch, rounds = size(line)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            run(tokens, batch)
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


def size(cell: str) -> tuple[int, int, int]:
    """Return the tokens of a response, the responses at once, and the rounds of a run."""
    tokens, batch = map(int, cell.split("x"))
    if not 0 < tokens <= MOST_TOKENS or not 0 < batch <= MOST_AT_ONCE:
        raise SystemExit(f"cell {cell}: at most {MOST_TOKENS}x{MOST_AT_ONCE}")
    return tokens, batch, max(1, min(IN_A_ROW // tokens, RUN_TOKENS // (tokens * batch)))


class Contestant:
    """A running contestant."""

    def __init__(self, name: str, model: str, cores: str) -> None:
        self.name = name
        command = [sys.executable, __file__, "--serve", name, "--model", model, "--cores", cores]
        self._process = subprocess.Popen(
            ["taskset", "-c", cores, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        while (line := self._line()) != READY:
            print(f"{name}: {line}", file=sys.stderr)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}; its stderr is above")
        return line.strip()

    def run(self, cell: str) -> tuple[float, float]:
        """Return tokens per second, and CPU milliseconds per token, of one run."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{cell}\n")
        self._process.stdin.flush()
        wall, cpu = json.loads(self._line())
        made = math.prod(size(cell))
        return made / wall, 1e3 * cpu / made

    def close(self) -> None:
        """End the process, and those that vLLM started in it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _quiet(cores: str) -> None:
    threads = len(os.sched_getaffinity(0))
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1",
        OMP_NUM_THREADS=str(threads), VLLM_CPU_OMP_THREADS_BIND=cores,
    )  # fmt: skip


def quartiles(values: list[float]) -> list[float]:
    """Return the three quartiles; of a single value, that value thrice."""
    found = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return [round(value, 3) for value in found]


def compare(contestants: list[Contestant], cell: str, turns: int) -> dict[str, Any]:
    """Let the contestants take turns, after one that does not count; relate each to the first."""
    for one in contestants:
        one.run(cell)
    runs: dict[str, list[tuple[float, float]]] = {one.name: [] for one in contestants}
    for turn in range(turns):
        for one in contestants if turn % 2 == 0 else contestants[::-1]:
            runs[one.name].append(one.run(cell))
    first = contestants[0].name
    report: dict[str, Any] = {}
    for name, results in runs.items():
        entry: dict[str, Any] = {
            "tokens_per_s": round(statistics.median(rate for rate, _ in results), 1),
            "cpu_ms_per_token": round(statistics.median(cpu for _, cpu in results), 4),
        }
        if name != first:
            for key, index in (("rate", 0), ("cpu", 1)):
                ratios = [
                    ours[index] / theirs[index] for ours, theirs in zip(runs[first], results, strict=True)
                ]
                entry[f"{first}_over_this_{key}_quartiles"] = quartiles(ratios)
        report[name] = entry
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model folder with 64 tokens of vocabulary or more")
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--cores", default="0", help="cores for every contestant, as 0-3")
    parser.add_argument("--contestants", default="seer,vllm", help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--serve", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.model, options.cores)
        return
    report: dict[str, Any] = {
        "machine": machine("torch", "vllm"), "cores": options.cores, "turns": options.turns
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        contestants = []
        for name in options.contestants.split(","):
            one = Contestant(name, options.model, options.cores)
            stack.callback(one.close)
            contestants.append(one)
        for cell in options.cells:
            report[cell] = compare(contestants, cell, options.turns)
            print(cell, report[cell], file=sys.stderr)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
