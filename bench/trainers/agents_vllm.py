"""Plain vLLM engines for loops of agents: each turn is a request with the whole context, sampled by vLLM.

A trajectory stays on its engine, so that prefix caching can help. Each engine is a process pinned to cores of
its own, in the shape of bench/scheduling/bare_vllm.py: no server in front, no compilation. Requests arrive on
stdin and answers leave on stdout, lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

READY = "ready"
LINE_BYTES = 2**20


def serve(settings: dict[str, Any]) -> None:
    """Answer requests `{"name", "tokens", "max_tokens", "stop"}` as they end, and `{}` with what was used."""
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))),
    )  # fmt: skip
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(**settings, enforce_eager=True)
    engine = llm.llm_engine
    asked: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    used = {"computed": 0, "step_seconds": 0.0}
    print(READY, flush=True)
    while True:
        while not asked.empty() or not engine.has_unfinished_requests():
            request = asked.get()
            if request is None:
                return
            if not request:
                print(json.dumps(used), flush=True)
                used = {"computed": 0, "step_seconds": 0.0}
                llm.reset_prefix_cache()
                continue
            params = SamplingParams(
                temperature=1.0, logprobs=0, max_tokens=request["max_tokens"], detokenize=False,
                stop_token_ids=request["stop"], output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            engine.add_request(request["name"], {"prompt_token_ids": request["tokens"]}, params)
        begun = time.monotonic()
        outputs = engine.step()
        used["step_seconds"] += time.monotonic() - begun
        for output in outputs:
            if output.finished:
                used["computed"] += len(output.prompt_token_ids) - output.num_cached_tokens
                tokens = list(output.outputs[0].token_ids)
                print(json.dumps({"name": output.request_id, "tokens": tokens}), flush=True)


def _read(asked: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    asked.put(None)


class AgentEngine:
    """One running engine. `used` has what it used since that was asked last."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._answers: dict[str, asyncio.Future[list[int]]] = {}
        self._used: asyncio.Future[dict[str, float]] | None = None
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, settings: dict[str, Any], cores: str) -> AgentEngine:
        """Start an engine on these cores, in `taskset` syntax, and wait until it is ready."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "taskset", "-c", cores, sys.executable, __file__, json.dumps(settings),
            stdin=pipe, stdout=pipe, limit=LINE_BYTES,
        )  # fmt: skip
        assert process.stdout is not None
        while (line := (await process.stdout.readline()).decode().strip()) != READY:
            if not line:
                raise SystemExit("a plain vLLM engine ended; its stderr is above")
        return cls(process)

    async def generate(self, name: str, tokens: Sequence[int], max_tokens: int, stop: list[int]) -> list[int]:
        """Return the output to a context."""
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        self._send({"name": name, "tokens": list(map(int, tokens)), "max_tokens": max_tokens, "stop": stop})
        return await answer

    async def used(self) -> dict[str, float]:
        """Return tokens of context computed and seconds of steps since the last call, and drop all KV."""
        self._used = asyncio.get_running_loop().create_future()
        self._send({})
        return await self._used

    async def close(self) -> None:
        """End the process."""
        self._process.kill()
        await self._process.wait()
        await asyncio.wait([self._reader])

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            if "name" in answer:
                self._answers.pop(answer["name"]).set_result(answer["tokens"])
            elif self._used is not None:
                self._used.set_result(answer)
        for each in self._answers.values():
            each.cancel()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
