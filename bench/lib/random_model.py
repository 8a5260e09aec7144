"""A model of any size, for what depends on the size alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def random_llama(folder: Path, megabytes: int, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random Llama of about this size, with a vocabulary of 32,000."""
    hidden, vocabulary = 1024, 32_000
    per_layer = 4 * hidden**2 + 3 * hidden * 4 * hidden + 2 * hidden
    layers = max(1, round((megabytes * 1e6 / dtype.itemsize - vocabulary * hidden) / per_layer))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": vocabulary, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(dtype).save_pretrained(folder)
    return folder
