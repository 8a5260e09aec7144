"""Rollouts on one GPU: Seer with each source of drafts, scheduled ahead, and bare vLLM, in turns.

    python bench/gpu/rates.py rates.json
    python bench/gpu/rates.py rates.json --sides off grouped --cells 512x64 --set engine.batch_invariant=true

All sides are up on the same device, each with a share of its memory, and take turns: each turn has prompts
and a seed of its own. A cell is most tokens of a response x responses at once. The model is the shipped one,
padded to a weight and a number of layers that occupy a GPU (examples/countdown/heavier.py), in bfloat16.
Bare vLLM has its own defaults, in processes of its own, and samples other tokens. Writes after each cell: by
side the median of tokens/s and of its ratio to `off` in the same turn, with the least and the most; and how
many of Seer's responses differ from those of `off`, which only batch-invariant kernels exclude.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lib.machine import machine
from lib.paths import EXAMPLE
from tokenizers import Tokenizer

sys.path.insert(0, str(EXAMPLE))
from heavier import WEIGHTS, heavier

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.common.config import load
from seer.common.process.devices import driver_version, visible_devices
from seer.local.system import LocalSystem

SIDES = {
    "vllm": [],
    "off": ["drafts.source=off"],
    "ahead": ["drafts.source=off", "engine.async_scheduling=true"],
    "own": ["drafts.source=own"],
    "grouped": ["drafts.source=grouped"],
}
GROUP = 8
LONGEST = 1280
"""Tokens of the longest sequence."""

BATCHED_TOKENS = 4096
"""Most tokens of a step: the padded MLPs are so wide that vLLM's default would take most of the memory."""

Responses = list[tuple[str, int, list[int]]]


class Side(Protocol):
    """A contestant."""

    async def run(self, prompts: list[tuple[str, list[int]]], tokens: int, seed: int) -> Responses:
        """Return all responses to prompts, by id: id, index and tokens."""
        ...


class Seer:
    """A system with one engine."""

    def __init__(self, client: RolloutClient, system: LocalSystem) -> None:
        self._client, self._system = client, system

    async def run(self, prompts: list[tuple[str, list[int]]], tokens: int, seed: int) -> Responses:
        """See `Side.run`."""
        given = [Prompt(name, token_ids=ids) for name, ids in prompts]
        sampling = SamplingParams(max_tokens=tokens)
        rollout = await self._client.submit(
            given, n=GROUP, sampling=sampling, seed=seed, rollout_number=0, repeat=True
        )
        groups = await self._system.run(rollout.result())
        return sorted((g.prompt_id, r.index, r.token_ids.tolist()) for g in groups for r in g.responses)


class Bare:
    """vLLM in a process of its own, by its own defaults."""

    def __init__(self, model: Path, running: int, share: float) -> None:
        settings = {
            "model": str(model), "max_num_seqs": running, "max_model_len": LONGEST,
            "max_num_batched_tokens": BATCHED_TOKENS, "gpu_memory_utilization": share,
        }  # fmt: skip
        command = [sys.executable, __file__, "--serve", json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    async def run(self, prompts: list[tuple[str, list[int]]], tokens: int, seed: int) -> Responses:
        """See `Side.run`."""
        assert self._process.stdin is not None
        job = {"prompts": [ids for _, ids in prompts], "tokens": tokens, "seed": seed}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return await asyncio.to_thread(self._answer)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()

    def _answer(self) -> Any:  # noqa: ANN401 - what JSON says
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise SystemExit(f"bare vLLM ended with {self._process.wait()}; its stderr is above")


def serve(settings: dict[str, Any]) -> None:
    """Be bare vLLM: answer each job on stdin."""
    from vllm import LLM
    from vllm import SamplingParams as Sampling

    llm = LLM(**settings, disable_log_stats=True, use_tqdm_on_load=False)
    print("answer 0", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        sampling = Sampling(n=GROUP, max_tokens=job["tokens"], logprobs=0, detokenize=False, seed=None)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        found = llm.generate(prompts, sampling, use_tqdm=False)
        responses = [
            (str(place), each.index, list(each.token_ids))
            for place, output in enumerate(found)
            for each in output.outputs
        ]
        print("answer", json.dumps(responses), flush=True)


def padded(folder: Path, gigabytes: float, layers: int) -> Path:
    """Return the shipped model with so many GB in bfloat16, and `layers` times its layers."""
    from safetensors.torch import load_file, save_file

    shipped = (EXAMPLE / "model" / WEIGHTS).stat().st_size
    made = heavier(folder, weight=2e9 * gigabytes / shipped, layers=layers)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(made / WEIGHTS).items()}
    save_file(tensors, made / WEIGHTS, {"format": "pt"})
    described = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(described | {"dtype": "bfloat16"}))
    return made


async def start(
    stack: contextlib.AsyncExitStack, name: str, model: Path, running: int, given: argparse.Namespace
) -> Side:
    """Start a side; it ends with the stack."""
    begun = time.monotonic()
    side: Side
    if name == "vllm":
        bare = await asyncio.to_thread(Bare, model, running, given.share)
        stack.callback(bare.close)
        side = bare
    else:
        config = load(None, {}, [
            f"shared.model={model}", f"engine.max_num_seqs={running}", f"engine.max_model_len={LONGEST}",
            f"engine.max_num_batched_tokens={BATCHED_TOKENS}", f"engine.gpu_memory_utilization={given.share}",
            "pool.kind=none", "log.level=warning", *SIDES[name], *given.sets,
        ])  # fmt: skip
        system = await stack.enter_async_context(LocalSystem(config, 1))
        client = await stack.enter_async_context(RolloutClient(system.endpoint))
        print((await client.status()).instances[0].versions, file=sys.stderr)
        side = Seer(client, system)
    print(f"{name}: started in {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return side


def prompts_of(number: int, count: int) -> list[tuple[str, list[int]]]:
    """Return the prompts of a turn."""
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
    lines = (EXAMPLE / "prompts_512.jsonl").read_text().splitlines()
    texts = [json.loads(lines[(number * count + i) % len(lines)])["prompt"] for i in range(count)]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [(str(place), each) for place, each in enumerate(ids)]


async def measure(cell: str, sides: dict[str, Side], turns: int) -> dict[str, Any]:
    """Run a cell; the first turn warms up."""
    tokens, running = map(int, cell.split("x"))
    rates: dict[str, list[float]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    differing = dict.fromkeys(sides, 0)
    responses = 0
    for number in range(turns + 1):
        prompts = prompts_of(number, running // GROUP)
        found: dict[str, Responses] = {}
        names = list(sides)
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            begun = time.perf_counter()
            found[name] = await sides[name].run(prompts, tokens, number)
            took = time.perf_counter() - begun
            if number:
                rates[name].append(sum(len(each[2]) for each in found[name]) / took)
                seconds[name].append(took)
        if number and "off" in found:
            responses += len(found["off"])
            for name in names:
                differing[name] += sum(a != b for a, b in zip(found[name], found["off"], strict=True))
    return {"turns": turns, "responses": responses} | {
        name: {
            "tokens_per_s": round(statistics.median(rates[name])),
            "seconds": round(statistics.median(seconds[name]), 2),
            **against(rates[name], rates.get("off", [])),
            **({} if name == "vllm" else {"differing": differing[name]}),
        }
        for name in sides
    }  # fmt: skip


def against(rates: Sequence[float], off: Sequence[float]) -> dict[str, list[float]]:
    """Return the median of the ratios to `off`, and the least and the most."""
    ratios = [one / other for one, other in zip(rates, off, strict=False)]
    if not ratios:
        return {}
    return {"over_off": [round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))]}


async def compare(model: Path, given: argparse.Namespace) -> None:
    """Run all cells on sides that are as large as the largest needs."""
    running = max(int(cell.split("x")[1]) for cell in given.cells)
    report: dict[str, Any] = {
        "machine": machine("torch", "vllm", "triton"), "driver": driver_version(),
        "devices": [each.model for each in visible_devices()], "settings": given.sets,
        "model_bytes": (model / WEIGHTS).stat().st_size, "layers": given.layers, "cells": {},
    }  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        sides = {name: await start(stack, name, model, running, given) for name in given.sides}
        for cell in given.cells:
            report["cells"][cell] = await measure(cell, sides, given.turns)
            given.out.write_text(json.dumps(report, indent=1) + "\n")
            print(cell, json.dumps(report["cells"][cell]), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", help="file of the figures")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--cells", nargs="+", default=["16x64", "16x256", "512x64", "1024x256"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a padded model that is there already")
    parser.add_argument("--gigabytes", type=float, default=4, help="weight of the padded model")
    parser.add_argument("--layers", type=int, default=8, help="so many times the layers")
    parser.add_argument("--share", type=float, default=0.17, help="of the device's memory, for each side")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="a setting of Seer's sides")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(given.model or padded(Path(folder), given.gigabytes, given.layers), given))


if __name__ == "__main__":
    main()
