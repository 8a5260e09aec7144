"""How far a trainer's logprobs are off the engines', of the tokens that these sampled. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from seer.client.results import Response
from seer.common.errors import InvalidField
from seer.common.wire import Mismatch

_MOST = 80.0
"""Nats of a difference that count for the divergence: its exponential would else be no number."""


def divergence(differences: npt.NDArray[np.float64]) -> float:
    """Return the KL from engines to trainer, in nats a token, estimated by sampled tokens.

    `differences` are trainer - engine; each token counts exp(d) - 1 - d, which is never negative.
    """
    return float(np.mean(np.expm1(np.minimum(differences, _MOST)) - differences))


def mismatch_of(
    responses: Sequence[Response], logprobs: Sequence[npt.ArrayLike], weight_version: int
) -> Mismatch:
    """Return the figures of these responses; see `RolloutClient.report_mismatch`. Raises `InvalidField`."""
    if len(logprobs) != len(responses):
        raise InvalidField("logprobs", f"{len(logprobs)} arrays", f"give one a response: {len(responses)}")
    found = []
    for place, (response, given) in enumerate(zip(responses, logprobs, strict=True)):
        ours, field = response.logprobs.astype(np.float64), f"logprobs[{place}]"
        theirs = np.asarray(given, np.float64)
        if theirs.shape != ours.shape:
            raise InvalidField(field, f"of shape {theirs.shape}", f"give one a token: {ours.shape}")
        if np.isinf(theirs).any():
            at = int(np.flatnonzero(np.isinf(theirs))[0])
            raise InvalidField(f"{field}[{at}]", float(theirs[at]), "must be finite, or NaN for no token")
        found.append((theirs - ours)[~np.isnan(theirs)])
    every = np.concatenate([np.zeros(0), *found])
    if not every.size:
        raise InvalidField("logprobs", "no value", "give at least one token's")
    size = np.abs(every)
    return Mismatch(
        tokens=every.size, mean=float(size.mean()), largest=float(size.max()), kl=divergence(every),
        weight_version=weight_version,
    )  # fmt: skip
