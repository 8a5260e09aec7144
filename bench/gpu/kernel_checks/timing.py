"""How long calls take on the device and on the host, and how much memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from seer.doctor.device import GPU, INTERPRETED, wait

_CYCLES_PER_US = 2_000
"""Of a GPU, or more: a sleep of twice what the host takes lets all that is timed wait in line."""

_SLEEP_CYCLES = (20_000_000, 400_000_000)
"""Least and most to sleep: 10 ms, and 0.2 s."""


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
