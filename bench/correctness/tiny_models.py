"""Which families of models keep the promise on this machine: `seer verify` of tiny random ones; prints JSON.

Each family's model is made anew from its class in transformers: two layers, 66 tokens, seconds. Its
tokenizer and prompts are those of the shipped model. docs/models.md says what ran.

    python bench/correctness/tiny_models.py --families llama qwen3-moe --matrix chunk-16,drafts-random
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.hardware import machine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "countdown"

SIZES: dict[str, Any] = {
    "vocab_size": 66,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Ten times the usual: distributions that are neither flat nor certain.
    "initializer_range": 0.2,
}

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def llama() -> PreTrainedModel:
    """Return plain attention and a dense network."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=32))


def llama_wide() -> PreTrainedModel:
    """Return one whose layers are made of blocks of 128, in which some methods quantize weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes, head_dim=32))


def tied() -> PreTrainedModel:
    """Return one whose output layer is its embedding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES | {"tie_word_embeddings": True}, head_dim=32))


def qwen3_moe() -> PreTrainedModel:
    """Return plain attention, and experts in each layer."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32))


def deepseek() -> PreTrainedModel:
    """Return latent attention (MLA), a dense layer, and one of routed and shared experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = SIZES | {"num_key_value_heads": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    config = DeepseekV3Config(
        **sizes, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1,
        topk_method="noaux_tc", q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def gemma3() -> PreTrainedModel:
    """Return layers that see 64 tokens, and layers that see all: two groups of KV."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=64, layer_types=layers))


def gpt_oss() -> PreTrainedModel:
    """Return layers as Gemma's, with attention sinks and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    layers = ["sliding_attention", "full_attention"]
    config = GptOssConfig(
        **SIZES,
        head_dim=32,
        sliding_window=64,
        layer_types=layers,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return GptOssForCausalLM(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-wide": llama_wide,
    "qwen3-tied": tied,
    "qwen3-moe": qwen3_moe,
    "deepseek": deepseek,
    "gemma3": gemma3,
    "gpt-oss": gpt_oss,
}


def make(family: str, folder: Path) -> None:
    """Write a random model of the family into a new folder."""
    import torch

    torch.manual_seed(11)
    FAMILIES[family]().float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / "model" / name, folder)


def verify(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the matrix; return the exit code and, of each cell, what was found."""
    out = model.with_suffix(".json")
    prompts = model.with_suffix(".jsonl")
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[: args.prompts]
    prompts.write_text("\n".join(lines))
    settings = ["engine.max_model_len=200", *args.sets]
    command = [
        sys.executable, "-m", "seer.cli.main", "verify", prompts, "--model", model, "--json", out,
        "--matrix", args.matrix, "-n", args.n, "--max-tokens", args.max_tokens, "--min-tokens", 1,
        *(part for each in settings for part in ("--set", each)),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=args.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {args.seconds:g} s"}
    print(done.stderr[-4000:], done.stdout, file=sys.stderr, flush=True)
    if not out.exists():
        return {"exit": done.returncode, "error": done.stderr.strip().splitlines()[-1:]}
    cells = json.loads(out.read_text())["cells"]
    found = [{key: cell[key] for key in ("name", "error", "unmet", "bug", "numeric")} for cell in cells]
    for cell, told in zip(found, cells, strict=True):
        compared = told["comparison"] or {}
        cell |= {name: compared.get(name, 0) for name in ("tokens", "routes", "other_routes")}
    return {"exit": done.returncode, "cells": found}


def main() -> None:
    """Make and verify the families that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--matrix", default="chunk-16,preempt,pool-migrate,drafts-random")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("-n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=1800.0, help="most seconds for a family")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], help="a setting, as for seer verify"
    )
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in args.families:
            model = Path(folder) / family
            make(family, model)
            found[family] = verify(model, args)
    print(json.dumps({"machine": machine(), "families": found}, indent=2))


if __name__ == "__main__":
    main()
