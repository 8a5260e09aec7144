"""LoRA adapters for tests, made by PEFT itself."""

from pathlib import Path

import torch

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def adapt(base: Path, *, seed: int = 0, size: float = 0.02, dtype: torch.dtype | None = None, **settings):
    """Return a PEFT model on a base with random, untrained adapters; `size`: standard deviation of B."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto")
    settings = {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP]} | settings
    adapted = get_peft_model(model, LoraConfig(**settings))
    for name, tensor in adapted.named_parameters():
        if "lora_" in name:
            tensor.data.normal_(0, size)
        elif tensor.requires_grad:  # modules_to_save
            tensor.data.mul_(1.01)
    return adapted


def save_adapter(adapted, folder: Path) -> Path:
    """Write what a trainer sends: `adapter_config.json` and `adapter_model.safetensors`."""
    adapted.save_pretrained(folder)
    return folder


def save_merged(adapted, base: Path, folder: Path) -> Path:
    """Write the model that PEFT merges, with the base's tokenizer."""
    import shutil

    shutil.copytree(base, folder)
    adapted.merge_and_unload().save_pretrained(folder)
    return folder
