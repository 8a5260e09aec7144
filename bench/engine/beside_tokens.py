"""What it costs to ask for more than tokens: rollouts of a tiny mixture, with and without.

    python bench/engine/beside_tokens.py --asks experts --layers 8 --turns 5
    python bench/engine/beside_tokens.py --asks top_logprobs --top 5 --vocab 32000
    python bench/engine/beside_tokens.py --asks streams --apart

Two systems with one engine each are up and take turns: the rollouts of one ask for which experts tokens went
to (`engine.routed_experts`), for alternatives of tokens, or that every second prompt is streamed. Prints
JSON: bytes of ids a token, medians of tokens/s, of the CPU us a chunk of the buffer and a token of engine and
client, and of the turns' ratios, with over without; for streams also the seconds until the prompts end that
nobody streams. Tokens must be equal. `--apart` gives the engine the last core alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.hardware import machine
from lib.paths import EXAMPLE
from lib.processes import cpu_seconds, pin

from seer.client import Group, Prompt, RolloutClient, SamplingParams
from seer.common.config import load
from seer.local.system import LocalSystem

SIDES = ("without", "with")
ASKS = ("experts", "top_logprobs", "streams")


def make(folder: Path, layers: int, vocab: int) -> None:
    """Write a random Qwen3-MoE, 32 experts of which a token takes 8; text is the shipped model's."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    torch.manual_seed(11)
    config = Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        num_experts=32, num_experts_per_tok=8, moe_intermediate_size=64, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((EXAMPLE / "model" / name).read_bytes())


class Side:
    """One system, whose rollouts ask for something or not."""

    def __init__(self, asks: str, top: int, client: RolloutClient, system: LocalSystem) -> None:
        self._streams = asks == "streams"
        self._first = 0 if asks == "experts" else None
        self._top = top if asks == "top_logprobs" else None
        self._client, self._system = client, system

    async def turn(self, number: int, prompts: int, tokens: int) -> dict[str, Any]:
        """Run one rollout of eight responses to each prompt."""
        lines = (EXAMPLE / "prompts_512.jsonl").read_text().splitlines()[:prompts]
        asked = [Prompt(str(place), text=json.loads(line)["prompt"]) for place, line in enumerate(lines)]
        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, routed_experts_from=self._first, top_logprobs=self._top
        )
        rollout, whole = self._client.open_rollout(rollout_number=number), []

        async def one(place: int, prompt: Prompt) -> Group:
            stream = self._streams and place % 2 == 0
            flight = rollout.submit(prompt, n=8, sampling=sampling, stream=stream)
            if stream:
                async for _ in flight.tokens():
                    pass
            group = await flight.result()
            if place % 2:
                whole.append(time.perf_counter() - begun)
            return group

        pids = {**self._system.pids, "client": os.getpid()}
        begun, before = time.perf_counter(), {name: cpu_seconds(pid) for name, pid in pids.items()}
        groups = await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(asked)))
        seconds = time.perf_counter() - begun
        cpu = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        rollout.close()
        responses = [response for group in groups for response in group.responses]
        made = sum(len(response.token_ids) for response in responses)
        return {
            "tokens": [response.token_ids.tolist() for response in responses],
            "tokens_per_s": made / seconds,
            "seconds_of_others": statistics.mean(whole) if whole else 0.0,
            "buffer_us_a_chunk": 1e6 * cpu["buffer"] / sum(group.chunks for group in groups),
            "engine_us_a_token": 1e6 * cpu["engine-0"] / made,
            "client_us_a_token": 1e6 * cpu["client"] / made,
            "bytes": sum(each.routed_experts.nbytes for each in responses if each.routed_experts is not None),
            "read": sum(len(each.routed_experts) for each in responses if each.routed_experts is not None),
        }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Let both sides run the same turns."""
    cores = os.sched_getaffinity(0)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        make(folder, args.layers, args.vocab)
        sides = {}
        for name in SIDES:
            config = load(None, {}, [
                f"shared.model={folder}", "engine.max_model_len=1024", "engine.kv_cache_gib=1",
                "pool.kind=none", f"engine.max_num_seqs={8 * args.prompts}", "drafts.source=off",
                "log.level=warning", f"buffer.chunk_size={args.chunk}",
                f"engine.routed_experts={str(name == 'with' and args.asks == 'experts').lower()}",
                f"engine.cpu_cores={max(cores) if args.apart else ''}",
            ])  # fmt: skip
            system = await stack.enter_async_context(LocalSystem(config, 1))
            if args.apart:
                others = (pid for name, pid in system.pids.items() if not name.startswith("engine"))
                pin([os.getpid(), *others], min(cores))
            client = RolloutClient(system.endpoint, tokenizer=str(folder))
            asks = args.asks if name == "with" else ""
            sides[name] = Side(asks, args.top, await stack.enter_async_context(client), system)
        turns = []
        for number in range(-1, args.turns):
            order = SIDES if number % 2 else SIDES[::-1]
            turn = {name: await sides[name].turn(number + 1, args.prompts, args.tokens) for name in order}
            if turn["with"].pop("tokens") != turn["without"].pop("tokens"):
                raise SystemExit(f"turn {number}: tokens differ")
            turns.append(turn)
    turns = turns[1:]  # the first warms up
    report: dict[str, Any] = {}
    if read := turns[0]["with"]["read"]:
        report["bytes_a_token"] = round(turns[0]["with"]["bytes"] / read, 1)
    for figure in [name for name in turns[0]["with"] if name not in ("bytes", "read")]:
        for name in SIDES:
            report[f"{figure}_{name}"] = round(statistics.median(turn[name][figure] for turn in turns), 1)
        ratios = [turn["with"][figure] / turn["without"][figure] for turn in turns]
        report[f"{figure}_ratio"] = round(statistics.median(ratios), 3)
        report[f"{figure}_ratios"] = [round(ratio, 3) for ratio in sorted(ratios)]
    return report


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--asks", choices=ASKS, default=ASKS[0])
    parser.add_argument("--top", type=int, default=5, help="alternatives of a token")
    parser.add_argument("--vocab", type=int, default=66)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8, help="with eight responses each")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--apart", action="store_true", help="a core for the engine alone")
    args = parser.parse_args()
    report = asyncio.run(measure(args))
    print(json.dumps({"machine": machine("torch", "vllm"), "asked": vars(args), **report}, indent=1))


if __name__ == "__main__":
    main()
