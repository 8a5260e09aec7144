"""Weight updates of the real engine: after one, a system is as one that was started with those weights."""

import asyncio
import contextlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from living import resident
from safetensors.torch import load_file, save_file
from shared_engines import MODEL, ONE_CORE, SharedEngines, changed_model, texts

from seer.client import MooncakeSource, Prompt, RolloutClient, RolloutFailed, SamplingParams, WeightsRefused
from seer.common.config import load
from seer.local.system import LocalSystem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDTH = 10_000
"""Of the middle of each layer's perceptron: KV stays as small as the shipped model's."""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_model(tmp_path_factory.mktemp("changed") / "model")


def system(model: Path, ranks: int = 1) -> LocalSystem:
    settings = {"shared.model": model, "engine.max_model_len": 400, "engine.kv_blocks": 200}
    settings |= {"engine.tensor_parallel": ranks, "buffer.chunk_size": 32}
    cores = ONE_CORE if ranks == 1 else ()
    return LocalSystem(load(None, {}, [*cores, *(f"{key}={value}" for key, value in settings.items())]), 1)


async def roll(client: RolloutClient) -> tuple[list[list[int]], list[list[float]], tuple[int, str]]:
    sampling = SamplingParams(max_tokens=100)
    rollout = await client.submit(texts(6), n=2, sampling=sampling, rollout_number=0, repeat=True)
    groups = await rollout.result()
    responses = [response for group in groups for response in group.responses]
    (weights,) = {(group.weight_version, group.weights_digest) for group in groups}
    return [r.token_ids.tolist() for r in responses], [r.logprobs.tolist() for r in responses], weights


def assert_same(got: Sequence[Any], expected: Sequence[Any]) -> None:
    """Equal tokens; logprobs to rounding, since batches differ."""
    assert got[0] == expected[0]
    for ours, theirs in zip(got[1], expected[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.fixture(scope="module")
def expected(changed: Path) -> tuple[list[list[int]], list[list[float]]]:
    """What a system says that was started with the other weights."""

    async def fresh() -> tuple[list[list[int]], list[list[float]]]:
        async with system(changed) as started, RolloutClient(started.endpoint, tokenizer=changed) as client:
            return (await roll(client))[:2]

    return asyncio.run(fresh())


async def test_an_updated_system_is_as_a_fresh_one(
    changed: Path, expected: tuple[list[list[int]], list[list[float]]], pair: SharedEngines
) -> None:
    async with RolloutClient(pair.anew(chunk_size=32), tokenizer=MODEL) as client:
        *before, (version, digest) = await roll(client)
        live = await client.update_weights(version + 1, changed)
        assert not live.quarantined
        *after, seen = await roll(client)  # the same prompts: their prefixes were cached
        assert_same(after, expected)
        assert seen == (version + 1, live.digest)
        assert after[0] != before[0]

        wrong = changed.parent / "wrong"
        shutil.copytree(changed, wrong)
        whole = (wrong / "model.safetensors").read_bytes()
        (wrong / "model.safetensors").write_bytes(whole[:-4])
        with pytest.raises(WeightsRefused, match=r"engine-[01]: .*model\.safetensors"):
            await client.update_weights(version + 2, wrong)
        assert (await roll(client))[0] == after[0]

        back = await client.update_weights(version + 2, MODEL)
        assert back.digest == digest
        assert_same((await roll(client))[:2], before)

        tensors = load_file(changed / "model.safetensors")
        name = min(tensors)
        for bad, why in (
            ({key: value for key, value in tensors.items() if key != name}, f"lacks tensor {name}"),
            (tensors | {name: tensors[name][:-1]}, f"tensor {name} has shape"),
            (tensors | {name: tensors[name].half()}, f"tensor {name} has type F16"),
            (tensors | {"more": tensors[name]}, "has a tensor more that the model lacks"),
        ):
            # A stream of another size is not even copied.
            told = rf"engine-[01]: .*({re.escape(why)}|the model's tensors have)"
            with pytest.raises(WeightsRefused, match=told):
                await client.update_weights(version + 3, {key: value.clone() for key, value in bad.items()})
        streamed = await client.update_weights(version + 3, tensors)
        assert streamed.digest == live.digest
        assert_same((await roll(client))[:2], expected)


async def test_fifty_deltas_are_as_one_whole_update(pair: SharedEngines) -> None:
    """A step changes one element in a hundred of every tensor, as steps in bfloat16 do."""
    tensors = load_file(MODEL / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    async with RolloutClient(pair.anew(chunk_size=32), tokenizer=MODEL) as client:
        *before, (version, _) = await roll(client)
        await client.update_weights(version + 1, tensors)
        for step in range(version + 2, version + 52):
            for tensor in tensors.values():
                at = torch.randint(0, tensor.numel(), (1 + tensor.numel() // 100,), generator=random)
                tensor.view(-1)[at] *= 1.05
            live = await client.update_weights(step, tensors)
            assert not live.quarantined
            assert client.deltas.last.sent < 0.05 * client.deltas.last.of
        *by_deltas, seen = await roll(client)
        assert seen == (version + 51, live.digest)
        assert by_deltas[0] != before[0]
    async with RolloutClient(pair.anew(chunk_size=32), tokenizer=MODEL, deltas=False) as client:
        whole = await client.update_weights(version + 100, tensors)
        assert whole.digest == live.digest
        assert_same((await roll(client))[:2], by_deltas)


async def test_weights_that_engines_read_are_as_good_as_a_folder(changed: Path, pair: SharedEngines) -> None:
    pytest.importorskip("mooncake.engine", reason="needs Mooncake and libibverbs1", exc_type=ImportError)
    async with RolloutClient(pair.anew(chunk_size=32), tokenizer=MODEL) as client:
        version = (await client.status()).weight_version
        live = await client.update_weights(version + 1, changed)
        expected = (await roll(client))[:2]
        source = MooncakeSource(load_file(MODEL / "model.safetensors"))
        await client.update_weights(version + 2, source)
        assert (await roll(client))[0] != expected[0]
        source.tensors = load_file(changed / "model.safetensors")
        held = await client.update_weights(version + 3, source)
        assert not held.quarantined
        assert held.digest == live.digest
        assert_same((await roll(client))[:2], expected)


@pytest.mark.breadth
async def test_two_ranks_take_new_weights_too(
    changed: Path, expected: tuple[list[list[int]], list[list[float]]]
) -> None:
    async with system(MODEL, ranks=2) as started, RolloutClient(started.endpoint, tokenizer=MODEL) as client:
        await roll(client)
        assert not (await client.update_weights(1, changed)).quarantined
        assert (await roll(client))[0] == expected[0]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the shipped tokenizer and random weights, of as many megabytes as are seen in a process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(MODEL, folder)
    config = AutoConfig.from_pretrained(folder, intermediate_size=WIDTH)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


async def test_a_sleeping_engine_gives_its_memory_back(wide: Path) -> None:
    settings = ["engine.kv_blocks=8000", "engine.max_model_len=400", f"shared.model={wide}", *ONE_CORE]
    weights, kv = (wide / "model.safetensors").stat().st_size, 500 * 2**20
    some = weights // 3
    async with (
        LocalSystem(load(None, {}, settings), 1) as started,
        RolloutClient(started.endpoint, tokenizer=wide) as client,
    ):
        pid = started.pids["engine-0"]
        *before, _ = await roll(client)
        awake = resident(pid)
        await client.sleep()
        kept = resident(pid)  # with weights
        assert kept < awake - kv
        await client.wake()
        assert resident(pid) > kept + kv
        assert_same((await roll(client))[:2], before)  # the same prompts: their prefixes were cached
        await client.sleep(level=2)
        dropped = resident(pid)
        assert dropped < kept - weights + some
        await client.wake(tags=["weights"])
        assert resident(pid) < kept + some
        tensors = load_file(wide / "model.safetensors")
        name = "model.embed_tokens.weight"
        await client.update_weights(1, tensors | {name: tensors[name] * 1.5})
        assert dropped + weights - some < resident(pid) < kept + kv / 2  # loaded, while KV is still free
        await client.wake(tags=["kv_cache"])
        assert resident(pid) > kept + kv
        assert (await roll(client))[0] != before[0]


async def test_engines_that_dropped_their_weights_are_as_those_that_never_slept(
    changed: Path, expected: tuple[list[list[int]], list[list[float]]], pair: SharedEngines
) -> None:
    async with RolloutClient(pair.anew(chunk_size=32), tokenizer=MODEL) as client:
        await forgets_and_loads(client, changed, expected)


@pytest.mark.breadth
@pytest.mark.ranks
async def test_two_ranks_that_dropped_their_weights_too(
    changed: Path, expected: tuple[list[list[int]], list[list[float]]]
) -> None:
    async with system(MODEL, ranks=2) as started, RolloutClient(started.endpoint, tokenizer=MODEL) as client:
        await forgets_and_loads(client, changed, expected)


async def forgets_and_loads(client: RolloutClient, changed: Path, expected: Sequence[Any]) -> None:
    """Check that tokens are right after each way out of sleep at level 2."""
    *before, (version, _) = await roll(client)
    await client.sleep(level=2)
    await (
        client.wake()
    )  # the weights that were live: those that engines were started with, or the last update's
    assert_same((await roll(client))[:2], before)
    await client.sleep(level=2)
    await client.wake(tags=["weights"])
    live = await client.update_weights(version + 1, load_file(changed / "model.safetensors"))
    assert not live.quarantined
    later = asyncio.create_task(roll(client))
    await asyncio.sleep(1)
    assert not later.done()
    await client.wake(tags=["kv_cache"])
    assert_same((await later)[:2], expected)
    await client.sleep(level=2)
    await client.wake()  # a stream, from the spool
    assert_same((await roll(client))[:2], expected)


HOSTILE = 40
"""A token whose values overflow under the weights of `overflowing`: as others, it is read by the first layer."""


def overflowing(folder: Path, everywhere: bool) -> Path:
    """Return the shipped model with finite weights that overflow: in every row, or where `HOSTILE` is read."""
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    if everywhere:
        tensors["model.norm.weight"].fill_(3e38)
    tensors["model.embed_tokens.weight"][:, 0] = 0.0
    tensors["model.embed_tokens.weight"][HOSTILE, 0] = 1000.0
    tensors["model.layers.0.self_attn.v_proj.weight"][:, 0] = 3e38
    save_file(tensors, folder / "model.safetensors")
    return folder


async def ends(
    client: RolloutClient, prompts: dict[str, list[int]]
) -> tuple[dict[str, list[list[int]]], dict[str, str]]:
    """Submit prompts; return the responses of each that has some, and why each of the others failed."""
    sampling = SamplingParams(max_tokens=90, temperature=1.1, ignore_eos=True, logit_bias={HOSTILE: -100.0})
    asked = [Prompt(name, token_ids=tokens) for name, tokens in prompts.items()]
    rollout = await client.submit(asked, n=3, sampling=sampling, rollout_number=0, repeat=True)
    found: dict[str, list[list[int]]] = {}
    with contextlib.suppress(RolloutFailed):
        async for group in rollout:
            found[group.prompt_id] = [each.token_ids.tolist() for each in group.responses]
    return found, rollout.failures


async def test_finite_weights_that_overflow_fail_prompts_by_name_and_harm_nothing_else(
    pair: SharedEngines, tmp_path: Path
) -> None:
    shared = [3 + i % 30 for i in range(64)]
    good = {f"good-{i}": [*shared, 5 + i] for i in range(6)}
    hostile = {"hostile-0": [*shared, HOSTILE], "hostile-1": [HOSTILE, *shared], "hostile-2": [9, HOSTILE, 9]}
    async with RolloutClient(pair.anew()) as client:
        pids = pair.system.pids
        first, _ = await ends(client, good | hostile)
        assert first.keys() == good.keys() | hostile.keys()
        live = (await client.status()).weight_version

        await client.update_weights(live + 1, overflowing(tmp_path / "rows", False))
        alone, problems = await ends(client, good)
        assert (alone.keys(), problems) == (good.keys(), {})
        beside, problems = await ends(client, good | hostile)
        assert beside == alone
        assert problems.keys() == hostile.keys()
        for name, problem in problems.items():
            why = rf"/{name}#\d: no token can be sampled at position .* not numbers .* weight version {live + 1}$"
            assert re.search(why, problem)

        await client.update_weights(live + 2, overflowing(tmp_path / "all", True))
        none, problems = await ends(client, good)
        assert (none, problems.keys()) == ({}, good.keys())

        await client.update_weights(live + 3, MODEL)
        assert (await ends(client, good | hostile))[0] == first
        assert pair.system.pids == pids
        assert not (await client.status()).counters["lost"]
