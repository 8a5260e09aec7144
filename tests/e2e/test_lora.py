"""LoRA adapters on real engines: one that is sent alone is as good as the model that PEFT merges."""

import asyncio
import importlib.util
import os
import shutil
import signal
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("peft") is None:
    pytest.skip("needs the engine extra, and PEFT", allow_module_level=True)

from lora import adapt, save_adapter, save_merged
from peft import get_peft_model_state_dict
from shared_engines import JOIN_SECONDS, MODEL, SharedEngines, texts

from seer.client import LoraAdapter, RolloutClient, SamplingParams, WeightsRefused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def roll(client: RolloutClient) -> tuple[list[list[int]], tuple[int, str]]:
    sampling = SamplingParams(max_tokens=60)
    rollout = await client.submit(texts(4), n=2, sampling=sampling, rollout_number=0, repeat=True)
    groups = await rollout.result()
    (weights,) = {(group.weight_version, group.weights_digest) for group in groups}
    return [response.token_ids.tolist() for group in groups for response in group.responses], weights


async def test_an_adapter_is_as_good_as_the_merged_model(tmp_path: Path, pair: SharedEngines) -> None:
    one, two = adapt(MODEL, seed=1, size=0.06), adapt(MODEL, seed=2, size=0.06, r=4, use_rslora=True)
    folder = save_adapter(one, tmp_path / "one")
    tensors, config = get_peft_model_state_dict(two), two.peft_config["default"]
    merged = [save_merged(each, MODEL, tmp_path / name) for name, each in (("m1", one), ("m2", two))]
    async with RolloutClient(pair.anew(chunk_size=32), tokenizer=MODEL) as client:
        before, (version, digest) = await roll(client)

        async def after(source: object) -> tuple[list[list[int]], str]:
            nonlocal version
            version += 1
            live = await client.update_weights(version, source)
            assert not live.quarantined
            tokens, weights = await roll(client)
            assert weights == (version, live.digest)
            return tokens, live.digest

        expected = [(await after(each))[0] for each in merged]
        assert before not in expected
        assert expected[0] != expected[1]
        first = await after(LoraAdapter(folder))
        second = await after(LoraAdapter(tensors, config, base=MODEL))  # on the base, not on the first
        again = await after(LoraAdapter(folder, base=digest))
        assert (first[0], second[0]) == (expected[0], expected[1])
        assert again == first

        broken = tmp_path / "broken"
        shutil.copytree(folder, broken)
        whole = (broken / "adapter_model.safetensors").read_bytes()
        (broken / "adapter_model.safetensors").write_bytes(whole[:-4])
        refused = [
            (LoraAdapter(broken), r"engine-[01]: .*adapter_model\.safetensors"),
            (LoraAdapter(folder, base=merged[0]), "the adapter is for a base with digest"),
            (LoraAdapter(tensors | {"base_model.model.x": next(iter(tensors.values())).clone()}, config, base=MODEL), "lacks"),
        ]  # fmt: skip
        for source, why in refused:
            with pytest.raises(WeightsRefused, match=why):
                await client.update_weights(version + 1, source)
        assert await roll(client) == (expected[0], (version, first[1]))

        streamed = await after(LoraAdapter(tensors, config, base=MODEL))
        killed = pair.system.pids["engine-0"]
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(JOIN_SECONDS):
            while (
                pair.system.pids.get("engine-0", killed) == killed
                or len((await client.status()).instances) < 2
            ):
                await asyncio.sleep(0.1)
        assert streamed == second
        assert await roll(client) == (second[0], (version, second[1]))  # the restarted engine took it, too
        assert await after(MODEL) == (before, digest)
