"""What keys cost a rollout: tokens/s of two systems with real engines over TCP, with keys and without.

    python bench/services/curve_rollout.py --turns 7
    python bench/services/curve_rollout.py --turns 5 --max-tokens 16

Both are whole systems of processes on loopback with one engine each, and stay up; each turn has the same
rollout on one and then on the other, in changing order, and both must give the same tokens. Prints JSON:
medians of tokens/s, and the median and all values of the ratio, keys over none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import tempfile
import time
from pathlib import Path

from lib.hardware import machine
from lib.paths import EXAMPLE
from msgspec.structs import fields, replace
from tokenizers import Tokenizer

from seer.cli.keys import init
from seer.client import Prompt, RolloutClient, SamplingParams
from seer.common.config import Config, Endpoints, SecurityConfig, load
from seer.local.system import LocalSystem

READY_SECONDS = 600.0


def tcp() -> Endpoints:
    """Return endpoints at free ports of the loopback."""
    names = [field.name for field in fields(Endpoints) if field.name != "bind_host"]
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        return Endpoints(
            **{
                name: f"tcp://127.0.0.1:{each.getsockname()[1]}"
                for name, each in zip(names, taken, strict=True)
            }
        )


def owner_keys(folder: Path) -> SecurityConfig:
    """Return settings by which every process has the operator's key: whose it is costs nothing."""
    init(folder)
    peers = folder / "public" / "peers"
    public = dict(line.split()[:2] for line in peers.read_text().splitlines())["operator:owner"]
    return SecurityConfig(key=str(folder / "operator-owner.key"), peers=str(peers), server=public)


async def rolled(
    client: RolloutClient, prompts: list[Prompt], options: argparse.Namespace, number: int
) -> tuple:
    """Return tokens/s of a rollout, and its tokens."""
    began = time.perf_counter()
    rollout = await client.submit(
        prompts, n=options.n, sampling=SamplingParams(max_tokens=options.max_tokens), rollout_number=number
    )
    groups = sorted(await rollout.result(), key=lambda group: group.prompt_id)
    seconds = time.perf_counter() - began
    tokens = [response.token_ids.tolist() for group in groups for response in group.responses]
    return sum(map(len, tokens)) / seconds, tokens


async def main() -> None:
    """Start both, run turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[: options.prompts]
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
    texts = [json.loads(line)["prompt"] for line in lines]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    prompts = [Prompt(str(at), token_ids=each) for at, each in enumerate(ids)]
    settings = [f"shared.model={EXAMPLE / 'model'}", "pool.kind=none"]
    config: Config = load(None, {}, settings)
    with tempfile.TemporaryDirectory() as folder:
        sides = {"none": SecurityConfig(), "keys": owner_keys(Path(folder) / "keys")}
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        async with contextlib.AsyncExitStack() as stack:
            clients = {}
            for side, security in sides.items():
                own = replace(config, endpoints=tcp(), security=security)
                system = await stack.enter_async_context(LocalSystem(own, 1, private=False))
                client = RolloutClient(system.endpoint, security=security, connect_seconds=READY_SECONDS)
                clients[side] = await stack.enter_async_context(client)
            for turn in range(-1, options.turns):  # the first warms up
                told = {}
                for side in sorted(sides, reverse=turn % 2 == 0):
                    speed, told[side] = await rolled(clients[side], prompts, options, turn + 1)
                    if turn >= 0:
                        speeds[side].append(speed)
                assert told["none"] == told["keys"]
    ratios = [with_keys / without for with_keys, without in zip(speeds["keys"], speeds["none"], strict=True)]
    report = {
        "machine": machine("zmq", "vllm"),
        "tokens_per_second": {side: round(statistics.median(each)) for side, each in speeds.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
    }
    print(json.dumps(report | {"options": vars(options)}, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
