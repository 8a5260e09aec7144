"""The GRPO example: it trains on-policy, and killed in every phase its curve is that of an undisturbed run."""

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("vllm", "matplotlib")):
    pytest.skip("needs the engine extra and matplotlib", allow_module_level=True)

import torch
from shared_engines import ONE_CORE, SharedEngines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"iterations": 3, "prompts": 6, "responses": 6, "held-out": 4, "max-tokens": 128}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]

TIMED = {"seconds", "tokens_per_second", "tail_seconds", "reward_seconds", "reward_overlap"}
ROUNDED = {"gap", "kl"}
"""What schedule and batch may change; `weight_version` counts a shared system's updates."""

KILLED = """
import asyncio, os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import checkpoint, learner, problems, train

phase = sys.argv.pop(1)
step, update, reward = learner.torch.optim.AdamW.step, train.RolloutClient.update_weights, problems.reward

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def in_rollout(group, response):
    if group.prompt_id.startswith("train"):
        die()
    return reward(group, response)

async def in_update(*given):
    task = asyncio.create_task(update(*given))
    await asyncio.sleep(0.03)
    die(task)

async def by_deltas(client, version, tensors):
    before = client.weight_version
    live = await update(client, version, tensors, base=max(0, before))
    assert (client.deltas.last.why == "") is (before > 0), client.deltas.last
    return live

def after_step(optimizer):
    step(optimizer)
    die()

if phase == "update":
    train.RolloutClient.update_weights = in_update
elif phase == "rollout":
    problems.reward = in_rollout
elif phase == "train":
    learner.torch.optim.AdamW.step = after_step
elif phase == "deltas":
    train.RolloutClient.update_weights = by_deltas
elif phase == "checkpoint":  # written, not yet in its place
    checkpoint.Path.replace = die
elif phase == "metrics":  # the checkpoint is there, metrics.jsonl is not
    train.curves.write_metrics = die
sys.exit(train.main())
"""


async def run(out: Path, phase: str, *more: str) -> int:
    command = [sys.executable, "-c", KILLED, str(EXAMPLES / "grpo"), phase, *SMALL, "--out", str(out), *more]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, said = await process.communicate()
    code = process.returncode
    assert code == (0 if phase in ("", "deltas") else -signal.SIGKILL), said.decode()
    return code


def curve(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def learnt(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    left_out = TIMED | ROUNDED | {"weight_version"}
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows]


async def test_a_run_trains_on_what_the_engines_sampled(tmp_path: Path, pair: SharedEngines) -> None:
    await run(tmp_path, "", "--connect", pair.anew(chunk_size=32))
    check_learnt(curve(tmp_path))
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.breadth
async def test_a_run_by_deltas_ends_in_the_checkpoint_of_one_by_whole_streams(
    tmp_path: Path, pair: SharedEngines
) -> None:
    """Steps in float32 change nearly all elements, so the run names the base of each delta."""
    by_deltas, whole = tmp_path / "deltas", tmp_path / "whole"
    await run(by_deltas, "deltas", "--connect", pair.anew(chunk_size=32))
    await run(whole, "", "--connect", pair.anew(chunk_size=32))
    assert learnt(curve(by_deltas)) == learnt(curve(whole))
    ours, theirs = (torch.load(each / "checkpoint.pt")["model"] for each in (by_deltas, whole))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def check_learnt(rows: list[dict[str, Any]]) -> None:
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert len({row["weights_digest"] for row in rows}) == 3  # it trained
    assert max(row["gap"] for row in rows) < 1e-5


@pytest.mark.breadth
@pytest.mark.parametrize("phases", [("update",), ("metrics", "rollout", "train", "checkpoint")], ids=" ".join)
async def test_a_killed_run_has_the_curve_of_an_undisturbed_one(
    tmp_path: Path, pair: SharedEngines, phases: tuple[str, ...]
) -> None:
    """The disturbed run shares a `seer` system of two engines, the other has a `static` one to itself."""
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    endpoint = pair.anew(chunk_size=32)
    for phase in (*phases, ""):
        await run(killed, phase, "--connect", endpoint)
    await run(undisturbed, "", "--instances", "1", "--set", "buffer.policy=static", "--set", *ONE_CORE)
    expected = curve(undisturbed)
    assert learnt(curve(killed)) == learnt(expected)
    check_learnt(expected)


@pytest.mark.breadth
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs the extra images")
async def test_a_run_on_prompts_with_images_is_on_policy(tmp_path: Path) -> None:
    """The trainer's logprobs are the engine's, before and after updates of the weights, the vision encoder's too."""
    await run(tmp_path, "", "--problems", "problems_images", "--instances", "1", "--set", *ONE_CORE)
    rows = curve(tmp_path)
    assert max(row["gap"] for row in rows) < 1e-5
    assert [row["corrected"] for row in rows] == [0, 0, 0]
    assert len({row["weights_digest"] for row in rows}) == 3
    assert sum(row["samples"] for row in rows) >= SIZES["responses"], (
        "some groups had right and wrong answers"
    )
    assert max(row["reward"] for row in rows) > 0.2, "no model that sees nothing comes so far"
