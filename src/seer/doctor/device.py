"""The device that checks run on, and the sampler that an engine would use there."""

from __future__ import annotations

import importlib.util
import os

import torch

from seer.services.engine.vllm.sampling import torch_sampler
from seer.services.engine.vllm.sampling.torch_sampler import SampleFunction

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
INTERPRETED = not GPU and os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels on a CPU: right, and some thousand times too slow to time."""


def sampler() -> tuple[str, SampleFunction]:
    """Return the name of the device's sampler, and the sampler."""
    if GPU or INTERPRETED:
        from seer.services.engine.vllm.sampling import triton_sampler

        return "Triton kernels" + (" (interpreted)" if INTERPRETED else ""), triton_sampler.sample
    if importlib.util.find_spec("seer._native") is None:  # a checkout that is not installed
        return "torch (there is no native kernel)", torch_sampler.sample
    from seer.services.engine.vllm.sampling.sampler import sample_rows

    return "native kernel", sample_rows


def wait() -> None:
    """Wait until the device is idle."""
    if GPU:
        torch.cuda.synchronize()
