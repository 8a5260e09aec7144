"""What our sampler needs of a batch, if the host knows how many tokens its requests have, and which drafts.

So it is with `runner_v1`, which says which requests its rows are, how many tokens stand before each token to
sample, and what their histories are. `slot_rows` is for `runner_v2`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from seer import _native
from seer.services.engine.vllm.requests import ExtraArgs
from seer.services.engine.vllm.sampling.rows import RowParams, SamplingTable

REJECTED = -1
"""vLLM's mark for no token: what follows a rejected draft."""


class Batch:
    """The requests of a batch in row order, until one comes or goes.

    `captures`: rows whose logits are kept.
    """

    def __init__(self, extras: Sequence[ExtraArgs]) -> None:
        self._table = SamplingTable([extra.sampling for extra in extras])
        self.captures = [row for row, extra in enumerate(extras) if extra.capture]
        self._faults = [
            (row, e.fault_position) for row, e in enumerate(extras) if e.fault_position is not None
        ]

    def step(
        self,
        positions: npt.NDArray[np.int32],
        history: npt.NDArray[np.int32] | None,
        counts: npt.NDArray[np.int32] | None = None,
        drafts: npt.NDArray[np.int32] | None = None,
    ) -> RowParams:
        """See `SamplingTable.step`; a planted fault gives its position a wrong key."""
        params = self._table.step(positions, history, counts, drafts)
        for request, position in self._faults:
            at = params.records["position"] == position
            if counts is None:
                at &= np.arange(len(at)) == request
            else:
                at &= np.repeat(np.arange(len(counts)), counts + 1) == request
            params.records["key"][at] ^= np.uint64(1)
        return params


def accept_drafts(
    tokens: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int32],
    drafts: npt.NDArray[np.int32],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Spread samples [rows] over [requests, most drafts + 1]; -1 after the first rejected draft.

    `counts` [requests] are numbers of drafts, `drafts` [sum(counts)] the drafts themselves.
    """
    width = int(counts.max(initial=0)) + 1
    sampled = np.empty((len(counts), width), np.int32)
    values = np.empty((len(counts), width), np.float32)
    _native.accept_drafts(tokens, logprobs, counts, drafts, REJECTED, sampled, values)
    return torch.from_numpy(sampled), torch.from_numpy(values)
