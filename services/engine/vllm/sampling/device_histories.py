"""The token histories that stay on a device from step to step, and the tokens that are drawn there.

Invariant: the device's tokens are those that `KeptHistories` has in its books, also after they have moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from seer.services.engine.vllm.sampling.kept_histories import KeptHistories
from seer.services.engine.vllm.sampling.rows import RowParams


class DeviceTokens(Protocol):
    """Histories on a device, whoever keeps them; the kernels' launches take them as they take `Histories`."""

    def on_cpu(self, params: RowParams) -> RowParams:
        """See `Histories.on_cpu`."""
        ...

    def append(self, params: RowParams, drawn: torch.Tensor, chosen: npt.NDArray[np.bool_]) -> None:
        """See `Histories.append`."""
        ...


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

    def append(self, params: RowParams, drawn: torch.Tensor, chosen: npt.NDArray[np.bool_]) -> None:
        """Append what was `drawn`, int32 [rows] on the device, to the histories of the `chosen` rows.

        They are rows of the last `KeptHistories.step`, without drafts. Nothing is read back.
        """
        rows, places = self.kept.append(params, chosen)
        if not len(rows):
            return
        tokens = self.on(drawn.device)
        host = torch.from_numpy(np.stack((rows, places)))
        sent = (host.pin_memory() if drawn.is_cuda else host).to(drawn.device, non_blocking=True)
        tokens.view(-1).index_copy_(0, sent[1], drawn.index_select(0, sent[0]))

    def on_cpu(self, params: RowParams) -> RowParams:
        """Do what `step` says where the device is this CPU; return the rows with the device's histories."""
        starts, runs = self.kept.step(params)
        tokens = self.on(torch.device("cpu")).numpy()
        flat = tokens.reshape(-1)
        for begin, to, length in runs.where.tolist():
            flat[to : to + length] = runs.tokens[begin : begin + length]
        records = params.records.copy()
        records["slot"] = starts // max(tokens.shape[1], 1)
        return replace(params, records=records, history=tokens)
