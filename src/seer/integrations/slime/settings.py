"""What slime's arguments mean for Seer: pure, no slime needed.

Invariant: an argument that Seer does not have is refused by its name, never ignored.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from seer.client import SamplingParams
from seer.common.errors import InvalidField
from seer.integrations import sampling

REFUSED = {
    "partial_rollout": "Seer's rollouts are on-policy: leave it out",
    "custom_generate_function_path": "give its agent the address of `seer gateway`, or leave it out",
}
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""SGLang's names of sampling fields, and Seer's."""


def endpoint(args: Namespace) -> str:
    """Return the buffer's endpoint. Raises `InvalidField`."""
    found = getattr(args, "seer_endpoint", None)
    if not isinstance(found, str) or not found:
        fix = "give it in the file of --custom-config-path: seer_endpoint: tcp://head:7101"
        raise InvalidField("seer_endpoint", found, fix)
    return found


def check(args: Namespace) -> None:
    """Raise `InvalidField` for arguments that Seer does not support."""
    for name, fix in REFUSED.items():
        if value := getattr(args, name, None):
            raise InvalidField(f"--{name.replace('_', '-')}", value, fix)
    if args.rollout_top_p != 1.0:  # slime replays the tokens that top-p left
        fix = "Seer does not return the tokens that it leaves, which slime trains with: set it to 1.0"
        raise InvalidField("--rollout-top-p", args.rollout_top_p, fix)


def sampling_params(given: Mapping[str, Any], where: str) -> SamplingParams:
    """Return what SGLang's sampling fields ask for. Raises `InvalidField` with `where` and the field."""
    return sampling.sampling_params({NAMES.get(name, name): value for name, value in given.items()}, where)


def train_sampling(args: Namespace) -> SamplingParams:
    """Return how training samples are drawn."""
    given = {
        "temperature": args.rollout_temperature,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
    }
    found = sampling_params(given, "--rollout")
    replays = getattr(args, "use_rollout_routing_replay", False)
    return structs.replace(found, routed_experts_from=0 if replays else None)


def eval_sampling(args: Namespace, dataset: Any) -> SamplingParams:
    """Return how samples of an evaluation's dataset are drawn."""
    given = {
        "temperature": dataset.temperature,
        "top_p": dataset.top_p,
        "top_k": dataset.top_k,
        "max_new_tokens": dataset.max_response_len,
        "min_new_tokens": first(dataset.min_new_tokens, getattr(args, "eval_min_new_tokens", None)),
        "repetition_penalty": dataset.repetition_penalty,
        "stop": first(dataset.stop, args.rollout_stop),
        "stop_token_ids": first(dataset.stop_token_ids, args.rollout_stop_token_ids),
    }
    return sampling_params(given, f"eval_datasets[{dataset.name!r}]")


def first(*values: Any) -> Any:
    """Return the first value that is not None: a dataset's own, or the run's."""
    return next((value for value in values if value is not None), None)
