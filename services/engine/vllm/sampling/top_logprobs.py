"""The likeliest tokens of rows whose requests ask for them, under the distribution of returned logprobs.

Invariants (tests/unit/test_top_logprobs.py):
- the rows' logits are read alone, after they were drawn from: nothing here can change a token;
- other rows cost nothing; temporaries are those of `SLAB_ELEMENTS` logits;
- nothing waits for the device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

SLAB_ELEMENTS = 1 << 22
"""Most logits taken at once: 16 MiB in float32."""


def top_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, divisors: torch.Tensor, tokens: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids int64 and logprobs float32 [rows, most], best first, and the ranks int64 [rows] of `tokens`.

    `rows` int64 are those of `logits` [any, vocab] that are meant, `divisors` float32 [rows] their
    temperatures, `tokens` int64 [rows] what was drawn. As vLLM's, a rank counts the tokens that are at least
    as likely.
    """
    step = max(1, SLAB_ELEMENTS // logits.shape[1])
    parts = []
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        scaled = logits[rows[part]].float() / divisors[part, None]
        best = scaled.topk(most, dim=-1)
        own = scaled.gather(1, tokens[part, None])
        total = scaled.logsumexp(dim=-1, keepdim=True)
        parts.append((best.indices, best.values - total, (scaled >= own).sum(dim=-1)))
    ids, values, ranks = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(values), torch.cat(ranks)


def divisors(temperatures: npt.NDArray[np.float32], raw: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """Return what logits are divided by for their logprobs: 1 where these are `raw`, and for greedy rows."""
    return np.where(raw | (temperatures == 0), np.float32(1), temperatures)
