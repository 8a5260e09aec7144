"""How fast the device's sampler is, against torch's own ways to draw and against a plain copy of the logits.

Invariants:
- peers run in the same process on the same logits;
- times are of the device alone (calls wait in line), from idle to idle (`wall`), and of the host alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from kernel_checks.timing import device_us, host_us, wall_us

from seer.doctor.device import GPU, INTERPRETED, sampler, wait
from seer.doctor.report_lines import Figure, Report
from seer.doctor.sample_rows import HISTORY, KINDS, of_kind, random_logits
from seer.services.engine.vllm.sampling.rows import SamplingTable

_VOCAB = 151_936 if GPU else 2_100 if INTERPRETED else 32_000
_ROWS = (1, 64, 256, 1024) if GPU else (2,)

_SLOW = "see docs/gpu.md for what an H100 takes; is another process using this GPU?"


def speed(report: Report) -> None:
    """Time every kind of request; fail where torch's own way would be faster."""
    if INTERPRETED:
        report.note("interpreted kernels: these times say nothing")
    _, sample = sampler()
    for dtype in (torch.float32, torch.bfloat16):
        for rows in _ROWS:
            logits = random_logits(rows, _VOCAB, dtype)
            shape = f"{rows} rows x {_VOCAB} {str(dtype).removeprefix('torch.')}"
            copy = device_us(logits.clone)
            report.note(
                f"{shape} copied", us=copy, gb_per_s=2 * logits.numel() * logits.element_size() / copy / 1e3
            )
            peers = {name: device_us(call, calls=3, repeats=2) for name, call in _peers(logits).items()}
            report.note(f"{shape}, torch's ways, us of device", **peers)
            for kind in KINDS:
                figures = _times(kind, logits, sample)
                peer = peers["sort_multinomial" if kind.startswith("top") else "exponential_argmax"]
                figures |= {"copies": figures["device_us"] / copy, "of_torch": figures["device_us"] / peer}
                report.note(f"{shape} {kind}", **figures)
                if GPU and rows == 256 and kind in ("plain", "top_p"):
                    good = figures["device_us"] < peer
                    report.expect(good, f"{shape} {kind}: faster than torch's way", _SLOW)
            random_logits.cache_clear()


def _steps(table: SamplingTable, rows: int, history: Any) -> Iterator[Any]:  # noqa: ANN401 - an array or None
    position = 100
    while True:
        position += 1
        yield table.step(np.full(rows, position if history is None else history.shape[1]), history)


def _times(kind: str, logits: torch.Tensor, sample: Callable[..., object]) -> dict[str, float]:
    table, history = of_kind(kind, len(logits), logits.shape[1], HISTORY if GPU else 100)
    steps = _steps(table, len(logits), history)

    def call() -> object:
        return sample(logits, next(steps))

    return {"device_us": device_us(call), "wall_us": wall_us(call), "host_us": host_us(call)}


def _peers(logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    def multinomial() -> object:
        return logits.float().softmax(-1).multinomial(1)

    def exponential_argmax() -> object:
        probabilities = logits.float().softmax(-1)
        return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1)

    def sort_multinomial() -> object:
        ranked, ids = logits.float().sort(-1, descending=True)
        probabilities = ranked.softmax(-1)
        probabilities[probabilities.cumsum(-1) - probabilities > 0.95] = 0.0
        return ids.gather(-1, probabilities.multinomial(1))

    def log_softmax() -> object:
        return logits.float().log_softmax(-1)

    calls = (multinomial, exponential_argmax, sort_multinomial, log_softmax)
    return {call.__name__: call for call in calls}


def compiled(report: Report) -> None:
    """Report what Triton made of the kernels, and how their device time divides."""
    if not GPU:
        report.skip("no GPU: nothing is compiled")
        return
    from seer.services.engine.vllm.sampling import triton_kernels as kernels

    _, sample = sampler()
    for rows, dtype in ((256, torch.float32), (256, torch.bfloat16), (1, torch.float32)):
        logits = random_logits(rows, _VOCAB, dtype)
        for kind in ("plain", "top_k_top_p", "penalties"):
            table, history = of_kind(kind, rows, _VOCAB)
            params = table.step(np.full(rows, HISTORY), history)
            text = f"{rows} rows {str(dtype).removeprefix('torch.')} {kind}, us of device by kernel"
            report.note(text, **_by_kernel(functools.partial(sample, logits, params)))
    for name in ("draw_kernel", "top_kernel", "cut_kernel", "mark_kernel"):
        for place, kernel in enumerate(_variants(getattr(kernels, name))):
            report.expect(
                kernel.n_spills == 0, f"{name}, variant {place}: no register is spilled",
                "report the versions and this line: the kernel is slower than it could be",
                registers=kernel.n_regs, spills=kernel.n_spills, shared_bytes=kernel.metadata.shared,
                instructions=_instructions(kernel), blocks_per_sm=65_536 // (max(kernel.n_regs, 1) * 128),
            )  # fmt: skip


def _variants(kernel: Any) -> list[Any]:  # noqa: ANN401 - Triton has no types
    caches = getattr(kernel, "device_caches", {})
    return [made for cache in caches.values() for made in cache[0].values()]


def _instructions(kernel: Any) -> Figure:  # noqa: ANN401 - Triton has no types
    try:
        return int(sum(line.count(";") for line in kernel.asm["sass"].splitlines() if "/*" not in line[:2]))
    except Exception as error:  # noqa: BLE001 - a figure is no reason to fail: its tool may be missing
        return f"unknown ({type(error).__name__})"


def _by_kernel(call: Callable[[], object], calls: int = 5) -> dict[str, float]:
    """Return the device microseconds of a call, by kernel."""
    call()
    wait()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            call()
        wait()
    times: dict[str, float] = {}
    for event in profile.events():
        if str(event.device_type).endswith("CUDA"):
            name = event.name.split("(")[0].removeprefix("void ")[:40]
            times[name] = times.get(name, 0.0) + event.time_range.elapsed_us() / calls
    return dict(sorted(times.items(), key=lambda pair: -pair[1])[:8])
