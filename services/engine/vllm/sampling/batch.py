"""What our sampler needs of a batch, whichever of vLLM's model runners runs it.

A runner says which requests its rows are, how many tokens stand before each token to sample, and what the
host knows of their histories. `runner_v1` and `runner_v2` read that from vLLM.

Invariant: a runner that schedules ahead says it without any token that the device has not returned yet.
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

    `slots` are their rows of the history, 0, 1, ... by default. `captures`: rows whose logits are kept.
    """

    def __init__(self, extras: Sequence[ExtraArgs], slots: Sequence[int] | None = None) -> None:
        self._table = SamplingTable([extra.sampling for extra in extras], slots)
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
