"""How often images travel: from the trainer to the buffer, and from there to engines.

A buffer and replay engines, whose steps take no time, run as processes; this one is the trainer. Each prompt
shows an image of its own, of `--patches` patches as Qwen2-VL has them, and gets n responses in chunks, which
move between engines. *Inlined* is what would travel if every chunk had the pixels of its image. Prints JSON.

    python bench/services/images.py --prompts 64 --n 8 --tokens 2048 --chunk 256 --patches 1024
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import numpy as np
from lib.hardware import machine

from seer.client import Placed, Prompt, RolloutClient, SamplingParams, prepared_image
from seer.common.config import load
from seer.local.system import LocalSystem

PATCH_NUMBERS = 1176
"""Numbers of a patch: two frames of 14 by 14 pixels with three colours."""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--patches", type=int, default=1024)
    parser.add_argument("--instances", type=int, default=2)
    args = parser.parse_args()
    side = int(args.patches**0.5) // 2 * 2
    prompts = [prompt(number, side) for number in range(args.prompts)]
    size = prompts[0].images[0].image.size
    settings = [
        "engine.backend=replay", "engine.replay.step_seconds=0", "engine.replay.row_seconds=0",
        "engine.kv_blocks=200000", "engine.max_num_seqs=256", "log.level=warning",
        f"buffer.chunk_size={args.chunk}", "buffer.policy=migrate",
    ]  # fmt: skip
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    async with (
        LocalSystem(load(None, {}, settings), args.instances) as system,
        RolloutClient(system.endpoint) as client,
    ):
        began = time.perf_counter()
        await (await client.submit(prompts, n=args.n, sampling=sampling)).result()
        seconds = time.perf_counter() - began
        counters = (await client.status()).counters
    print(json.dumps({
        "prompts": args.prompts, "n": args.n, "instances": args.instances, "image_bytes": size,
        "chunks": counters["chunks"], "migrations": counters["migrations"], "seconds": round(seconds, 1),
        "images_to_the_buffer": counters["image_received_bytes"] / size,
        "images_to_engines": counters["image_sent_bytes"] / size,
        "inlined": counters["chunks"],
        "machine": machine("zmq", "msgspec"),
    }, indent=1))  # fmt: skip


def prompt(number: int, side: int) -> Prompt:
    """Return a prompt of an image alone; `side`: patches."""
    pixels = np.full((side * side, PATCH_NUMBERS), number, np.float32)
    image = prepared_image("image", pixel_values=pixels, image_grid_thw=np.array([[1, side, side]]))
    length = side * side // 4
    return Prompt(str(number), token_ids=[7] * length, images=[Placed(image, 0, length)])


if __name__ == "__main__":
    asyncio.run(main())
