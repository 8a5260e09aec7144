"""Make a mixture of experts of the shipped countdown model, and train it on written searches for a while.

Run as `python examples/countdown/train_mixture.py [--out DIR]`. Each expert begins as the dense model's own
network with noise (sparse upcycling, arXiv 2212.05055), routers at random: the mixture can do what the model
can, and its experts differ, so that it matters which of them a token goes to.

Invariant: data, batch order and weights follow from `SEED`, never from the clock.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from pathlib import Path
from random import Random

import torch
from train import CONTEXT, PROMPT_FILES, THREADS, draw_prompts, losses, make_batches
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEED = 20261128
EXPERTS, EXPERTS_OF_A_TOKEN = 4, 2
NOISE = 0.3
"""Of an expert's weights, as a share of their standard deviation."""

ROUTERS = 0.15
"""Standard deviation of the routers' weights: some scores are far apart, some nearly equal."""

TOKENS, LEARNING_RATE = 250_000, 5e-4
HERE = Path(__file__).parent
OF_TOKENIZER = "tokenizer.json", "tokenizer_config.json", "generation_config.json"

log = logging.getLogger("mixture")


def upcycled(dense: torch.nn.Module) -> Qwen3MoeForCausalLM:
    """Return a mixture whose experts are the dense model's networks with noise."""
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id", "rms_norm_eps",
    )  # fmt: skip
    config = Qwen3MoeConfig(
        **{name: getattr(dense.config, name) for name in same},
        intermediate_size=dense.config.intermediate_size,
        moe_intermediate_size=dense.config.intermediate_size, num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_OF_A_TOKEN, norm_topk_prob=True, tie_word_embeddings=False,
        max_position_embeddings=CONTEXT, dtype="float32",
    )  # fmt: skip
    mixture, given = Qwen3MoeForCausalLM(config), dense.state_dict()
    with torch.no_grad():
        for name, weight in mixture.state_dict().items():
            if name in given:
                weight.copy_(given[name])
            elif name.endswith("gate.weight"):
                weight.normal_(0, ROUTERS)
            elif name.endswith("gate_up_proj"):
                of = name.removesuffix("experts.gate_up_proj")
                both = torch.cat([given[f"{of}gate_proj.weight"], given[f"{of}up_proj.weight"]])
                weight.copy_(noisy(both))
            else:
                weight.copy_(noisy(given[name.replace("experts.down_proj", "down_proj.weight")]))
    return mixture


def noisy(weight: torch.Tensor) -> torch.Tensor:
    """Return an expert's weights for each expert."""
    return weight + NOISE * weight.std() * torch.randn(EXPERTS, *weight.shape)


def main() -> None:
    """Train, and save the model in bfloat16, half as large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "mixture")
    out: Path = parser.parse_args().out
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    files = draw_prompts(Random(SEED))
    held_out = {problem for name in PROMPT_FILES for problem in files[name]}
    model = upcycled(AutoModelForCausalLM.from_pretrained(HERE / "model", dtype=torch.float32))
    batches = make_batches(Random(SEED + 1), held_out, TOKENS)
    started = time.monotonic()
    for step, loss in enumerate(losses(model, batches, LEARNING_RATE)):
        if step % 10 == 0:
            log.info("step %d of %d: loss %.4f, %.0f s", step, len(batches), loss, time.monotonic() - started)
    model.to(torch.bfloat16).save_pretrained(out)
    for name in OF_TOKENIZER:
        shutil.copy(HERE / "model" / name, out / name)


if __name__ == "__main__":
    main()
