"""Whether last bits of arithmetic explain that two runs drew different tokens: `numeric`, else `bug`. Pure.

Invariants:
- two tokens are `numeric` only if an error of the logits no larger than the one measured at that
  very context lets both be drawn; without a measurement every difference is a bug;
- no measurement excuses more than twice the logprob tolerance and a floor: engines and teacher may have the
  same fault, and corrupt logits must not excuse themselves.

The error, in raw logits, bounds how far the difference of two logits may be off. It is the largest of
- twice the largest spread of any token's logit between ways to compute this context (`Evidence`), and
- twice the deviation of the two runs' logprobs, from each other over the `WINDOW` tokens before
  and from the teacher's at the divergence, each of no more than the logprob tolerance;
- a floor: one unit in the last place of both logits in the model's dtype, and of both noisy values
  in float32, since that is how finely two runs can disagree at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from seer.client.results import Response
from seer.common.types import SamplingParams
from seer.verify.compare import Mask, Mismatch, to_logits

Floats = npt.NDArray[np.float64]

WINDOW = 32
"""Tokens before a divergence over which the runs' logprobs are compared."""

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Spacing of 1.0 and the next number, by dtype as engines report it."""

_HOPELESS = 64.0
"""No error of this many nats is measured on a working engine: the search for one ends here."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The teacher at the context of a divergence.

    `logits` float32 [ways, vocab]: raw, the same context reached in different ways, first by the plainest,
    which no chunk of a cell goes; `processed`
    and `noisy` [vocab]: the first of them through the request's processors but not truncated,
    without and with the noise. `dtype` is the model's.
    """

    logits: npt.NDArray[np.float32]
    processed: Floats
    noisy: Floats
    dtype: str


def judge_token(
    mismatch: Mismatch, evidence: Evidence, sampling: SamplingParams, tolerance: float, deviation: float = 0.0
) -> Mismatch:
    """Give a token mismatch its verdict. `deviation` is what `logprob_deviation` returned."""
    tokens = [int(mismatch.reference), int(mismatch.found)]
    gap = explaining_error(evidence, tokens, sampling)
    error = measured_error(evidence, tokens, sampling, tolerance, deviation)
    return msgspec.structs.replace(
        mismatch,
        verdict="numeric" if gap <= error else "bug",
        gap=gap,
        error=error,
        expected=_drawn(evidence, sampling),
    )


def logprob_deviation(
    ours: Response, theirs: Response, position: int, evidence: Evidence, temperature: float
) -> float:
    """Return how far the two runs' logprobs are off around a divergence, in raw logits."""
    near = slice(max(0, position - WINDOW), position)
    between = np.abs(ours.logprobs[near] - theirs.logprobs[near]).astype(np.float64)
    at = [
        abs(
            float(run.logprobs[position])
            - logprob(evidence.logits[0], int(run.token_ids[position]), temperature)
        )
        for run in (ours, theirs)
    ]
    return to_logits(max(at + between.tolist()), temperature)


def logprob(logits: npt.NDArray[np.float32], token: int, temperature: float) -> float:
    """Return a token's logprob under raw logits [vocab], scaled by the temperature."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    return float(scaled[token] - scaled.max() - math.log(np.exp(scaled - scaled.max()).sum()))


# --- the error that was measured ---------------------------------------------------------------


def measured_error(
    evidence: Evidence, tokens: Sequence[int], sampling: SamplingParams, tolerance: float, deviation: float
) -> float:
    """Return the bound on the error of a difference of two logits; see the module's docstring."""
    finite = np.isfinite(evidence.logits).all(axis=0)
    spread = float(np.ptp(evidence.logits[:, finite].astype(np.float64), axis=0).max(initial=0.0))
    coarse = EPSILON.get(evidence.dtype, EPSILON["float32"])
    floor = sum(_ulp(float(evidence.logits[0, token]), coarse) for token in tokens)
    noisy = sum(_ulp(float(evidence.noisy[token]), EPSILON["float32"]) for token in tokens)
    return max(2 * min(max(spread, deviation), tolerance), floor + noisy / _scale(sampling))


def _ulp(value: float, epsilon: float) -> float:
    return math.ldexp(epsilon, math.frexp(value)[1] - 1) if math.isfinite(value) else 0.0


def _scale(sampling: SamplingParams) -> float:
    """Return how much the processors can magnify a difference of raw logits."""
    repetition = max(sampling.repetition_penalty, 1.0 / sampling.repetition_penalty)
    return repetition / (sampling.temperature or 1.0)


# --- the error that would explain --------------------------------------------------------------


def explaining_error(evidence: Evidence, tokens: Sequence[int], sampling: SamplingParams) -> float:
    """Return the smallest error, in raw logits, with which each of `tokens` could have been drawn.

    Without truncation: how far the worse of them is below the best noisy value. With it, also as
    far as the cut must move to let a token in, or a better one out. Infinite when none would do.
    """
    if not np.isfinite(evidence.processed[list(tokens)]).all():
        return math.inf
    scale = _scale(sampling)
    if sampling.top_p >= 1.0 and not sampling.top_k and not sampling.min_p:
        return float(evidence.noisy.max() - evidence.noisy[list(tokens)].min()) / scale
    if not _could_win(evidence, tokens, sampling, _HOPELESS):
        return math.inf
    low, high = 0.0, _HOPELESS
    if _could_win(evidence, tokens, sampling, low):
        return low
    while high - low > 1e-3 * high and high > 1e-9:
        middle = math.sqrt(low * high) if low else high / 16
        low, high = (low, middle) if _could_win(evidence, tokens, sampling, middle) else (middle, high)
    return high / scale


def _could_win(evidence: Evidence, tokens: Sequence[int], sampling: SamplingParams, slack: float) -> bool:
    """Say whether every token could be drawn if differences of processed logits may be off by `slack`."""
    sure, maybe = _kept(evidence.processed, sampling, slack)
    best = evidence.noisy[sure].max(initial=-math.inf)
    return all(bool(maybe[token]) and evidence.noisy[token] + slack >= best for token in tokens)


def _kept(x: Floats, sampling: SamplingParams, slack: float) -> tuple[Mask, Mask]:
    """Return which tokens survive truncation whatever the error, and which may: bool [vocab] twice.

    A token's rank and the mass ahead of it count the others that may, or must, stand before it.
    """
    ascending = np.sort(x)
    may_precede = np.searchsorted(ascending, x - slack, side="left")
    must_precede = np.searchsorted(ascending, x + slack, side="right")
    sure, maybe = np.isfinite(x), np.isfinite(x)
    if sampling.min_p > 0:
        least = x.max() + math.log(sampling.min_p)
        sure, maybe = sure & (x >= least + slack), maybe & (x >= least - slack)
    if sampling.top_k > 0:
        sure = sure & (len(x) - may_precede - 1 < sampling.top_k)
        maybe = maybe & (len(x) - must_precede < sampling.top_k)
    if sampling.top_p < 1.0:
        weights, top = np.exp(x - x.max()), sampling.top_p
        mass = np.concatenate([np.cumsum(np.exp(ascending - x.max())[::-1])[::-1], [0.0]])
        # All of a mass changes by a factor of at most exp(slack), and so does what it is a share of.
        least, most = (
            weights[mask].sum() * top * math.exp(s) for mask, s in ((sure, -2 * slack), (maybe, 2 * slack))
        )
        sure = sure & (mass[may_precede] - weights < least)
        maybe = maybe & (mass[must_precede] < most)
    return sure, maybe


def _drawn(evidence: Evidence, sampling: SamplingParams) -> int:
    kept = _kept(evidence.processed, sampling, 0.0)[1]
    return int(np.where(kept, evidence.noisy, -math.inf).argmax())
