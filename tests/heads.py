"""The shipped draft head, heads like it, and a model with layers of prediction of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from shared_engines import MODEL, changed_model

HEAD = MODEL.parent / "head"


def head_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed_head() -> dict[str, torch.Tensor]:
    """Return the shipped head's tensors with so much noise that its drafts are poor."""
    noise = torch.Generator().manual_seed(5)
    return {
        name: (each.float() + 0.2 * torch.randn(each.shape, generator=noise)).to(each.dtype)
        for name, each in head_tensors(HEAD).items()
    }


def model_with(folder: Path, scale: float, head: dict[str, torch.Tensor]) -> Path:
    """Write the shipped model, its weights times `scale`, with tensors of a head as an update has them."""
    changed_model(folder, scale)
    both = load_file(folder / "model.safetensors") | {f"draft.{name}": each for name, each in head.items()}
    save_file(both, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_prediction(folder: Path, seed: int, *, of_its_own: float = 0.0, layer: bool = True) -> Path:
    """Write a tiny GLM-4.5 with a layer of multi-token prediction, all weights random.

    `of_its_own`: how far the layer's embeddings and output layer are from the model's; `layer`: it is there.
    """
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(seed)
    size = 64
    config = Glm4MoeConfig(
        vocab_size=66, hidden_size=size, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, moe_intermediate_size=32, num_experts_per_tok=2, n_shared_experts=1,
        n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, max_position_embeddings=4096,
        tie_word_embeddings=False, num_nextn_predict_layers=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        dtype="float32",
    )  # fmt: skip
    Glm4MoeForCausalLM(config).float().save_pretrained(folder)
    made = load_file(folder / "model.safetensors")
    predicting = {
        name.replace("layers.1", "layers.2"): each for name, each in made.items() if "layers.1." in name
    }
    own = {
        "eh_proj.weight": torch.randn(size, 2 * size) * 0.1, "enorm.weight": torch.ones(size),
        "hnorm.weight": torch.ones(size), "shared_head.norm.weight": torch.ones(size),
        "shared_head.head.weight": made["lm_head.weight"] + of_its_own * torch.randn(66, size),
        "embed_tokens.weight": made["model.embed_tokens.weight"] + of_its_own * torch.randn(66, size),
    }  # fmt: skip
    predicting |= {f"model.layers.2.{name}": each for name, each in own.items()}
    all_of = made | predicting if layer else made
    save_file(
        {name: each.clone() for name, each in all_of.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((MODEL / file).read_bytes())
    return folder
