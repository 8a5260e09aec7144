"""One engine on a GPU beside its trainer: weight updates of each kind, sleep, a kill, memory that is short.

    python bench/gpu/updates.py updates.json
    python bench/gpu/updates.py updates.json --model path/to/hf-model --steps update-stream sleep-2

The trainer is this process, with all weights on the same GPU. Each step has a deadline, and is judged by the
tokens of a rollout after it: those from before, or those of the other weights (the same ones, scaled), which
a checked update from a folder has shown first. Writes after each step its seconds, what went wrong, how many
of the responses differ, and the GiB in use on the device.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from lib.hardware import machine
from lib.paths import EXAMPLE
from safetensors.torch import load_file, save_file

from seer.client import Broadcast, Prompt, RolloutClient, SamplingParams, SharedTensors
from seer.client.rollout import Rollout
from seer.client.weight_update import Source
from seer.common.config import load
from seer.common.errors import SeerError
from seer.common.process.devices import driver_version, visible_devices
from seer.local.system import LocalSystem

SCALE = 1.02
STEP_SECONDS = 120.0
POLL_SECONDS = 0.2
SETTINGS = (
    "engine.max_num_seqs=64", "engine.max_model_len=1280", "engine.max_num_batched_tokens=4096",
    "engine.in_place_updates=true", "pool.kind=none", "log.level=warning",
)  # fmt: skip


class Trainer:
    """The trainer of one system. `tensors` are the weights on the GPU, `folder` has the scaled ones."""

    def __init__(self, client: RolloutClient, system: LocalSystem, model: Path, folder: Path) -> None:
        self.client, self.system, self.model, self.folder = client, system, model, folder
        self.tensors = load_file(model / "model.safetensors", device="cuda")
        self.version = 0
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes()) if file.suffix == ".json" else None
        save_file({name: each.cpu() for name, each in self.scaled().items()}, folder / "model.safetensors")

    def scaled(self) -> dict[str, torch.Tensor]:
        """Return the other weights; of those in FP8 the scales differ alone."""
        return {
            name: tensor if tensor.dtype.itemsize == 1 else tensor * SCALE
            for name, tensor in self.tensors.items()
        }

    async def update(self, source: Source) -> None:
        """Make these the live weights. Raises `SeerError`."""
        self.version += 1
        live = await self.client.update_weights(self.version, source, timeout_seconds=STEP_SECONDS)
        if live.quarantined:
            raise SeerError(f"quarantined: {live.quarantined}")

    async def roll(self) -> list[Any]:
        """Return the tokens of a rollout."""
        return await self.system.run((await self._submit()).result())

    async def _submit(self) -> Rollout:
        lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:8]
        given = [Prompt(str(row), text=json.loads(line)["prompt"]) for row, line in enumerate(lines)]
        sampling = SamplingParams(max_tokens=512)
        return await self.client.submit(given, n=8, sampling=sampling, rollout_number=0, repeat=True)

    async def all_there(self) -> None:
        """Wait until the engine has the live weights. Raises `SeerError`."""
        for _ in range(int(STEP_SECONDS / POLL_SECONDS)):
            status = await self.client.status()
            if status.instances and not status.quarantined:
                return
            await asyncio.sleep(POLL_SECONDS)
        raise SeerError(f"the engine did not come back in {STEP_SECONDS:g} s")

    # --- steps: each returns whether the scaled weights are live after it -------------------

    async def update_folder(self) -> bool:
        """Update from a folder, checked."""
        await self.update(self.folder)
        return True

    async def update_stream(self) -> bool:
        """Stream tensors of the GPU, checked."""
        await self.update(self.tensors)
        return False

    async def update_shared(self) -> bool:
        """Update in place through CUDA IPC."""
        await self.update(SharedTensors(self.scaled()))
        return True

    async def update_broadcast(self) -> bool:
        """Broadcast: NCCL has no group with one device twice, so that this must fail by name."""
        await self.update(Broadcast(self.tensors, step_seconds=15))
        return False

    async def sleep_1(self) -> bool:
        """Sleep and wake at level 1."""
        await self.client.sleep(level=1)
        say(f"asleep, level 1: {gib_in_use()} GiB in use")
        await self.client.wake()
        return False

    async def sleep_2(self) -> bool:
        """Sleep at level 2; wake the weights, load them through CUDA IPC, wake the KV."""
        await self.client.sleep(level=2)
        say(f"asleep, level 2: {gib_in_use()} GiB in use")
        await self.client.wake(tags=["weights"])
        say(f"weights awake: {gib_in_use()} GiB in use")
        await self.update(SharedTensors(self.scaled()))
        await self.client.wake(tags=["kv_cache"])
        return True

    async def sleep_2_alone(self) -> bool:
        """Sleep at level 2, and wake without an update: the engine loads the live weights again."""
        await self.update(self.tensors)
        await self.client.sleep(level=2)
        await self.client.wake()
        return False

    async def wake_short(self) -> bool:
        """Wake while the trainer has nearly all memory: an error by name; then free the memory, and wake."""
        await self.client.sleep(level=1)
        free, _ = torch.cuda.mem_get_info()
        taken = torch.empty(free - 2**30, dtype=torch.uint8, device="cuda")
        try:
            await self.client.wake(timeout_seconds=60)
            say("woke although memory was short")
        except SeerError as error:
            say(f"with 1 GiB free: {error}")
        del taken
        torch.cuda.empty_cache()
        with contextlib.suppress(SeerError):  # an engine that was started again is awake
            await self.client.wake(timeout_seconds=60)
        await self.all_there()
        return False

    async def kill(self) -> bool:
        """Kill the engine in mid-rollout: the rollout ends, and the device has its memory back."""
        rollout = await self._submit()
        await asyncio.sleep(0.4)
        before = gib_in_use()
        os.kill(self.system.pids["engine-0"], signal.SIGKILL)
        await asyncio.sleep(2)
        say(f"killed: {before} GiB in use before, {gib_in_use()} after 2 s")
        await self.system.run(rollout.result())
        return False

    async def start_short(self) -> bool:
        """Start another engine that asks for more memory than is free: an error by name."""
        config = load(None, {}, [
            f"shared.model={self.model}", *SETTINGS, "engine.gpu_memory_utilization=0.97",
        ])  # fmt: skip
        try:
            async with LocalSystem(config, 1, say=say):
                say("started although memory was short")
        except SeerError as error:
            say(f"asked for 0.97: {str(error)[-700:]}")
        return False


STEPS = (
    "update_folder", "update_stream", "update_shared", "sleep_1", "sleep_2", "sleep_2_alone", "kill",
    "update_broadcast", "wake_short", "start_short",
)  # fmt: skip

_said: list[str] = []


def say(line: str) -> None:
    """Keep a line for the step's report."""
    _said.append(line)
    print(line, file=sys.stderr, flush=True)


def gib_in_use() -> float:
    """Return the GiB in use on the device, this process's included."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 2**30, 2)


def tokens_of(groups: list[Any]) -> list[Any]:
    """Return all tokens, by prompt and index."""
    return sorted((g.prompt_id, r.index, r.token_ids.tolist()) for g in groups for r in g.responses)


async def perform(
    step: Callable[[], Awaitable[bool]], trainer: Trainer, expected: dict[bool, list[Any]]
) -> dict[str, Any]:
    """Run a step, then a rollout; tell what happened."""
    _said.clear()
    found: dict[str, Any] = {"before_gib": gib_in_use()}
    begun = time.perf_counter()
    scaled = False
    try:
        async with asyncio.timeout(STEP_SECONDS):
            scaled = await step()
    except (SeerError, TimeoutError, torch.OutOfMemoryError) as error:
        found["error"] = f"{type(error).__name__}: {str(error)[-700:]}"
    found["seconds"] = round(time.perf_counter() - begun, 2)
    try:
        async with asyncio.timeout(STEP_SECONDS):
            await trainer.all_there()
            tokens = tokens_of(await trainer.roll())
        if not expected and scaled:
            raise SeerError("the first step must show the weights as they were")
        differing = {
            name: sum(a != b for a, b in zip(tokens, expected[key], strict=True))
            for name, key in (("from_first", False), ("from_scaled", True))
            if key in expected
        }
        expected.setdefault(scaled, tokens)
        found |= {"scaled": scaled, "responses": len(tokens), "differing": differing}
    except (SeerError, TimeoutError) as error:
        found["rollout_error"] = f"{type(error).__name__}: {str(error)[-700:]}"
    return found | {"after_gib": gib_in_use(), "said": list(_said)}


async def run(given: argparse.Namespace) -> None:
    """Run all steps on one system."""
    config = load(None, {}, [
        f"shared.model={given.model}", *SETTINGS, f"engine.gpu_memory_utilization={given.share}", *given.sets
    ])  # fmt: skip
    report: dict[str, Any] = {
        "machine": machine("torch", "vllm", "triton"), "driver": driver_version(), "settings": given.sets,
        "devices": [each.model for each in visible_devices()], "model": str(given.model), "steps": {},
    }  # fmt: skip
    expected: dict[bool, list[Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        async with (
            LocalSystem(config, 1, say=say) as system,
            RolloutClient(system.endpoint, tokenizer=str(given.model)) as client,
        ):
            trainer = Trainer(client, system, given.model, Path(scratch) / "scaled")
            for name in ("nothing", *given.steps):
                step = (lambda: asyncio.sleep(0, False)) if name == "nothing" else getattr(trainer, name)
                report["steps"][name] = await perform(step, trainer, expected)
                given.out.write_text(json.dumps(report, indent=1) + "\n")
                print(name, json.dumps(report["steps"][name]), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="file of the figures")
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--share", type=float, default=0.2, help="of the device's memory, for the engine")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
