"""The device that checks run on, timing there, and the sampler that an engine would use there."""

from __future__ import annotations

import functools
import importlib.util
import os
import statistics
import time
from collections.abc import Callable

import torch

from seer.services.engine.vllm.sampling import torch_sampler
from seer.services.engine.vllm.sampling.torch_sampler import SampleFunction

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
INTERPRETED = not GPU and os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels on a CPU: right, and some thousand times too slow to time."""

_CYCLES_PER_US = 2_000
"""Of a GPU, or more: a sleep of twice what the host takes lets all that is timed wait in line."""

_SLEEP_CYCLES = (20_000_000, 400_000_000)
"""Least and most to sleep: 10 ms, and 0.2 s."""


def sampler() -> tuple[str, SampleFunction]:
    """Return the name of the device's sampler, and the sampler."""
    if GPU or INTERPRETED:
        from seer.services.engine.vllm.sampling import triton_sampler

        return "Triton kernels" + (" (interpreted)" if INTERPRETED else ""), triton_sampler.sample
    if importlib.util.find_spec("seer._native") is None:  # a checkout that is not installed
        return "torch (there is no native kernel)", torch_sampler.sample
    from seer.services.engine.vllm.sampling.sampler import sample_rows

    return "native kernel", functools.partial(sample_rows, check=False)


def wait() -> None:
    """Wait until the device is idle."""
    if GPU:
        torch.cuda.synchronize()


def wall_us(call: Callable[[], object], repeats: int = 15) -> float:
    """Return the median microseconds of a call, from an idle device to an idle device."""
    return _median(call, repeats, waits=True)


def host_us(call: Callable[[], object], repeats: int = 15) -> float:
    """Return the median microseconds in which a call returns to the host, with an idle device before."""
    return _median(call, repeats, waits=False)


def _median(call: Callable[[], object], repeats: int, *, waits: bool) -> float:
    call()
    times = []
    for _ in range(1 if INTERPRETED else repeats):
        wait()
        begun = time.perf_counter()
        call()
        if waits:
            wait()
        times.append(time.perf_counter() - begun)
    wait()
    return 1e6 * statistics.median(times)


def device_us(call: Callable[[], object], calls: int = 10, repeats: int = 5) -> float:
    """Return the least microseconds of device time of a call, where `calls` of them wait in line."""
    if not GPU:
        return wall_us(call)
    least, most = _SLEEP_CYCLES
    cycles = min(most, max(least, int(2 * calls * host_us(call, 3) * _CYCLES_PER_US)))
    times = []
    for _ in range(repeats + 1):  # the first fills the allocators, which may wait
        wait()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        wait()
        times.append(1000 * begin.elapsed_time(end) / calls)
    return float(min(times[1:]))


def peak_bytes(call: Callable[[], object]) -> int:
    """Return how much more device memory was allocated during a call than before it."""
    call()
    wait()
    torch.cuda.reset_peak_memory_stats()
    before: int = torch.cuda.memory_allocated()
    call()
    wait()
    return int(torch.cuda.max_memory_allocated()) - before
