"""Sleep of a worker on CPUs, where vLLM has none: memory is given back to the system, and taken again.

Invariants (tests/unit/test_cpu_sleep.py):
- tensors stay the same objects, whoever has them: only their storages are resized;
- at level 1 weights stay; after level 2 parameters hold NaN, so weights that nobody loaded are noticed;
- buffers keep their values, as in vLLM's own sleep;
- copies of weights that vLLM packed for a CPU's instructions come back with the next load, not before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from seer.common.errors import EngineError
from seer.common.sleep import SleepLevel, SleepTag

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

PACKED = "cpu_linear"
"""vLLM's function of a layer on CPUs, which has a packed copy of its weight; each load makes it anew."""


class CpuSleep:
    """The memory of one worker. No CUDA graph holds its addresses, so it may come back elsewhere."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._freed: dict[SleepTag, list[tuple[torch.UntypedStorage, int]]] = {}
        self._dropped: list[torch.nn.Parameter] = []

    def sleep(self, tags: Collection[SleepTag], level: SleepLevel) -> None:
        """Have exactly these sleep; weights that stay at level 1 do not count."""
        if "weights" in tags and level > 1 and "weights" not in self._freed:
            self._drop_weights()
        if "kv_cache" in tags and "kv_cache" not in self._freed:
            self._freed["kv_cache"] = _free(self._runner.kv_caches)
        _trim()
        if "weights" not in tags and self._take("weights"):
            for parameter in self._dropped:
                if parameter.is_floating_point():
                    parameter.data.fill_(torch.nan)
        if "kv_cache" not in tags and self._take("kv_cache"):
            for tensor in self._runner.kv_caches:
                tensor.zero_()  # as at start: attention reads beyond valid KV, and masks it

    def _drop_weights(self) -> None:
        model = self._runner.get_model()
        for layer in model.modules():
            if PACKED in vars(layer):
                setattr(layer, PACKED, _without_weights)
        kept = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
        self._dropped = [each for each in model.parameters() if each.untyped_storage().data_ptr() not in kept]
        self._freed["weights"] = _free(self._dropped)

    def _take(self, tag: SleepTag) -> bool:
        """Take freed memory again; return whether there was any."""
        freed = self._freed.pop(tag, [])
        for storage, size in freed:
            storage.resize_(size)
        return bool(freed)


def _free(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Free the storages of tensors, some of which may share one; return them with their sizes in bytes."""
    storages = {each.data_ptr(): each for each in (tensor.untyped_storage() for tensor in tensors)}
    freed = [(each, each.nbytes()) for each in storages.values() if each.nbytes() and each.resizable()]
    for storage, _ in freed:
        storage.resize_(0)
    return freed


def _trim() -> None:
    """Have the C library give back what it keeps of freed memory, as of tensors of a few megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def _without_weights(*_: object) -> torch.Tensor:
    raise EngineError("this engine dropped its weights to sleep, and has loaded none since")
