"""One call that samples a token for every row, by the fastest implementation for the logits' device.

Invariants:
- a token is a function of the row's logits, its record and its token history: other rows of the batch do
  not matter;
- the native kernel (CPU), the Triton kernels (GPU) and the torch implementation (elsewhere) choose
  the same tokens, bit for bit, as specified in `torch_sampler`;
- logits are never modified.
"""

from __future__ import annotations

import numpy as np
import torch

from seer.services.engine.vllm.sampling import torch_sampler
from seer.services.engine.vllm.sampling.rows import RECORD, RowParams

_RECORD_BYTES = np.dtype((np.uint8, (RECORD.itemsize,)))


def sample_rows(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row; return tokens int32 [rows] and logprobs float32 [rows].

    `logits` is [rows, vocab] on any device, of any float type, whose values in float32 count; the
    results are on the same device, and nothing waits for that device. Rows that cannot be sampled (NaN or
    infinite logits, every token masked) have token -1 and logprob NaN.
    """
    if len(logits) != len(params.records):
        raise ValueError(f"logits have {len(logits)} rows, the parameters {len(params.records)}")
    if logits.device.type == "cpu":
        return _sample_native(logits, params)
    if logits.device.type == "cuda":
        from seer.services.engine.vllm.sampling import triton_sampler  # only GPUs have Triton

        return triton_sampler.sample(logits, params)
    return torch_sampler.sample(logits, params)


def _sample_native(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    from seer import _native  # not there in a checkout that is only to check a GPU

    logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens, logprobs = _native.sample(
        logits.numpy(),
        params.records.view(_RECORD_BYTES),
        params.stop_ids,
        params.bias_ids,
        params.bias_values,
        params.history,
        params.extra,
    )
    return torch.from_numpy(tokens), torch.from_numpy(logprobs)
