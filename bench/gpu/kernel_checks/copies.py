"""How fast memory moves between host and GPU: pinned or not, many blocks or one, beside computing.

Invariant: every way that is timed is also checked to have moved the right bytes.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable

import numpy as np
import torch
from kernel_checks.timing import wall_us

from seer.doctor.device import DEVICE, GPU, wait
from seer.doctor.report_lines import Report

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (16 * _KIB, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)
_MOVED = 256 * _MIB
_MOST_CALLS = 256
_BLOCKS = 256
_FIX = "report the versions and this line: bytes were lost between host and GPU"
_SLOW_PCIE = "check the slot's PCIe generation and width (nvidia-smi -q), and that the host's memory is near"
_LEAST_PINNED = 5.0
"""GB/s of 64 MiB, half of what 16 lanes of PCIe 3 give."""


def copies(report: Report) -> None:
    """Time copies of the sizes of KV blocks, both ways, from three kinds of host memory."""
    if not GPU:
        report.skip("no GPU: nothing is copied")
        return
    begun = time.perf_counter()
    pinned = torch.empty(_SIZES[-1], dtype=torch.uint8, pin_memory=True)
    pin_seconds = time.perf_counter() - begun
    hosts = {"pinned": pinned, "pageable": torch.empty(_SIZES[-1], dtype=torch.uint8)}
    shared = mmap.mmap(-1, _SIZES[-1])
    registered = torch.frombuffer(shared, dtype=torch.uint8)
    registered.zero_()
    begun = time.perf_counter()
    code = int(torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), _SIZES[-1], 0))
    register_seconds = time.perf_counter() - begun
    report.expect(
        code == 0, "shared memory can be registered for copies",
        "raise the limit on locked memory (ulimit -l)", code=code,
        pin_gb_per_s=_SIZES[-1] / pin_seconds / 1e9,
        register_gb_per_s=_SIZES[-1] / register_seconds / 1e9,
    )  # fmt: skip
    if code == 0:
        hosts["registered"] = registered
    device = torch.randint(0, 256, (_SIZES[-1],), dtype=torch.uint8, device=DEVICE)
    back = torch.empty_like(device)
    for name, host in hosts.items():
        host.copy_(device)
        back.zero_().copy_(host)
        report.expect(torch.equal(back, device), f"{name} memory: bytes come back", _FIX)
        for way in ("to_host", "to_device"):
            speeds = {f"{size // _KIB}_kib": _gb_per_s(way, host, device, size) for size in _SIZES}
            report.note(f"{way}, {name}, GB/s by size", **speeds)
            if name == "pinned":
                fast = speeds[f"{_SIZES[-1] // _KIB}_kib"]
                report.expect(
                    fast > _LEAST_PINNED, f"{way}: pinned copies are fast", _SLOW_PCIE, gb_per_s=fast
                )
    if code == 0:
        torch.cuda.cudart().cudaHostUnregister(registered.data_ptr())
    _read_back(report)


def _gb_per_s(way: str, host: torch.Tensor, device: torch.Tensor, size: int) -> float:
    calls = max(1, min(_MOST_CALLS, _MOVED // size))
    to, source = (host, device) if way == "to_host" else (device, host)
    places = [(call * size) % (len(host) - size + 1) // 512 * 512 for call in range(calls)]
    pairs = [(to[at : at + size], source[at : at + size]) for at in places]

    def move() -> None:
        for target, origin in pairs:
            target.copy_(origin, non_blocking=True)

    return calls * size / wall_us(move, repeats=3) / 1e3


def _read_back(report: Report) -> None:
    """Time what a step reads: tokens and logprobs, one by one or in one pinned copy."""
    for rows in (64, 1024):
        tokens = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        logprobs = torch.rand(rows, device=DEVICE)
        host = torch.empty(2, rows, dtype=torch.int32, pin_memory=True)
        done = torch.cuda.Event()

        def packed(tokens: torch.Tensor = tokens, logprobs: torch.Tensor = logprobs) -> None:
            both = torch.stack((tokens, logprobs.view(torch.int32)))
            host.copy_(both, non_blocking=True)  # noqa: B023 - called in this round alone
            done.record()  # noqa: B023
            done.synchronize()  # noqa: B023

        apart = wall_us(functools.partial(_apart, tokens, logprobs))
        together = wall_us(packed)
        good = torch.equal(host[0], tokens.cpu()) and torch.equal(host[1].view(torch.float32), logprobs.cpu())
        report.expect(good, f"{rows} tokens and logprobs read back", _FIX, apart_us=apart, pinned_us=together)


def _apart(tokens: torch.Tensor, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens.cpu(), logprobs.cpu()


def gathers(report: Report) -> None:
    """Time moving scattered KV blocks: as pageable temporaries, one by one, or gathered and in one copy."""
    if not GPU:
        report.skip("no GPU: nothing is gathered")
        return
    for block in (16 * _KIB, 64 * _KIB, 288 * _KIB, _MIB):
        memory = torch.randint(0, 256, (8 * _BLOCKS, block), dtype=torch.uint8, device=DEVICE)
        ids = torch.from_numpy(np.random.default_rng(block).permutation(len(memory))[:_BLOCKS]).to(DEVICE)
        expected = memory[ids].cpu()
        rows = torch.empty(_BLOCKS, block, dtype=torch.uint8, pin_memory=True)
        text = f"{_BLOCKS} blocks of {block // _KIB} KiB"
        for way, calls in (("to host", _out(memory, ids, rows)), ("to device", _in(memory, ids, rows))):
            speeds, good = {}, True
            for name, call in calls.items():
                if way == "to host":
                    rows.zero_()
                else:
                    rows.copy_(expected)
                    memory[ids] = 0
                call()
                wait()
                good &= torch.equal(rows if way == "to host" else memory[ids].cpu(), expected)
                speeds[name] = rows.numel() / wall_us(call, repeats=5) / 1e3
            report.expect(good, f"{text} {way}, GB/s", _FIX, **speeds)


def _out(memory: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> dict[str, Callable[[], object]]:
    slots, numbers = torch.arange(len(rows)), ids.tolist()

    def pageable() -> None:
        rows[slots] = memory[ids].cpu()

    def one_by_one() -> None:
        for row, number in zip(rows, numbers, strict=True):
            row.copy_(memory[number], non_blocking=True)

    def gathered() -> None:
        rows.copy_(memory[ids], non_blocking=True)

    return {"pageable": pageable, "one_by_one": one_by_one, "gathered": gathered}


def _in(memory: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> dict[str, Callable[[], object]]:
    slots, numbers = torch.arange(len(rows)), ids.tolist()

    def pageable() -> None:
        memory[ids] = rows[slots].to(DEVICE)

    def one_by_one() -> None:
        for row, number in zip(rows, numbers, strict=True):
            memory[number].copy_(row, non_blocking=True)

    def gathered() -> None:
        memory.index_copy_(0, ids, rows.to(DEVICE, non_blocking=True))

    return {"pageable": pageable, "one_by_one": one_by_one, "gathered": gathered}


def overlap(report: Report) -> None:
    """Time copies on a stream of their own beside matrix products, and both ways at once."""
    if not GPU:
        report.skip("no GPU: there are no streams")
        return
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    device = torch.empty(2, 256 * _MIB, dtype=torch.uint8, device=DEVICE)
    host = torch.empty(2, 256 * _MIB, dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream() for _ in range(3)]

    def compute() -> None:
        with torch.cuda.stream(streams[0]):
            for _ in range(8):
                torch.mm(a, a)

    def out() -> None:
        with torch.cuda.stream(streams[1]):
            host[0].copy_(device[0], non_blocking=True)

    def back() -> None:
        with torch.cuda.stream(streams[2]):
            device[1].copy_(host[1], non_blocking=True)

    parts = {"compute": compute, "to_host": out, "to_device": back}
    alone = {name: wall_us(call, repeats=5) for name, call in parts.items()}
    report.note("alone, us", **alone)
    for names in (("compute", "to_host"), ("compute", "to_device"), ("to_host", "to_device"), tuple(parts)):
        both = wall_us(functools.partial(_all, [parts[name] for name in names]), repeats=5)
        longest, total = max(alone[name] for name in names), sum(alone[name] for name in names)
        hidden = (total - both) / (total - longest)
        report.note(f"{' and '.join(names)} at once", us=both, hidden=hidden)
        if "compute" in names:
            fix = "copies wait for computing: is CUDA_LAUNCH_BLOCKING set?"
            report.expect(hidden > 0.5, f"{' and '.join(names)}: more than half is hidden", fix)


def _all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
