"""A trainer's sampling fields, by vLLM's names, as Seer's.

Invariants:
- a field that Seer does not have is refused by its name, never ignored;
- logprobs are those that a trainer recomputes: of softmax(logits / temperature), before truncation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from seer.client.results import Response
from seer.common.errors import InvalidField
from seer.common.types import SamplingParams

FIELDS = frozenset(SamplingParams.__struct_fields__) - {
    "logprobs", "routed_experts_from", "top_logprobs", "prompt_logprobs", "receipt",
}  # fmt: skip


def expert_ids(response: Response) -> npt.NDArray[np.uint8] | npt.NDArray[np.int32] | None:
    """Return expert ids [tokens, layers, experts of a token], of a type that all of torch takes."""
    found = response.routed_experts
    return found.astype(np.int32) if found is not None and found.dtype != np.uint8 else found


def sampling_params(given: Mapping[str, Any], where: str = "sampling_params") -> SamplingParams:
    """Return the sampling parameters; fields that are None have Seer's defaults.

    `where` is the name of `given` in errors. Raises `InvalidField`.
    """
    params = {name: value for name, value in given.items() if value is not None}
    for name in sorted(params.keys() - FIELDS):
        fix = f"Seer does not have it; it may be one of {', '.join(sorted(FIELDS))}"
        raise InvalidField(f"{where}[{name!r}]", params[name], fix)
    if params.get("top_k") == -1:
        params["top_k"] = 0
    try:
        sampling = msgspec.convert(params, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidField(where, dict(given), str(error)) from error
    sampling.check(where)
    return sampling
