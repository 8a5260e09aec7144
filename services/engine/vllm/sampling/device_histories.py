"""The token histories that stay on a device from step to step.

Invariant: the device's tokens are those that `KeptHistories` has in its books, also after they have moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from seer.services.engine.vllm.sampling.kept_histories import NOTHING, KeptHistories, Runs
from seer.services.engine.vllm.sampling.rows import RowParams


@dataclass(slots=True)
class Histories:
    """The books, and the device's tokens: int32 [`kept.shape`]."""

    kept: KeptHistories = field(default_factory=KeptHistories)
    tokens: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the device's tokens. If they grow, they move: nothing waits for it."""
        old, shape = self.tokens, self.kept.shape
        if old is not None and old.shape == shape:
            return old
        self.tokens = torch.empty(shape, dtype=torch.int32, device=device)
        if old is not None:
            rows, width = map(min, old.shape, shape)
            self.tokens[:rows, :width] = old[:rows, :width]
        return self.tokens


class RunnerHistories:
    """Histories that the runner keeps: `tokens` int32 [slots, length] on the device. See `Histories`."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens
        self.kept = self

    def step(self, params: RowParams) -> tuple[npt.NDArray[np.int64], Runs]:
        """Return where each row's history begins; there is nothing to copy."""
        starts = params.records["slot"].astype(np.int64) * self._tokens.shape[1]
        return np.where(params.penalised, starts, -1), NOTHING

    def forget(self) -> None:
        """Do nothing: the runner keeps them."""

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the tokens."""
        return self._tokens

    def on_cpu(self, params: RowParams) -> RowParams:
        """Return the rows with the tokens as their history."""
        return replace(params, history=self._tokens.numpy())
