"""The token histories that stay on a device from step to step.

Invariant: the device's tokens are those that `KeptHistories` has in its books, also after they have moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from seer.services.engine.vllm.sampling.kept_histories import KeptHistories


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
