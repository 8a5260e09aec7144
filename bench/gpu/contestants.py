"""What `rates.py` compares: bare vLLM, Seer's engine without its services, and whole Seer systems.

No response ends early, so that all have as much to do.

Each is a class with `add`, `step` and `busy` (in a process of its own, behind `Process`), or a `System`.
`python contestants.py KIND SETTINGS` serves one: it answers each job on stdin by a line on stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

Prompts = list[tuple[str, list[int]]]
"""Name and token ids of each."""

Responses = list[tuple[str, int, list[int]]]
"""Prompt, index and token ids of each, in order."""


class RefusedError(Exception):
    """A contestant does not start; the message says why, in its own words."""


class Named:
    """Adds a method to vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any

    def runner_class(self) -> str:
        """Return the class of the worker's model runner: V1 and V2 lie in different modules."""
        return f"{type(self.model_runner).__module__}.{type(self.model_runner).__name__}"


class Steps(Protocol):
    """What generates in the process of its caller, step by step."""

    about: dict[str, str]

    def add(self, name: str, prompt: list[int], n: int, tokens: int, seed: int) -> None:
        """Ask for n responses of at most so many tokens."""
        ...

    def step(self) -> Responses:
        """Run a step; return the responses that have ended."""
        ...

    def busy(self) -> bool:
        """Return whether responses are left."""
        ...


class Vllm:
    """Bare vLLM: its engine is stepped as `LLM.generate` does. It draws tokens of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self._engine = LLM(
            **settings, disable_log_stats=True, worker_extension_cls="contestants.Named"
        ).llm_engine
        config = self._engine.vllm_config.scheduler_config
        self.about = {
            "runner": self._engine.collective_rpc("runner_class")[0],
            "scheduling": "asynchronous" if config.async_scheduling else "synchronous",
        }

    def add(self, name: str, prompt: list[int], n: int, tokens: int, seed: int) -> None:
        """See `Steps`; it has no seed, as a trainer gives none."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        given = SamplingParams(
            n=n, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        self._engine.add_request(name, {"prompt_token_ids": prompt}, given)

    def step(self) -> Responses:
        """See `Steps`."""
        return [
            (output.request_id, each.index, list(each.token_ids))
            for output in self._engine.step()
            if output.finished
            for each in output.outputs
        ]

    def busy(self) -> bool:
        """See `Steps`."""
        return bool(self._engine.has_unfinished_requests())


class Engine:
    """Seer's engine alone. `settings`: its configuration as `a.b=c`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from seer.common.config import load
        from seer.local.hardware import plan_engines
        from seer.services.engine.vllm.backend import VllmBackend

        config = load(None, {}, settings["config"])
        plan = plan_engines(config.engine, None)[0]
        os.environ.update(plan.environ)
        self.backend = VllmBackend(plan.config, config.shared, None, config.drafts)
        self.backend.start()
        self.about = {
            "runner": runner_of(self.backend), "scheduling": self.backend.versions["scheduling"]
        }  # fmt: skip
        self._tokens: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], n: int, tokens: int, seed: int) -> None:
        """See `Steps`."""
        from seer.common.types import SamplingParams
        from seer.services.engine.backend import Chunk

        for index in range(n):
            key = hash((seed, int(name), index)) & 0x7FFFFFFF
            self._tokens[f"{name}#{index}"] = []
            self.backend.add(Chunk(
                request_id=f"{name}#{index}", group_id=name, index=index, attempt=0, key=key, tokens=prompt,
                prompt_len=len(prompt), max_new_tokens=tokens,
                sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
            ))  # fmt: skip

    def step(self) -> Responses:
        """See `Steps`."""
        output = self.backend.step()
        for each in output.generated:
            self._tokens[each.request_id] += each.token_ids
        ended = [each.request_id for each in (*output.ended, *output.failed)]
        return [
            (name.partition("#")[0], int(name.partition("#")[2]), self._tokens.pop(name)) for name in ended
        ]

    def busy(self) -> bool:
        """See `Steps`."""
        return self.backend.has_work()


def runner_of(backend: Any) -> str:  # noqa: ANN401 - a VllmBackend, which needs vllm to import
    """Return the class of an engine's model runner; its one rank is in this process."""
    runner = backend.core.engine_core.model_executor.driver_worker.worker.model_runner
    return f"{type(runner).__module__}.{type(runner).__name__}"


KINDS = {"vllm": Vllm, "engine": Engine}


def serve(kind: str, settings: dict[str, Any]) -> None:
    """Be a contestant: say what it is, then answer each job on stdin."""
    try:
        steps = KINDS[kind](settings)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises, as the reason for the report
        print("answer", json.dumps({"refused": f"{type(error).__name__}: {error}"[-500:]}), flush=True)
        os._exit(1)
    print("answer", json.dumps(steps.about), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print("answer", json.dumps(generate(steps, **job)), flush=True)
    os._exit(0)  # vLLM's threads would be waited for


def generate(steps: Steps, prompts: Prompts, n: int, tokens: int, seed: int) -> Responses:
    """Return all responses."""
    for name, prompt in prompts:
        steps.add(name, prompt, n, tokens, seed)
    found: Responses = []
    while steps.busy():
        found += steps.step()
    return sorted(found)


class Process:
    """A contestant in a process of its own."""

    def __init__(self, kind: str, settings: dict[str, Any], environ: dict[str, str]) -> None:
        self._command = [sys.executable, __file__, kind, json.dumps(settings)]
        self._environ = os.environ | environ
        self._process: subprocess.Popen[str] | None = None

    async def start(self) -> dict[str, str]:
        """Start it, and wait until it is ready; return what it is. Raises `RefusedError`."""
        found: dict[str, str] = await asyncio.to_thread(self._begin)
        if "refused" in found:
            raise RefusedError(found["refused"])
        return found

    def _begin(self) -> Any:  # noqa: ANN401 - what JSON says
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, text=True, env=self._environ, start_new_session=True
        )
        return self._answer()

    async def run(self, prompts: Prompts, n: int, tokens: int, seed: int) -> Responses:
        """Return all responses, in order. Raises `RefusedError` if it has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        job = {"prompts": prompts, "n": n, "tokens": tokens, "seed": seed}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        found = await asyncio.to_thread(self._answer)
        if isinstance(found, dict):
            raise RefusedError(found["refused"])
        return [(str(name), index, ids) for name, index, ids in found]

    async def close(self) -> None:
        """End it, and what it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
            self._process.wait(20)

    def _answer(self) -> Any:  # noqa: ANN401 - what JSON says
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        return {"refused": f"ended with {self._process.wait()}; its stderr is above"}


class System:
    """A whole system with one engine. `config`: its settings as `a.b=c`."""

    def __init__(self, config: list[str]) -> None:
        self._config = config
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> dict[str, str]:
        """Start it; return what it is. Raises `RefusedError`."""
        from seer.client import RolloutClient
        from seer.common.config import load
        from seer.common.errors import SeerError
        from seer.local.system import LocalSystem

        try:
            config = load(None, {}, self._config)
            self._system = await self._stack.enter_async_context(LocalSystem(config, 1))
            self._client = await self._stack.enter_async_context(RolloutClient(self._system.endpoint))
            versions = (await self._client.status()).instances[0].versions
        except SeerError as error:
            await self._stack.aclose()
            raise RefusedError(str(error)[-500:]) from error
        return {"scheduling": versions["scheduling"]}

    async def run(self, prompts: Prompts, n: int, tokens: int, seed: int) -> Responses:
        """Return all responses, in order."""
        from seer.client import Prompt, SamplingParams

        given = [Prompt(name, token_ids=ids) for name, ids in prompts]
        rollout = await self._client.submit(
            given,
            n=n,
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
            seed=seed,
            rollout_number=0,
            repeat=True,
        )
        groups = await self._system.run(rollout.result())
        return sorted((g.prompt_id, r.index, r.token_ids.tolist()) for g in groups for r in g.responses)

    async def close(self) -> None:
        """End it."""
        await self._stack.aclose()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # vLLM's workers look for `contestants.Named`
    serve(sys.argv[1], json.loads(sys.argv[2]))
