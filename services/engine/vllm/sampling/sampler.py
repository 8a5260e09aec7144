"""One call that samples a token for every row, by the fastest implementation for the logits' device.

Invariants:
- a token is a function of the row's logits, its record and its token history: other rows of the batch do
  not matter;
- the native kernel (CPU), the Triton kernels (GPU) and the torch implementation (elsewhere) choose
  the same tokens, bit for bit, as specified in `torch_sampler`;
- logits are never modified;
- a `StepSampler` waits for the device once a step, when it reads tokens and logprobs in one copy.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from seer.common.errors import EngineError
from seer.services.engine.vllm.sampling import torch_sampler
from seer.services.engine.vllm.sampling.rows import RECORD, RowParams

OnHost = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Tokens int32 [rows] and logprobs float32 [rows]."""

_RECORD_BYTES = np.dtype((np.uint8, (RECORD.itemsize,)))


def sample_rows(
    logits: torch.Tensor, params: RowParams, *, check: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row; return tokens int32 [rows] and logprobs float32 [rows].

    `logits` is [rows, vocab] on any device, of any float type, whose values in float32 count; the
    results are on the same device. Raises `EngineError` for rows that cannot be sampled (NaN or
    infinite logits, every token masked). That reads the tokens back: with `check=False` nothing waits for the
    device, and such rows hold token -1 and logprob NaN for a later `check_tokens`.
    """
    if len(logits) != len(params.records):
        raise ValueError(f"logits have {len(logits)} rows, the parameters {len(params.records)}")
    if logits.device.type == "cpu":
        return _sample_native(logits, params, check)
    triton_sampler = _triton_sampler() if logits.device.type == "cuda" else None
    sample = torch_sampler.sample if triton_sampler is None else triton_sampler.sample
    tokens, logprobs = sample(logits, params)
    if check:
        check_tokens(tokens.cpu().numpy(), params)
    return tokens, logprobs


class StepSampler:
    """Samples steps on one device, and returns on the host what they draw."""

    def __init__(self, device: torch.device) -> None:
        self._triton = _triton_sampler() if device.type == "cuda" else None

    def __call__(self, logits: torch.Tensor, params: RowParams) -> OnHost:
        """Return what `sample_rows` draws, unchecked: -1 and NaN for rows that cannot be sampled."""
        if self._triton is None:
            tokens, logprobs = sample_rows(logits, params, check=False)
            return tokens.cpu().numpy(), logprobs.cpu().numpy()
        drawn = self._triton.sample_packed(logits, params)
        host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
        host.copy_(drawn, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        tokens, logprobs = self._triton.unpacked(host, len(logits))
        return tokens.numpy(), logprobs.numpy()


@functools.cache
def _triton_sampler() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:  # builds of torch for GPUs bring it
        return None
    return importlib.import_module("seer.services.engine.vllm.sampling.triton_sampler")


def _sample_native(logits: torch.Tensor, params: RowParams, check: bool) -> tuple[torch.Tensor, torch.Tensor]:
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
    if check:
        check_tokens(tokens, params)
    return torch.from_numpy(tokens), torch.from_numpy(logprobs)


def check_tokens(tokens: npt.NDArray[np.int32], params: RowParams) -> None:
    """Raise `EngineError` naming the first row that could not be sampled (token -1)."""
    if tokens.min(initial=0) >= 0:
        return
    bad = np.flatnonzero(tokens < 0)
    row = int(bad[0])
    record = params.records[row]
    where = f"row {row} (key {int(record['key']):#x}, position {int(record['position'])})"
    raise EngineError(
        f"{len(bad)} of {len(tokens)} rows cannot be sampled; the first is {where}: its logits hold NaN or "
        "an infinite maximum, or every token is masked; check the weights, their dtype, and the request's "
        "logit_bias and temperature"
    )
