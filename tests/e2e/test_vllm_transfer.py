"""Weights by vLLM's NCCL transfer engines, to real engines on CPUs: NCCL and CUDA's streams are made up, no more."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_engines import MODEL, SharedEngines, tensors

from seer.client import RolloutClient, SamplingParams, VllmTransfer, WeightsRefused
from seer.common.weights import broadcast_group

MADE_UP = Path(__file__).parents[1] / "made_up_nccl"
sys.path.append(str(MADE_UP))
import made_up_nccl  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCALE = 1.02
BUCKET_BYTES = 100_000
SECONDS = 12.0
"""For each step; tests wait as long where one is to fail."""


@pytest.fixture(scope="module")
def engines() -> Iterator[SharedEngines]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(MADE_UP))
        for owner, name in made_up_nccl.owners():
            patched.setattr(owner, name, getattr(owner, name))  # put back at the end
        made_up_nccl.install()
        started = SharedEngines(
            MODEL, 2, "engine.in_place_updates=true", "engine.max_model_len=400", "engine.kv_blocks=400"
        )
        yield started
        started.close()


class Source:
    """A `WeightSource` of the shipped model's tensors, scaled; calls `at` before tensor `index` of the send."""

    def __init__(self, scale: float, index: int = -1, at: Callable[[], None] = lambda: None) -> None:
        self.tensors, self.index, self.at, self.passes = tensors(scale), index, at, 0

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        for index, pair in enumerate(self.tensors.items()):
            if (self.passes, index) == (2, self.index):
                self.at()
            yield pair


def transfer(source: Source) -> VllmTransfer:
    return VllmTransfer(source, bucket_bytes=BUCKET_BYTES, step_seconds=SECONDS)


async def roll(client: RolloutClient, wait: bool = True) -> tuple[list[list[int]], str]:
    """Return tokens, and the digest of their weights; `wait` for both engines."""
    async with asyncio.timeout(300):
        while wait and (len((status := await client.status()).instances) < 2 or status.quarantined):
            await asyncio.sleep(0.1)
    sampling = SamplingParams(max_tokens=40)
    rollout = await client.submit(
        [[1, 5, 9], [4, 4, 4]], n=2, sampling=sampling, rollout_number=0, repeat=True
    )
    groups = await rollout.result()
    (digest,) = {group.weights_digest for group in groups}
    return [response.token_ids.tolist() for group in groups for response in group.responses], digest


async def test_tokens_are_those_of_a_checked_update_and_failures_leave_the_weights_before(
    engines: SharedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RolloutClient(engines.anew(chunk_size=32)) as client:
        version, (before, _) = (await client.status()).weight_version, await roll(client)
        await client.update_weights(version + 1, tensors(SCALE))  # the checked way
        scaled, _ = await roll(client)
        assert scaled != before

        live = await client.update_weights(version + 2, transfer(Source(1.0)))
        assert not live.quarantined
        assert await roll(client) == (before, live.digest)

        wrong = Source(SCALE)
        name = min(wrong.tensors)
        wrong.tensors[name] = wrong.tensors[name][:-1]
        with pytest.raises(WeightsRefused, match=rf"engine-[01]: .*tensor {name} has shape"):
            await client.update_weights(version + 3, transfer(wrong))
        assert wrong.passes == 2
        assert await roll(client) == (before, live.digest)

        def lost() -> None:
            raise RuntimeError("the tensors are gone")

        await client.update_weights(version + 3, tensors(SCALE))
        with pytest.raises(WeightsRefused, match="the tensors are gone") as failed:
            await client.update_weights(version + 4, transfer(Source(1.0, 9, lost)))
        assert failed.value.reasons.keys() == {"engine-0", "engine-1", ""}
        assert (await roll(client))[0] == scaled

        def first(store: Any, names: Sequence[str], *rest: Any) -> Any:
            return gather(store, names[:1], *rest)

        gather = broadcast_group.gather
        with monkeypatch.context() as patched:
            patched.setattr(broadcast_group, "gather", first)
            live = await client.update_weights(version + 4, transfer(Source(1.0)))
        assert list(live.quarantined) == ["engine-1"]
        assert "came too late" in live.quarantined["engine-1"]
        assert await roll(client, wait=False) == (before, live.digest)
        live = await client.update_weights(version + 5, transfer(Source(SCALE)))
        assert not live.quarantined
        assert await roll(client) == (scaled, live.digest)
