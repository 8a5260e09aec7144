"""What a buffer that is killed in mid-rollout costs, with chunks kept and without; and what keeping costs.

Runs the same rollout three times on two engines: left alone, and with the buffer killed at half of the
tokens, without and with `buffer.keep_chunks`. `again` are tokens that engines generated beyond those of the
responses. Then times the keeping itself, alone, on one core. Prints JSON.

    cd examples/countdown; python ../../bench/services/buffer_killed.py --model model --prompts prompts.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from lib.hardware import machine

from seer.client import RolloutClient, SamplingParams
from seer.common.config import load
from seer.local.system import LocalSystem
from seer.services.buffer.events import Weights
from seer.services.buffer.log.chunk_file import Output
from seer.services.buffer.log.kept_chunks import KeptChunks, SoFar
from seer.services.engine.server import STATUS_SECONDS

GROUP = 8
CHUNK = 512
PROMPT = np.arange(100, dtype=np.int32)


async def roll(options: argparse.Namespace, folder: str, kill_at: int | None, keep: bool) -> dict[str, Any]:
    """Run the rollout; return its tokens, seconds, and how many tokens were generated again."""
    settings = [
        f"shared.model={options.model}", f"engine.max_model_len={options.max_tokens + 128}", "pool.kind=none",
        f"buffer.log={folder}", f"buffer.keep_chunks={str(keep).lower()}", "buffer.chunk_size=64",
        "engine.max_num_seqs=32",
    ]  # fmt: skip
    lines = options.prompts.read_text().splitlines()[: options.groups]
    async with (
        LocalSystem(load(None, {}, settings), 2) as system,
        RolloutClient(system.endpoint, tokenizer=options.model) as client,
    ):
        sampling = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
        begun = time.monotonic()
        rollout = await client.submit(
            [json.loads(line)["prompt"] for line in lines], n=GROUP, sampling=sampling
        )
        done = asyncio.create_task(rollout.result())
        while kill_at is not None and not done.done():
            await asyncio.wait([done], timeout=0.1)
            if rollout.progress and rollout.progress.tokens >= kill_at:
                os.kill(system.pids["buffer"], signal.SIGKILL)
                break
        groups = await done
        seconds = time.monotonic() - begun
        await asyncio.sleep(2 * STATUS_SECONDS)  # the engines' last status
        stats = [instance.stats for instance in (await client.status()).instances]
    tokens = [response.token_ids.tolist() for group in groups for response in group.responses]
    again = sum(each.generated_tokens for each in stats) - sum(map(len, tokens))
    return {"tokens": tokens, "seconds": round(seconds, 2), "again": again}


def keeping(chunks: int) -> dict[str, Any]:
    """Return what it takes to keep chunks of 512 tokens, and to read them again."""
    rng = np.random.default_rng(0)
    tokens, logprobs = rng.integers(0, 9, CHUNK).astype(np.int32), rng.random(CHUNK).astype(np.float32)
    chunk = Output(tokens, logprobs, ("", ""))
    so_far = SoFar(1, PROMPT, Weights(0, "d"), {0: chunk})
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptChunks(folder, 1.0, 0.0, lambda _: so_far)
        kept.open("r", "p")
        start = time.thread_time()
        for number in range(chunks):
            kept.keep("r/p", number % 64, chunk)
            kept.flush()
        writing = time.thread_time() - start
        kept.close()
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        start = time.thread_time()
        later = KeptChunks(folder, 1.0, 0.0, lambda _: so_far)
        later.open("r", "p")
        later.offer("r", "p", 1, PROMPT)
        later.restore("r/p")
        reading = time.thread_time() - start
    total = chunks * CHUNK
    return {
        "microseconds_a_chunk": round(1e6 * writing / chunks, 1),
        "of_a_core_at_100000_tokens_per_s": round(writing / total * 100_000, 5),
        "bytes_a_token": round(size / total, 2),
        "read_tokens_per_s": round(total / reading),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=20_000, help="for the keeping alone")
    options = parser.parse_args()
    half = options.groups * GROUP * options.max_tokens // 2
    runs = {}
    for name, kill_at, keep in (
        ("alone", None, True),
        ("killed", half, False),
        ("killed_and_kept", half, True),
    ):
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = asyncio.run(roll(options, folder, kill_at, keep))
    tokens = [run.pop("tokens") for run in runs.values()]
    same = all(each == tokens[0] for each in tokens)
    report = {
        "machine": machine("vllm", "torch"),
        "tokens": sum(map(len, tokens[0])),
        "same_tokens": same,
        **runs,
    }
    print(json.dumps(report | {"keeping": keeping(options.chunks)}, indent=1))
    if not same:
        raise SystemExit("tokens differ")


if __name__ == "__main__":
    main()
