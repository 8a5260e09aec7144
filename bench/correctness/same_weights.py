"""The same trained weights, whatever dies: a run undisturbed, then under faults by seed; prints JSON.

    python bench/correctness/same_weights.py --plans 10
    python bench/correctness/same_weights.py --example agents --iterations 16
    python bench/correctness/same_weights.py --cut-off
    python bench/correctness/same_weights.py --bfloat16 --learning-rate 1e-5

A run is an example (`EXAMPLES`) on two vLLM engines with a KV pool. A plan kills and stops engines, buffer,
context, dgds, the pool's services and the trainer, which then goes on from its checkpoint. With `--cut-off`
each process has a network namespace of its own, and nodes lose their network for some seconds, too: nothing
gets from or to their processes. Compared are, of each step, the digests of the weights and of the responses
with their rewards, and all of the last checkpoint, optimizer included; where a plan differs, its first token
that does is named. The tool of `agents` answers a call once: who asks again gets another number. With
`--out FOLDER` the runs stay there, and what is there is not run again: plans can be added to one quiet run.
With `--bfloat16` engines have the weights in bfloat16, of which a small step changes few: a plan's updates
are deltas then, those of the undisturbed run are whole streams. Exits with 1 unless all plans are the same,
each with a fault, without deaths that no fault explains, and leave nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
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

from chaos.network import Network, problem
from chaos.processes import quick
from chaos.system import POOL, System

EXAMPLES = {
    "grpo": ("grpo", "train", "countdown", ["--max-tokens={max_tokens}"]),
    "agents": ("agents", "train_agents", "countdown", []),
    "grpo-images": (
        "grpo", "train", "countdown_images", ["--max-tokens={max_tokens}", "--problems=problems_images"],
    ),
}  # fmt: skip
"""Folder, module, whose model, and what else its command takes."""

RUN = """
import dataclasses, functools, importlib, json, sys
from pathlib import Path
folder, module, out, mode, plant = (sys.argv.pop(1) for _ in range(5))
sys.path.insert(0, folder)
train, out = importlib.import_module(module), Path(out)
samples, update = train.samples, train.RolloutClient.update_weights

def noted(given):  # what a step trains on, by its number; a step that is done again writes it again
    done = out / "metrics.jsonl"
    step = len(done.read_text().splitlines()) if done.exists() else 0
    if module == "train":
        rows = [(each.token_ids.tolist(), reward) for of in given
                for each, reward in zip(of.group.responses, of.rewards)]
    else:
        rows = [(each.token_ids.tolist(), each.result) for of in given for each in of]
    taken = samples(given)
    if plant and step == 1:
        place = next(place for place, each in enumerate(taken) if each.advantage)
        tokens = taken[place].token_ids.copy()
        tokens[-1] ^= 1
        rows[place][0][-1] ^= 1
        taken[place] = dataclasses.replace(taken[place], token_ids=tokens)
    (out / f"responses-{step}.json").write_text(json.dumps(rows))
    return taken

async def updating(client, *given):
    live = await update(client, *given)
    with (out / "updates.txt").open("a") as file:
        print(client.deltas.last.why or "delta", file=file)
    return live

if module == "train_agents":
    ask, calls = train.lookup.ask, out / "calls.txt"

    async def asked_once(call_id, **of):  # a trainer without its journal is told another number
        call = json.dumps(of)
        again = calls.exists() and call in calls.read_text().splitlines()
        with calls.open("a") as file:
            print(call, file=file)
        return await ask(call_id, **of) + again

    train.lookup.ask = asked_once

train.samples, train.RolloutClient.update_weights = noted, updating
train.RolloutClient = functools.partial(train.RolloutClient, deltas=mode == "deltas")
sys.exit(train.main())
"""

RUNS_FOLLOW_FROM = ("example", "iterations", "prompts", "max_tokens", "learning_rate", "bfloat16")
"""Options."""

PLANS_FOLLOW_FROM = ("faults", "pause", "plant_fault", "cut_off")

NODES = (
    ("engine-0",),
    ("engine-1", "pool-owner"),
    ("buffer", "pool-master"),
    ("context", "dgds"),
    ("trainer",),
)
"""Who loses the network together."""

CUTS = 0.4
"""Share of the faults, where there are namespaces."""

TRIES = 20
"""Most processes of a trainer in one run: so many kills are in no plan."""


class Run:
    """One training run in folder `out`; with `seed` of a plan, under its faults."""

    def __init__(self, model: Path, out: Path, args: argparse.Namespace, seed: int | None) -> None:
        shutil.rmtree(out, ignore_errors=True)  # of a run that was cut short
        out.mkdir(parents=True)
        self._model, self._out, self._args = model, out, args
        self._random = None if seed is None else random.Random(f"same weights {seed}")
        self._net: Network | None = None
        self._trainer: asyncio.subprocess.Process | None = None
        self.faults: list[str] = []
        self.steps: list[int] = []
        """By fault: how many steps of the training were done."""
        self.ends: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Train to the end; return what there is to compare and to tell."""
        folders = {name: str(self._out / name) for name in ("spool", "log", "images")}
        config = quick("vllm")
        config = replace(
            config,
            buffer=replace(config.buffer, **folders),
            engine=replace(config.engine, max_num_seqs=64, max_model_len=self._args.max_tokens + 64),
            pool=replace(config.pool, kind="mooncake", dram_gib=0.2),
        )
        self._net = Network() if self._random and self._args.cut_off else None
        try:
            trainers = ("trainer",) if self._net else ()
            async with System(config, model=self._model, net=self._net, trainers=trainers) as system:
                seconds = await self._train_under_faults(system)
        finally:
            if self._net is not None:
                self._net.close()
        return {
            **results(self._out),
            "seconds": round(seconds, 1),
            "updates": (self._out / "updates.txt").read_text().splitlines(),
            "faults": self.faults,
            "at_steps": self.steps,
            "packets_cut": self._net.counters["cut"] if self._net else 0,
            "trainer_ended": self.ends,
            "problems": system.leftovers(),
        }

    async def _train_under_faults(self, system: System) -> float:
        began = time.monotonic()
        faults = asyncio.create_task(self._inflict(system))
        try:
            async with asyncio.timeout(self._args.seconds):
                await self._train(system)
        finally:
            faults.cancel()
            await asyncio.wait([faults])
            if self._trainer is not None and self._trainer.returncode is None:
                self._trainer.kill()
        return time.monotonic() - began

    async def _train(self, system: System) -> None:
        asked = self._args
        folder, module, _, more = EXAMPLES[asked.example]
        command = [
            sys.executable, "-c", RUN, str(EXAMPLE.parent / folder), module, str(self._out),
            "deltas" if self._random else "whole", "plant" if self._random and asked.plant_fault else "",
            "--connect", system.config.endpoints.trainers, "--out", str(self._out),
            "--learning-rate", str(asked.learning_rate),
            "--model", str(self._model), "--iterations", str(asked.iterations),
            "--prompts", str(asked.prompts), "--responses", "8", "--held-out", "8",
            *(each.format_map(vars(asked)) for each in more),
        ]  # fmt: skip
        security = system.security("trainer-trainer")
        keys = {"SEER_SECURITY__KEY": security.key, "SEER_SECURITY__SERVER": security.server}
        environ = os.environ | {name: value for name, value in keys.items() if value}
        for _ in range(TRIES):
            pipe = asyncio.subprocess.PIPE
            async with system.place("trainer"):
                self._trainer = await asyncio.create_subprocess_exec(
                    *command, stdout=pipe, stderr=pipe, env=environ
                )
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
        # Faults while the trainer only starts would tell little.
        while not (self._out / "updates.txt").exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.1)
        while len(self.faults) < self._args.faults:
            await asyncio.sleep(rand.uniform(1, self._args.pause))
            if self._net and (not self.faults or rand.random() < CUTS):
                await self._cut(self._net, rand.choice(NODES), rand.uniform(2, 15))
                continue
            name, what = rand.choice(names), rand.choice(("kill", "kill", "stop"))
            seconds = rand.uniform(0.1, 6)
            number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
            if not self._signal(system, name, number):
                continue
            self._note(f"{what} {name}")
            if what == "stop":
                try:
                    await asyncio.sleep(seconds)
                finally:  # who is stopped cannot end
                    self._signal(system, name, signal.SIGCONT)

    async def _cut(self, net: Network, node: tuple[str, ...], seconds: float) -> None:
        self._note(f"cut {' and '.join(node)} for {seconds:.1f} s")
        net.cut_off(node)
        try:
            await asyncio.sleep(seconds)
        finally:
            net.heal()

    def _note(self, fault: str) -> None:
        self.faults.append(fault)
        done = self._out / "metrics.jsonl"
        self.steps.append(len(done.read_text().splitlines()) if done.exists() else 0)

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


def results(out: Path) -> dict[str, Any]:
    """Return what a run in a folder came to. `digests`, the checkpoint's last, are compared."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    responses = [(out / f"responses-{step}.json").read_text() for step in range(len(rows))]
    texts = [*responses, *(file.read_text() for file in out.glob("controls.json"))]
    calls = out / "calls.txt"
    return {
        "digests": [row["weights_digest"] for row in rows]
        + [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
        + [digest(out / "checkpoint.pt")],
        "tokens": sum(len(tokens) for text in responses for tokens, _ in json.loads(text)),
        "tool_calls": len(calls.read_text().splitlines()) if calls.exists() else 0,
        "rewards": [row["reward"] for row in rows],
    }


def first_other_token(quiet: Path, plan: Path, iterations: int) -> str:
    """Return where a plan's responses leave the quiet run's."""
    for iteration in range(iterations):
        ours, theirs = (
            json.loads((each / f"responses-{iteration}.json").read_text()) for each in (plan, quiet)
        )
        for number, ((mine, reward), (other, rewarded)) in enumerate(zip(ours, theirs, strict=True)):
            place = next(
                (at for at, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]),
                min(len(mine), len(other)),
            )
            if mine != other:
                return f"iteration {iteration}, response {number}, token {place}"
            if reward != rewarded:
                return f"iteration {iteration}, response {number}, reward {reward} instead of {rewarded}"
    return "no token differs: the trainer's step does"


def in_bfloat16(model: Path, folder: Path) -> Path:
    """Write a shipped model in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


async def _known(model: Path, out: Path, args: argparse.Namespace, seed: int | None) -> dict[str, Any]:
    """Return what a run in folder `out` gave, and make it if it is not there."""
    options = RUNS_FOLLOW_FROM if seed is None else (*RUNS_FOLLOW_FROM, *PLANS_FOLLOW_FROM)
    asked = {name: getattr(args, name) for name in options}
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
        model = EXAMPLE.parent / EXAMPLES[args.example][2] / "model"
        model = in_bfloat16(model, Path(name) / "model") if args.bfloat16 else model
        quiet = await _known(model, folder / "quiet", args, None)
        plans = []
        for seed in range(args.seed, args.seed + args.plans):
            out = folder / f"plan-{seed}"
            plan = await _known(model, out, args, seed)
            equal = plan["digests"] == quiet["digests"]
            hurt = bool(plan["packets_cut"] if args.cut_off else plan["faults"])
            plan |= {"seed": seed, "same": equal and hurt and not plan["problems"]}
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
    parser.add_argument("--example", choices=EXAMPLES, default="grpo")
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
    parser.add_argument(
        "--cut-off", action="store_true", help="plans cut nodes off the network, too; needs namespaces"
    )
    args = parser.parse_args()
    if args.bfloat16 and args.example == "grpo-images":
        parser.error("--bfloat16 is for models of text: leave it out")
    if args.cut_off and (why := problem()):
        parser.error(f"--cut-off: {why}")
    report = asyncio.run(compare(args))
    print(
        json.dumps(
            {"machine": machine("torch", "vllm"), "asked": vars(args), **report}, indent=1, default=str
        )
    )
    return int(report["same"] < args.plans)


if __name__ == "__main__":
    sys.exit(main())
