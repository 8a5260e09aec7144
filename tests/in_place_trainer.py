"""A trainer that broadcasts the model's tensors, scaled, and stops or dies at a point of its choice.

python in_place_trainer.py ENDPOINT MODEL SCALE POINT SIGNAL STEP_SECONDS
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from safetensors.torch import load_file

from seer.client import Broadcast, RolloutClient
from seer.common.weights import broadcast_group

POINTS = ("before", "middle", "after")
BUCKET_BYTES = 100_000


def main() -> None:
    endpoint, model, scale, point, name, seconds = sys.argv[1:]
    tensors = {
        key: value * float(scale) for key, value in load_file(Path(model) / "model.safetensors").items()
    }
    source = Broadcast(tensors, bucket_bytes=BUCKET_BYTES, step_seconds=float(seconds))

    def end() -> None:
        os.kill(os.getpid(), signal.Signals[name])

    gather, group = broadcast_group.gather, broadcast_group.BroadcastGroup
    sent = 0

    def gather_or_end(*arguments):
        if point == "before":
            end()
        return gather(*arguments)

    class Ending(group):
        def broadcast(self, data, stopped):
            nonlocal sent
            sent += 1
            if point == "middle" and sent == 3:
                end()
            super().broadcast(data, stopped)

        def close(self):
            if point == "after":
                end()
            super().close()

    broadcast_group.gather, broadcast_group.BroadcastGroup = gather_or_end, Ending

    async def update() -> None:
        async with RolloutClient(endpoint, name="trainer") as client:
            version = (await client.status()).weight_version
            await client.update_weights(version + 1, source)

    asyncio.run(update())


if __name__ == "__main__":
    main()
