"""Launches of Triton kernels that cost the host little.

At each launch Triton compares all arguments, options and globals with those it compiled for. What it compiled
can be launched directly.

Invariant: the kernel launched is the one that Triton would choose: our key has whatever it compiles anew for.
"""

from __future__ import annotations

from typing import Any

import torch

from seer.services.engine.vllm.sampling.triton_kernels import LAUNCH

_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,  # noqa: ANN401 - Triton has no types
    programs: int,
    arguments: tuple[Any, ...],
    *constants: int,
) -> None:
    """Launch a kernel on the current stream; `constants` are its last parameters, those that are constexpr.

    The first argument is a tensor on the current device.
    """
    key = (id(kernel), arguments[0].device.index, constants, *map(_kind, arguments))
    found = _compiled.get(key)
    if found is not None:
        found[(programs, 1, 1)](*arguments, *constants)
        return
    compiled = kernel[(programs,)](*arguments, *constants, **LAUNCH)
    if hasattr(compiled, "packed_metadata"):  # what the interpreter returns is no kernel
        _compiled[key] = compiled


def _kind(argument: torch.Tensor | int) -> object:
    """Return what Triton compiles anew for: types, alignment, and integers that are 1, multiples or wide."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument == 1, argument % 16 == 0, argument.bit_length() > 31
