"""One rank of a trainer that shards its tensors: `python sharded_trainer.py FOLDER RANK RANKS ENDPOINT`.

Prints the digest and the version that each update made live, and whether a delta was sent.
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


async def main(endpoint: str) -> None:
    async with RolloutClient(endpoint) as client:
        for version in (1, 2):
            shards = ShardedTensors(sharded(version), TorchRanks() if version == 1 else None)
            live = await client.update_weights(version, shards, timeout_seconds=60)
            print(live.version, live.digest, client.weight_version, not client.deltas.last.why, flush=True)


if __name__ == "__main__":
    folder, rank, ranks, where = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    asyncio.run(main(where))
    torch.distributed.destroy_process_group()
