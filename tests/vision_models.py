"""Tiny vision-language models with random weights, each made anew: of all architectures whose images run."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np

from seer.client.images import Processed, prepare

VOCAB, EOS = 200, 2
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
"""The last tokens: those before them are text."""
START, END, IMAGE, VIDEO = range(VOCAB - 4, VOCAB)
PATCH = 4
"""Pixels on a side; two by two patches are a token."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    # Ten times the usual: distributions that are neither flat nor certain.
    "initializer_range": 0.25,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
VISION: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = VISION | {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2}
    text = TEXT | {"rope_parameters": ROPE}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **IDS))


def qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = VISION | {
        "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 64, "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    text = TEXT | {"rope_parameters": ROPE}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **IDS))


def qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = VISION | {
        "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 64, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    text = TEXT | {"head_dim": 32, "rope_parameters": ROPE | {"mrope_interleaved": True}}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **IDS))


FAMILIES = {"qwen2-vl": qwen2_vl, "qwen2.5-vl": qwen2_5_vl, "qwen3-vl": qwen3_vl}


def make(family: str, folder: Path) -> Path:
    """Write a model with its processor, float32, into a folder."""
    import torch

    torch.manual_seed(11)
    model = FAMILIES[family]()
    with torch.no_grad():  # the usual start of a vision encoder makes all images nearly equal
        for name, weights in model.named_parameters():
            if "visual" in name and weights.ndim > 1:
                weights.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    processor_of(family).save_pretrained(folder)
    return folder


def processor_of(family: str) -> Any:
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    kinds = {"qwen2-vl": Qwen2VLProcessor, "qwen2.5-vl": Qwen2_5_VLProcessor, "qwen3-vl": Qwen3VLProcessor}
    side = 2 * PATCH
    size = {"shortest_edge": side**2, "longest_edge": 16 * side**2}
    images = {"patch_size": PATCH, "merge_size": 2, "size": size}
    video = Qwen3VLVideoProcessor if family == "qwen3-vl" else Qwen2VLVideoProcessor
    return kinds[family](
        image_processor=Qwen2VLImageProcessor(**images),
        tokenizer=_tokenizer(),
        video_processor=video(patch_size=PATCH, merge_size=2),
        chat_template="{{ messages }}",
    )


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    # Digits and operators, of which the texts are made that `seer verify` constrains.
    singles = [*letters, *string.digits, *"+-*"]
    words = ["<pad>", "<bos>", "<eos>", *singles, *(a + b for a in letters for b in letters)]
    pieces = [*words[: VOCAB - 4], *SPECIAL]
    tokenizer = Tokenizer(models.WordLevel({piece: at for at, piece in enumerate(pieces)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*words[:3], *SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )  # fmt: skip


def pil_image(seed: int, height: int = 16, width: int = 24) -> Any:
    """Return a PIL image of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def prompt(processor: Any, words: str, *images: Any) -> Processed:
    """Return a prompt in which each `#` is an image."""
    return prepare(processor, _text(words), images)


def _text(words: str) -> str:
    return words.replace("#", " <|vision_start|> <|image_pad|> <|vision_end|> ")


LINES = (
    ("a b # c d", (1, 16, 24)),
    ("# e # f g", (2, 24, 40), (3, 8, 16)),
    ("h i j k",),
    ("l m n # o", (1, 16, 24)),
    ("p # q # r # s # t u v w", (4, 32, 32), (1, 16, 24), (5, 32, 32), (7, 32, 32)),
    ("x y z # # # # w", (6, 32, 32), (8, 32, 32), (9, 32, 32), (4, 32, 32)),
)
"""Prompts: one image, several, none, one that others show, too, and images that fill whole KV blocks."""


def write_lines(folder: Path, count: int = len(LINES)) -> Path:
    """Write the file of the first so many prompts and their images, as the command line takes them."""
    lines = []
    for number, (words, *images) in enumerate(LINES[:count]):
        line = {"id": str(number), "prompt": _text(words)}
        for seed, height, width in images:
            pil_image(seed, height, width).save(folder / f"{seed}.png")
        if images:
            line["images"] = [f"{seed}.png" for seed, *_ in images]
        lines.append(json.dumps(line) + "\n")
    path = folder / "prompts.jsonl"
    path.write_text("".join(lines))
    return path
