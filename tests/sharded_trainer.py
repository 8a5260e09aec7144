"""One rank of a trainer that shards its tensors: `python sharded_trainer.py FOLDER RANK RANKS ENDPOINT SECONDS`.

Prints the digest and the version that each update made live, and whether a delta was sent. The second one
waits SECONDS for its end.
"""

import asyncio
import sys

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from seer.client import RolloutClient, ShardedTensors, TorchRanks

SHAPES = {"a.weight": (7, 6), "b.weight": (1, 5), "c.weight": (640, 30), "d.bias": (9,), "e.scale": ()}


def whole(version: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a version, as one rank would have them. They differ little."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["d.bias"] = tensors["d.bias"].to(torch.bfloat16) * version
    tensors["c.weight"][::100] += version
    return tensors


def sharded(version: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    tensors = whole(version)
    placed = {
        "a.weight": Shard(0), "b.weight": Shard(0), "c.weight": Shard(1), "d.bias": Replicate(),
    }  # fmt: skip
    found = tensors | {name: distribute_tensor(tensors[name], mesh, [each]) for name, each in placed.items()}
    assert isinstance(found["b.weight"], DTensor)
    found["b.tied"] = found["b.weight"]
    return found


async def main(endpoint: str, seconds: float) -> None:
    async with RolloutClient(endpoint) as client:
        for version, patience in ((1, 60.0), (2, seconds)):
            shards = ShardedTensors(sharded(version), TorchRanks() if version == 1 else None)
            live = await client.update_weights(version, shards, timeout_seconds=patience)
            print(live.version, live.digest, client.weight_version, not client.deltas.last.why, flush=True)


if __name__ == "__main__":
    folder, rank, ranks, where, seconds = sys.argv[1:]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks)
    )
    asyncio.run(main(where, float(seconds)))
    torch.distributed.destroy_process_group()
