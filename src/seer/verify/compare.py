"""Compares two runs of the same prompts: where responses first differ in tokens, endings, logprobs, routes.

Invariants:
- a response is compared up to its first divergence and not beyond: what follows is another text;
- where the tokens agree, finish reason, stop reason and logprobs follow from them: a difference
  there (of logprobs: beyond the tolerance) is a bug;
- what a response's tokens were routed to, in more than `MOST_ROUTES` of them in one layer, is no rounding;
- whether a difference of tokens is excused is for `numeric_or_bug.py` to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from seer.client.results import Group, Response

Kind = Literal["token", "finish", "logprob", "routes"]
Verdict = Literal["numeric", "bug", "unjudged"]
Mask = npt.NDArray[np.bool_]

LOGPROB_TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest excusable difference of two runs' logprobs of one token, in raw logits; 0 for others."""

GPU_FLOAT32_TOLERANCE = 0.05
"""Likewise for float32 on GPUs, where Triton's attention multiplies by TF32: 0.008 was seen on an H100."""

MOST_ROUTES = 0.02
"""Share of a response's tokens that rounding may send to other experts in a layer; three always may."""


def logprob_tolerance(versions: Mapping[str, str]) -> float:
    """Return the largest excusable difference for an engine of these versions, in raw logits."""
    dtype = versions.get("dtype", "")
    by_batch = versions.get("device") == "cuda" and versions.get("batch_invariant") != "yes"
    if dtype == "float32" and by_batch:
        return GPU_FLOAT32_TOLERANCE
    return LOGPROB_TOLERANCE.get(dtype, 0.0)


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """One difference. `position` counts the response's own tokens from 0; of `routes`, the prompt's, too.

    For tokens: `gap` is the smallest error that would explain both, `error` the one measured, in
    logits. `expected`: the token that the teacher draws there, or the teacher's logprob. None where nothing
    was measured.
    """

    kind: Kind
    prompt_id: str
    index: int
    position: int
    reference: int | float | str
    found: int | float | str
    verdict: Verdict = "bug"
    gap: float | None = None
    error: float | None = None
    expected: int | float | None = None

    @property
    def blames_reference(self) -> bool:
        """Whether the teacher's logprob is nearer to the found one."""
        ours, theirs, its = (float(each or 0) for each in (self.reference, self.found, self.expected))
        return abs(ours - its) > abs(theirs - its)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A run against the reference. `tokens` counts positions at which both were looked at.

    `routes` counts tokens in layers whose experts were compared, `other_routes` those that differ.
    """

    responses: int
    tokens: int
    max_logprob_difference: float
    mismatches: list[Mismatch]
    routes: int = 0
    other_routes: int = 0


def pairs(reference: Sequence[Group], found: Sequence[Group]) -> Iterator[tuple[str, Response, Response]]:
    """Yield (prompt id, reference's response, found one); raises `ValueError` when one is missing."""
    by_id = {group.prompt_id: group for group in found}
    for group in reference:
        others = by_id[group.prompt_id].responses if group.prompt_id in by_id else ()
        if len(others) != len(group.responses):
            raise ValueError(f"prompt {group.prompt_id}: {len(others)} responses of {len(group.responses)}")
        for ours, theirs in zip(group.responses, others, strict=True):
            yield group.prompt_id, ours, theirs


def compare(
    reference: Sequence[Group], found: Sequence[Group], temperature: float, tolerance: float
) -> Comparison:
    """Compare two runs of the same prompts; token mismatches still await `judge_token`.

    `tolerance` bounds the difference of logprobs in raw logits (see `to_logits`).
    """
    responses = tokens = routes = other_routes = 0
    largest = 0.0
    mismatches: list[Mismatch] = []
    for prompt_id, ours, theirs in pairs(reference, found):
        responses += 1
        same = common_length(ours.token_ids, theirs.token_ids)
        shorter = min(len(ours.token_ids), len(theirs.token_ids))
        tokens += min(same + 1, shorter)
        differences = np.abs(ours.logprobs[:same] - theirs.logprobs[:same])
        if same:
            at = int(np.argmax(differences))  # a NaN counts as the largest
            largest = max(float(differences[at]), largest, key=_nan_last)
            if not to_logits(float(differences[at]), temperature) <= tolerance:
                numbers = float(ours.logprobs[at]), float(theirs.logprobs[at])
                mismatches.append(_mismatch("logprob", prompt_id, ours.index, at, *numbers))
        differ = _other_routes(ours, theirs, same)
        routes, other_routes = routes + differ.size, other_routes + int(differ.sum())
        for layer in np.flatnonzero(differ.sum(axis=0) > np.maximum(3, MOST_ROUTES * len(differ))):
            at, count = int(np.argmax(differ[:, layer])), int(differ[:, layer].sum())
            text = f"experts of layer {layer}", f"others for {count} of {len(differ)} tokens"
            mismatches.append(_mismatch("routes", prompt_id, ours.index, at, *text))
        if same < shorter:
            ids = int(ours.token_ids[same]), int(theirs.token_ids[same])
            mismatches.append(_mismatch("token", prompt_id, ours.index, same, *ids))
        elif _ending(ours) != _ending(theirs):
            mismatches.append(
                _mismatch("finish", prompt_id, ours.index, same, _ending(ours), _ending(theirs))
            )
    return Comparison(
        responses=responses, tokens=tokens, max_logprob_difference=largest, mismatches=mismatches,
        routes=routes, other_routes=other_routes,
    )  # fmt: skip


def _other_routes(ours: Response, theirs: Response, same: int) -> Mask:
    """Return which tokens of the shared context went to other experts: bool [tokens, layers]."""
    routes, others = ours.routed_experts, theirs.routed_experts
    if routes is None or others is None:
        return np.zeros((0, 1), bool)
    rows = len(routes) + 1 - len(ours.token_ids) + same
    different: Mask = np.any(np.sort(routes[:rows]) != np.sort(others[:rows]), axis=-1)
    return different


def common_length(ours: npt.NDArray[np.int32], theirs: npt.NDArray[np.int32]) -> int:
    """Return the number of leading tokens that two responses share."""
    shorter = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:shorter] != theirs[:shorter])
    return int(different[0]) if len(different) else shorter


def to_logits(difference: float, temperature: float) -> float:
    """Turn a difference of temperature-scaled logprobs into one of raw logits."""
    return difference * (temperature or 1.0)


def _mismatch(
    kind: Kind, prompt_id: str, index: int, position: int, reference: float | str, found: float | str
) -> Mismatch:
    return Mismatch(
        kind=kind, prompt_id=prompt_id, index=index, position=position, reference=reference, found=found
    )


def _ending(response: Response) -> str:
    length = f" after {len(response.token_ids)} tokens"
    reason = f" at {response.stop_reason!r}" if response.stop_reason else ""
    return response.finish_reason + reason + length


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
