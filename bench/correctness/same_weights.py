"""The same trained weights, whatever dies: GRPO undisturbed, then under faults by seed; prints JSON.

    python bench/correctness/same_weights.py --plans 10
    python bench/correctness/same_weights.py --bfloat16 --learning-rate 1e-5

A run is `examples/grpo/train.py` on two vLLM engines with a KV pool. A plan kills and stops engines, buffer,
context, dgds, the pool's services and the trainer, which then goes on from its checkpoint. Compared are the
digest of the weights of each step, and all of the last checkpoint, optimizer included; where a plan differs,
its first token that does is named. With `--out FOLDER` the runs stay there, and what is there is not run
again: plans can be added to one quiet run. With `--bfloat16` engines have the weights in bfloat16, of which a
small step changes few: a plan's updates are deltas then, those of the undisturbed run are whole streams.
Exits with 1 unless all plans are the same, each with a fault, without deaths that no fault explains, and
leave nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lib.hardware import machine
from lib.paths import EXAMPLE, TESTS
from msgspec.structs import replace

sys.path.insert(0, str(TESTS))

from chaos.processes import quick
from chaos.system import POOL, System

GRPO = EXAMPLE.parent / "grpo"

RUN = """
import functools, json, sys
from pathlib import Path
mode, plant = sys.argv.pop(2), sys.argv.pop(2) == "plant"
sys.path.insert(0, sys.argv.pop(1))
import train

iterate, samples, update = train.Trainer._iterate, train.samples, train.RolloutClient.update_weights

def noted(scored):  # what a step trains on, by iteration; an iteration that is done again writes it again
    if plant and noted.iteration == 1:
        mixed = next(each for each in scored if len(set(each.rewards)) > 1)
        tokens = mixed.group.responses[0].token_ids.copy()
        tokens[-1] ^= 1
        object.__setattr__(mixed.group.responses[0], "token_ids", tokens)
    tokens = [response.token_ids.tolist() for each in scored for response in each.group.responses]
    (noted.out / f"tokens-{noted.iteration}.json").write_text(json.dumps(tokens))
    return samples(scored)

async def iterating(trainer, client, iteration):
    noted.out, noted.iteration = trainer.out, iteration
    return await iterate(trainer, client, iteration)

async def updating(client, *given):
    live = await update(client, *given)
    with (noted.out / "updates.txt").open("a") as file:
        print(client.deltas.last.why or "delta", file=file)
    return live

train.samples, train.Trainer._iterate, train.RolloutClient.update_weights = noted, iterating, updating
train.RolloutClient = functools.partial(train.RolloutClient, deltas=mode == "deltas")
sys.exit(train.main())
"""

RUNS_FOLLOW_FROM = (
    "iterations",
    "prompts",
    "max_tokens",
    "learning_rate",
    "faults",
    "pause",
    "bfloat16",
    "plant_fault",
)
"""Options."""

TRIES = 20
"""Most processes of a trainer in one run: so many kills are in no plan."""


class Run:
    """One training run in folder `out`; with `seed` of a plan, under its faults."""

    def __init__(self, model: Path, out: Path, args: argparse.Namespace, seed: int | None) -> None:
        shutil.rmtree(out, ignore_errors=True)  # of a run that was cut short
        out.mkdir(parents=True)
        self._model, self._out, self._args = model, out, args
        self._random = None if seed is None else random.Random(f"same weights {seed}")
        self._trainer: asyncio.subprocess.Process | None = None
        self.faults: list[str] = []
        self.steps: list[int] = []
        """By fault: how many steps of the training were done."""
        self.ends: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Train to the end; return what there is to compare and to tell."""
        config = quick("vllm")
        config = replace(
            config,
            buffer=replace(config.buffer, spool=str(self._out / "spool"), log=str(self._out / "log")),
            engine=replace(config.engine, max_num_seqs=64, max_model_len=self._args.max_tokens + 64),
            pool=replace(config.pool, kind="mooncake", dram_gib=0.2),
        )
        async with System(config, model=self._model, trainers=()) as system:
            began = time.monotonic()
            faults = asyncio.create_task(self._inflict(system))
            try:
                async with asyncio.timeout(self._args.seconds):
                    await self._train(system.config.endpoints.trainers)
            finally:
                faults.cancel()
                await asyncio.wait([faults])
                if self._trainer is not None and self._trainer.returncode is None:
                    self._trainer.kill()
            seconds = time.monotonic() - began
        rows = [json.loads(line) for line in (self._out / "metrics.jsonl").read_text().splitlines()]
        return {
            "digests": [row["weights_digest"] for row in rows] + [digest(self._out / "checkpoint.pt")],
            "seconds": round(seconds, 1),
            "tokens": sum(row["tokens"] for row in rows),
            "updates": (self._out / "updates.txt").read_text().splitlines(),
            "faults": self.faults,
            "at_steps": self.steps,
            "rewards": [row["reward"] for row in rows],
            "trainer_ended": self.ends,
            "problems": system.leftovers(),
        }

    async def _train(self, endpoint: str) -> None:
        asked = self._args
        command = [
            sys.executable, "-c", RUN, str(GRPO),
            "deltas" if self._random else "whole", "plant" if self._random and asked.plant_fault else "",
            "--connect", endpoint, "--out", str(self._out), "--learning-rate", str(asked.learning_rate),
            "--model", str(self._model), "--iterations", str(asked.iterations),
            "--prompts", str(asked.prompts), "--responses", "8", "--held-out", "8",
            "--max-tokens", str(asked.max_tokens),
        ]  # fmt: skip
        for _ in range(TRIES):
            pipe = asyncio.subprocess.PIPE
            self._trainer = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
            _, said = await self._trainer.communicate()
            if self._trainer.returncode == 0:
                return
            if self._trainer.returncode != -signal.SIGKILL:
                self.ends.append(said.decode().strip().rpartition("\n")[2])
        raise RuntimeError(f"the trainer did not end in {TRIES} tries: {self.ends}")

    async def _inflict(self, system: System) -> None:
        if self._random is None:
            return
        rand = self._random
        names = (*system.engines, "buffer", "context", "dgds", *POOL, "trainer", "trainer")
        while len(self.faults) < self._args.faults:
            await asyncio.sleep(rand.uniform(1, self._args.pause))
            name, what = rand.choice(names), rand.choice(("kill", "kill", "stop"))
            seconds = rand.uniform(0.1, 6)
            number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
            if not self._signal(system, name, number):
                continue
            self.faults.append(f"{what} {name}")
            done = self._out / "metrics.jsonl"
            self.steps.append(len(done.read_text().splitlines()) if done.exists() else 0)
            if what == "stop":
                await asyncio.sleep(seconds)
                self._signal(system, name, signal.SIGCONT)

    def _signal(self, system: System, name: str, number: signal.Signals) -> bool:
        if name != "trainer":
            return system.signal(name, number)
        if self._trainer is None or self._trainer.returncode is not None:
            return False
        self._trainer.send_signal(number)
        return True


def digest(checkpoint: Path) -> str:
    """Return the digest of a checkpoint's tensors: the model's, and the optimizer's by parameter."""
    state, found = torch.load(checkpoint, weights_only=True), hashlib.sha256()
    tensors = dict(state["model"])
    for number, of_parameter in state["optimizer"]["state"].items():
        tensors |= {f"optimizer {number} {name}": value for name, value in of_parameter.items()}
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def first_other_token(quiet: Path, plan: Path, iterations: int) -> str:
    """Return where a plan's tokens leave the quiet run's."""
    for iteration in range(iterations):
        ours, theirs = (json.loads((each / f"tokens-{iteration}.json").read_text()) for each in (plan, quiet))
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine != other:
                place = next(
                    (at for at, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]),
                    min(len(mine), len(other)),
                )
                return f"iteration {iteration}, response {number}, token {place}"
    return "no token differs: the trainer's step does"


def in_bfloat16(folder: Path) -> Path:
    """Write the shipped model in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EXAMPLE / "model").save_pretrained(folder)
    return folder


async def _known(model: Path, out: Path, args: argparse.Namespace, seed: int | None) -> dict[str, Any]:
    """Return what a run in folder `out` gave, and make it if it is not there."""
    asked = {name: getattr(args, name) for name in RUNS_FOLLOW_FROM}
    file = out / "run.json"
    if not file.exists():
        made = await Run(model, out, args, seed).run()
        file.write_text(json.dumps({"asked": asked} | made))
    known: dict[str, Any] = json.loads(file.read_text())
    if (before := known.pop("asked")) != asked:
        raise SystemExit(f"--out: {out} has a run of {before}, not of {asked}: give another folder")
    return known


async def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run the quiet run and all plans."""
    with tempfile.TemporaryDirectory() as name:
        folder = (args.out or Path(name)).resolve()
        model = in_bfloat16(Path(name) / "model") if args.bfloat16 else EXAMPLE / "model"
        quiet = await _known(model, folder / "quiet", args, None)
        plans = []
        for seed in range(args.seed, args.seed + args.plans):
            out = folder / f"plan-{seed}"
            plan = await _known(model, out, args, seed)
            equal = plan["digests"] == quiet["digests"]
            plan |= {"seed": seed, "same": equal and bool(plan["faults"]) and not plan["problems"]}
            if not equal:
                plan["first"] = first_other_token(folder / "quiet", out, args.iterations)
            plans.append(plan)
            print(json.dumps(plan), file=sys.stderr, flush=True)
    return {"quiet": quiet, "plans": plans, "same": sum(plan["same"] for plan in plans)}


def main() -> int:
    """Print what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder that the runs' files stay in; default: none does")
    parser.add_argument("--plans", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the first plan")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8, help="of an iteration, with eight responses each")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--faults", type=int, default=6, help="of a plan")
    parser.add_argument("--pause", type=float, default=8.0, help="most seconds from one fault to the next")
    parser.add_argument("--seconds", type=float, default=1200.0, help="most of a run")
    parser.add_argument("--bfloat16", action="store_true", help="engines have the weights in bfloat16")
    parser.add_argument(
        "--plant-fault", action="store_true", help="one token of each plan is changed: it must differ"
    )
    args = parser.parse_args()
    report = asyncio.run(compare(args))
    print(
        json.dumps(
            {"machine": machine("torch", "vllm"), "asked": vars(args), **report}, indent=1, default=str
        )
    )
    return int(report["same"] < args.plans)


if __name__ == "__main__":
    sys.exit(main())
