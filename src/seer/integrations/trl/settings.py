"""What Seer takes of a trainer's configuration, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from seer.client import SamplingParams
from seer.common.errors import InvalidField
from seer.common.image_models import PATCH_SIZES, image_model
from seer.integrations.images import placeholder_biases
from seer.integrations.trl.weights import check_mergeable

if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer

GENERATION_KWARGS = {
    "frequency_penalty", "logit_bias", "min_tokens", "presence_penalty", "stop", "stop_token_ids",
}  # fmt: skip
"""Allowed keys of `generation_kwargs`: sampling parameters for which the configuration has no field."""

REFUSED = {
    "use_vllm": "Seer has the engines: leave it False",
    "use_transformers_continuous_batching": "Seer generates: leave it False",
}


def sampling_params(trainer: GRPOTrainer) -> SamplingParams:
    """Return the configuration's sampling parameters. Raises `InvalidField` for those Seer does not have."""
    args = trainer.args
    config = type(args).__name__
    extra = dict(args.generation_kwargs or {})
    for name in extra.keys() - GENERATION_KWARGS:
        fix = f"has a field of its own or is not known to Seer; it may be one of {sorted(GENERATION_KWARGS)}"
        raise InvalidField(f"{config}.generation_kwargs[{name!r}]", extra[name], fix)
    if args.max_completion_length is None:
        raise InvalidField(f"{config}.max_completion_length", None, "give a number of tokens")
    # As TRL does where it generates itself.
    extra["logit_bias"] = placeholder_biases(trainer.processing_class) | extra.get("logit_bias", {})
    extra["stop_token_ids"] = [*trainer.eos_token_ids, *extra.get("stop_token_ids", ())]
    given = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or 0,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
    }
    if args.vllm_structured_outputs_regex is not None:
        given["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    try:
        sampling = msgspec.convert({**given, **extra}, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidField(config, {**given, **extra}, str(error)) from error
    sampling.check(config)
    return sampling


def check_config(args: GRPOConfig) -> None:
    """Raise `InvalidField` for what only another way to generate has."""
    config = type(args).__name__
    for name, fix in REFUSED.items():
        if (value := getattr(args, name)) not in (None, False):
            raise InvalidField(f"{config}.{name}", value, fix)
    if getattr(args, "loss_type", "") == "vespo" and args.vllm_importance_sampling_correction:
        mode = args.vllm_importance_sampling_mode
        if not mode.startswith("token_"):  # TRL checks that of use_vllm alone
            fix = "the vespo loss needs token_truncate or token_mask"
            raise InvalidField(f"{config}.vllm_importance_sampling_mode", mode, fix)


def check_supported(trainer: GRPOTrainer, *, images: bool) -> None:
    """Raise `InvalidField` for settings of the trainer that Seer does not support. `images`: they are."""
    check_config(trainer.args)
    if hasattr(trainer.processing_class, "tokenizer"):
        kind = type(trainer.processing_class).__name__
        if not images:
            raise InvalidField(
                "processing_class", kind, "use SeerGRPOTrainer: this takes text and a tokenizer"
            )
        model = trainer.accelerator.unwrap_model(trainer.model).config
        if image_model({"architectures": model.architectures or ()}) is None:
            fix = f"Seer runs images of {', '.join(PATCH_SIZES)} alone: give a tokenizer"
            raise InvalidField("processing_class", kind, fix)
        if (side := trainer.processing_class.tokenizer.padding_side) != "left":
            fix = "TRL pads prompts on the left, and would misplace images: set padding_side='left'"
            raise InvalidField("processing_class.tokenizer.padding_side", side, fix)
    check_mergeable(trainer)
