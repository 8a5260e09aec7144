"""What our sampler needs of a batch, whichever of vLLM's model runners runs it.

A runner says which requests its rows are, how many tokens stand before each token to sample, and what the
host knows of their histories. `runner_v1` and `runner_v2` read that from vLLM.

Invariant: a runner that schedules ahead says it without any token that the device has not returned yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from seer.services.engine.vllm.requests import ExtraArgs
from seer.services.engine.vllm.sampling.rows import RowParams, SamplingTable


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
