"""Bare vLLM engines as a trainer without Seer has them: whole responses, stock sampler, own scheduler.

Groups go to the engines round-robin, all at once, as veRL does. Each engine is a process pinned to cores
of its own, in the shape that is fastest on CPUs (bench/engine/throughput.py): no compilation, the engine core
in the same process. vLLM's CPU platform turns asynchronous scheduling off, though it is asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

READY = "ready"


def serve(settings: dict[str, Any]) -> None:
    """Answer each job on stdin, `{"prompts": [[...]], "n": ..., "max_tokens": ...}`, with a result."""
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))),
    )  # fmt: skip
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(**settings, enforce_eager=True, async_scheduling=True, disable_log_stats=False)
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    print(json.dumps({"async_scheduling": scheduler.async_scheduling}), file=sys.stderr)

    def preemptions() -> int:
        return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")

    def run(turn: int, prompts: Sequence[list[int]], n: int, max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(
            temperature=1.0, logprobs=0, max_tokens=max_tokens, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        llm.reset_prefix_cache()
        before, begun = preemptions(), time.monotonic()
        for number, tokens in enumerate(prompts):
            for index in range(n):
                name = f"{turn}.{number}#{index}"
                llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params)
        finished: list[float] = []
        lengths: list[int] = []
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if output.finished:
                    finished.append(time.monotonic())
                    lengths.append(len(output.outputs[0].token_ids))
        return {
            "begun": begun, "finished": finished, "lengths": lengths, "preemptions": preemptions() - before,
        }  # fmt: skip

    print(READY, flush=True)
    for turn, line in enumerate(sys.stdin):
        print(json.dumps(run(turn, **json.loads(line))), flush=True)


class BareEngines:
    """Running bare engines; `cores` has one per engine, in `taskset` syntax; their stderr goes to `log`."""

    def __init__(self, settings: dict[str, Any], cores: Sequence[str], log: IO[bytes] | None = None) -> None:
        command = [sys.executable, __file__, json.dumps(settings)]
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(
                ["taskset", "-c", each, *command], stdin=pipe, stdout=pipe, stderr=log, text=True
            )
            for each in cores
        ]
        for process in self._processes:
            while (line := self._line(process)) != READY:
                print(f"bare vLLM: {line}", file=sys.stderr)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._processes]

    def run(self, prompts: Sequence[list[int]], n: int, max_tokens: int) -> dict[str, Any]:
        """Return the lengths of all responses, seconds at which each finished, and preemptions."""
        for place, process in enumerate(self._processes):
            assert process.stdin is not None
            job = {"prompts": prompts[place :: len(self._processes)], "n": n, "max_tokens": max_tokens}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        results = [json.loads(self._line(process)) for process in self._processes]
        begun = min(result["begun"] for result in results)  # one clock for all processes of a machine
        return {
            "finish_times": [at - begun for result in results for at in result["finished"]],
            "lengths": [length for result in results for length in result["lengths"]],
            "preemptions": sum(result["preemptions"] for result in results),
        }

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a bare vLLM engine ended with {process.wait()}; see its stderr")
        return line.strip()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
