"""Train a draft head for the countdown model, in the format of EAGLE-3 (arXiv 2503.01840), and save it.

Run as `python examples/countdown/train_head.py [--out DIR]`, after `train.py`.

The head is one decoder layer. At position p it reads what three layers of the model made of token p, and
token p + 1, and gives the distribution of token p + 2; its own output stands for the model's layers at the
next position. It learns the model's distribution there, up to `DEPTH` tokens ahead.

Invariant: data, batch order and weights follow from `SEED`, never from the clock; no held-out problem is in
the data.
"""

from __future__ import annotations

import argparse
import json
import logging
from itertools import chain
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from train import SEED, THREADS, draw_prompts, make_batches, schedule
from transformers import Qwen3Config, Qwen3ForCausalLM

TOKENS = 1_000_000
PEAK_LR = 2e-3
DEPTH = 3
"""Tokens ahead that the head is trained for; those further on count half as much each."""
LAYERS = (1, 2, 3)
"""Whose input the head reads, of the model's layers."""
INTERMEDIATE = 128

log = logging.getLogger("countdown")


class Norm(nn.RMSNorm):
    """As the model's."""

    def __init__(self, size: int) -> None:
        super().__init__(size, eps=1e-6)


class Attention(nn.Module):
    """Llama's, of two inputs beside each other."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.heads, self.size, self.theta = config.num_attention_heads, config.head_dim, 10_000.0
        width = self.heads * self.size
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(2 * config.hidden_size, width, bias=False))
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return what each of [rows, length, 2 x hidden size] makes of those up to it."""
        rows, length, _ = hidden.shape
        q, k, v = (
            each(hidden).view(rows, length, self.heads, self.size).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = positions[:, None] / self.theta ** (torch.arange(0, self.size, 2) / self.size)
        q, k = turned(q, angles), turned(k, angles)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


def turned(pairs: Tensor, angles: Tensor) -> Tensor:
    """Return rotary position embeddings, in two halves."""
    first, second = pairs.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Perceptron(nn.Module):
    """Llama's gated one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(size, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., hidden size]."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """EAGLE-3's layer."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn, self.mlp = Attention(config), Perceptron(size)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            Norm(size),
            Norm(size),
            Norm(size),
        )

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """Return what stands for the features of the next position, [rows, length, hidden size]."""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), dim=-1)
        hidden = features + self.self_attn(both, positions)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):
    """See the module's docstring. Its parameters have the names of EAGLE-3's checkpoints."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(len(LAYERS) * size, size, bias=False)
        self.midlayer, self.norm = Layer(config), Norm(size)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)

    def loss(self, model: Qwen3ForCausalLM, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the cross entropy to the model's distributions, of all depths, over counted tokens."""
        with torch.no_grad():
            made = model(input_ids=ids, use_cache=False, output_hidden_states=True)
            embedded, targets = model.model.embed_tokens(ids), made.logits.softmax(-1)
        features = self.fc(torch.cat([made.hidden_states[layer] for layer in LAYERS], dim=-1))
        counted, total = (weights > 0).float(), torch.zeros(())
        positions = torch.arange(ids.shape[1])
        for depth in range(DEPTH):
            # Features of position p beside token p + 1; a depth further, those made for it at p - 1.
            features = self.midlayer(embedded[:, 1:][:, depth:], features[:, :-1], positions[depth:-1])
            logits = self.lm_head(self.norm(features))[:, :-1]
            each = -(targets[:, 1 + depth : -1] * logits.log_softmax(-1)).sum(-1)
            kept = counted[:, 2 + depth :]
            total = total + 0.5**depth * (each * kept).sum() / kept.sum()
        return total


def described(config: Qwen3Config) -> dict[str, object]:
    """Return the head's config.json."""
    own = (
        "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps",
        "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": 1, "intermediate_size": INTERMEDIATE, "draft_vocab_size": config.vocab_size,
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
    } | {name: getattr(config, name) for name in own}  # fmt: skip


def main() -> None:
    """Train the head for the shipped model, and save it."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=here / "head")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM.from_pretrained(here / "model").eval()
    head = Head(model.config)
    held_out = set(chain.from_iterable(draw_prompts(Random(SEED)).values()))
    batches = make_batches(Random(SEED - 1), held_out, asked.tokens)
    optimizer = torch.optim.AdamW(head.parameters(), lr=PEAK_LR, betas=(0.9, 0.97), weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(len(batches)))
    recent = 0.0
    for step, (ids, weights) in enumerate(batches):
        loss = head.loss(model, ids, weights)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        decay.step()
        recent = loss.item() if step == 0 else 0.98 * recent + 0.02 * loss.item()
        if step % 50 == 0:
            log.info("step %d of %d, loss %.4f", step, len(batches), recent)
    asked.out.mkdir(parents=True, exist_ok=True)
    tensors = {name: each.detach().to(torch.bfloat16) for name, each in head.state_dict().items()}
    save_file(tensors, asked.out / "model.safetensors")
    (asked.out / "config.json").write_text(json.dumps(described(model.config), indent=2) + "\n")


if __name__ == "__main__":
    main()
