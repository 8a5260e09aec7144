"""What veRL's settings and sampling fields mean for Seer: pure, no veRL needed.

Invariants:
- a setting or a sampling field that Seer does not have is refused by its name, never ignored;
- a response gets as many tokens as veRL's own vLLM server would give it;
- logprobs are those that a trainer recomputes: of softmax(logits / temperature), before truncation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from msgspec import structs

from seer.common.bounds import check_seconds
from seer.common.errors import InvalidField
from seer.common.types import SamplingParams
from seer.integrations import sampling

ROLLOUT = "actor_rollout_ref.rollout"
WHERE = f"{ROLLOUT}.engine_kwargs.seer"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engine_kwargs.seer`.

    `endpoint`: where the buffer listens to trainers. `sleep`: engines share the trainer's devices, and free
    weights and KV while it trains. `deadline_seconds`: a request that takes longer fails; None: no limit.
    """

    endpoint: str
    sleep: bool = False
    deadline_seconds: float | None = None


def settings(engine_kwargs: Mapping[str, Any]) -> Settings:
    """Return Seer's settings out of veRL's `rollout.engine_kwargs`. Raises `InvalidField`."""
    given = dict(engine_kwargs.get("seer") or {})
    if not given.get("endpoint"):
        fix = "give the buffer's endpoint, e.g. tcp://head:7101"
        raise InvalidField(f"{WHERE}.endpoint", given.get("endpoint"), fix)
    try:
        found = msgspec.convert(given, Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise InvalidField(WHERE, given, f"{error}; it may have {known}") from error
    check_seconds(f"{WHERE}.deadline_seconds", found.deadline_seconds)
    return found


@dataclass(frozen=True, slots=True)
class Limits:
    """What veRL's `rollout` section says of every response; lengths in tokens.

    `enable_rollout_routing_replay`: the experts of all tokens are wanted.
    """

    prompt_length: int
    response_length: int
    max_model_len: int | None = None
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    enable_rollout_routing_replay: bool = False

    @staticmethod
    def of(rollout: Any) -> Limits:
        """Return the limits of a `RolloutConfig`, or of the section it is made from."""
        given = {field.name: rollout.get(field.name) for field in fields(Limits)}
        return Limits(**{name: value for name, value in given.items() if value is not None})


def sampling_params(given: Mapping[str, Any], prompt_tokens: int, limits: Limits) -> SamplingParams:
    """Return what veRL's sampling fields ask for, for a prompt of so many tokens.

    Without `max_tokens`, a response may have what is left of prompt and response length, at most
    `response_length`. Raises `InvalidField`.
    """
    params = {name: value for name, value in given.items() if value is not None}
    params.pop("logprobs", None)  # Seer always returns them
    asked = params.pop("max_new_tokens", None)  # SGLang's name of it
    whole = limits.prompt_length + limits.response_length
    asked = params.pop("max_tokens", asked)
    if asked is None:
        asked = min(limits.response_length, whole - prompt_tokens)
    room = (limits.max_model_len or max(whole, prompt_tokens + 1)) - prompt_tokens
    if room < 1:
        fix = f"raise it: the prompt alone has {prompt_tokens} tokens"
        raise InvalidField(f"{ROLLOUT}.max_model_len", limits.max_model_len, fix)
    params.setdefault("repetition_penalty", limits.repetition_penalty)
    params.setdefault("ignore_eos", limits.ignore_eos)
    params["max_tokens"] = max(1, min(asked, room))
    found = sampling.sampling_params(params)
    return structs.replace(found, routed_experts_from=0 if limits.enable_rollout_routing_replay else None)


def check_trainer(config: Any) -> None:
    """Raise `InvalidField` for settings of veRL's whole configuration that Seer does not support."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    for field, value, wanted, why in (
        ("actor_rollout_ref.rollout.name", rollout.name, "seer", "this manager is for Seer"),
        ("trainer.use_v1", trainer.use_v1, True, "Seer works with the V1 trainer"),
        ("trainer.v1.trainer_mode", trainer.v1.trainer_mode, "sync", "Seer's rollouts are on-policy"),
    ):
        if value != wanted:
            raise InvalidField(field, value, f"{why}: set it to {wanted}")


def check_rollout(rollout: Any) -> None:
    """Raise `InvalidField` for settings of veRL's `rollout` section that Seer does not support."""
    if settings(rollout.engine_kwargs).sleep and not rollout.free_cache_engine:
        fix = f"veRL never wakes engines with {ROLLOUT}.free_cache_engine=False: set it to True"
        raise InvalidField(f"{WHERE}.sleep", True, fix)
    fix = "engines quantize what veRL sends by engine.vllm.quantization of Seer's configuration: leave it out"
    for name in ("quantization", "quantization_config_file"):
        if (value := getattr(rollout, name, None)) is not None:
            raise InvalidField(f"{ROLLOUT}.{name}", value, fix)
    if (getattr(rollout, "qat", None) or {}).get("enable"):
        fix = "Seer takes the weights of a trainer that trains no quantized model: set it to False"
        raise InvalidField(f"{ROLLOUT}.qat.enable", True, fix)
