"""Streams, events, threads and graphs keep the sampler's order on this GPU.

Invariants:
- whoever waits for an event sees all that was launched before it, in a thread with other current streams too;
- calls that wait in line read what each was given, though they share pinned memory;
- a graph of the kernels draws the tokens of the parameters that lie in its buffer when it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from kernel_checks.timing import device_us, host_us, wall_us

from seer.doctor.device import DEVICE, GPU, sampler, wait
from seer.doctor.report_lines import Report
from seer.doctor.sample_rows import of_kind, random_logits
from seer.services.engine.vllm.sampling.rows import SamplingTable

if TYPE_CHECKING:
    from seer.services.engine.vllm.sampling.triton_sampler import Slab

_SLEEP = 100_000_000
"""Cycles: some 50 ms in which the host runs ahead."""

_SECONDS = 20.0
_ELEMENTS = 1 << 22
_VOCAB = 151_936 if GPU else 2_100
_FIX = "report the versions and this line; run with CUDA_LAUNCH_BLOCKING=1 until it is mended"


def streams(report: Report) -> None:
    """Check order between streams, threads and calls in line."""
    if not GPU:
        report.skip("no GPU: there is one order")
        return
    with ThreadPoolExecutor(1) as thread:
        for waits in ("event.synchronize", "stream.wait_event"):
            seen = thread.submit(_copy_in_thread, waits, *_fill_late()).result(_SECONDS)
            wait()
            report.expect(
                seen, f"a thread that waits by {waits} copies what another stream wrote before", _FIX
            )
        _, _, side = _fill_late()
        thread.submit(lambda: torch.cuda.current_stream().synchronize()).result(_SECONDS)
        report.note(
            "after a thread's current_stream().synchronize()", other_stream="done" if side.query() else "busy"
        )
        wait()
    _check_line(report)
    _check_thread(report)
    if torch.cuda.device_count() < 2:
        report.skip("one GPU: a thread whose current device is another one cannot be tried")


def _fill_late() -> tuple[torch.Tensor, torch.cuda.Event, torch.cuda.Stream]:
    data = torch.zeros(_ELEMENTS, dtype=torch.int32, device=DEVICE)
    wait()
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(_SLEEP)
        data.fill_(7)
        event.record()
    return data, event, side


def _copy_in_thread(
    waits: str, data: torch.Tensor, event: torch.cuda.Event, _side: torch.cuda.Stream
) -> bool:
    host = torch.empty(_ELEMENTS, dtype=torch.int32, pin_memory=True)
    own = torch.cuda.Stream()
    if waits == "event.synchronize":
        event.synchronize()
    else:
        own.wait_event(event)
    with torch.cuda.stream(own):
        host.copy_(data, non_blocking=True)
    own.synchronize()
    return bool((host == 7).all())


def _steps(kind: str, rows: int, count: int) -> list[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    _, sample = sampler()
    logits = random_logits(rows, _VOCAB, torch.float32)
    table, history = of_kind(kind, rows, _VOCAB, 200 + count)
    return [
        functools.partial(sample, logits, table.step(np.full(rows, 200 + step), history))
        for step in range(count)
    ]


def _check_line(report: Report) -> None:
    """Compare calls that wait in line, so that no pinned memory is free again, with calls one at a time."""
    for kind in ("plain", "top_k_top_p", "penalties"):
        calls = _steps(kind, 64, 40)
        alone = []
        for call in calls:
            alone.append(call())
            wait()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(_SLEEP)
            late = [call() for call in calls]
        side.synchronize()
        different = sum(
            not (torch.equal(tokens, other) and torch.equal(logprobs, shown))
            for (tokens, logprobs), (other, shown) in zip(late, alone, strict=True)
        )
        text = f"{len(calls)} calls of 64 rows {kind} in line on a stream of their own: as one at a time"
        report.expect(different == 0, text, _FIX, different=different)


def _check_thread(report: Report) -> None:
    """Sample in two threads at once, each on a stream of its own."""
    calls = _steps("top_p", 64, 20)
    expected = [call()[0].cpu() for call in calls]

    def draw() -> int:
        own = torch.cuda.Stream()
        different = 0
        for call, tokens in zip(calls, expected, strict=True):
            with torch.cuda.stream(own):
                drawn = call()[0]
                own.synchronize()
                different += not torch.equal(drawn.cpu(), tokens)
        return different

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(draw) for _ in range(2)]
        different = sum(one.result(_SECONDS) for one in both)
    report.expect(
        different == 0,
        "two threads sample at once on streams of their own: each as alone",
        _FIX,
        different=different,
    )


def graph(report: Report) -> None:
    """Capture the kernels once; replay them with other logits and parameters."""
    if not GPU:
        report.skip("no GPU: there are no graphs")
        return
    for rows in (1, 64, 256):
        for kind in ("plain", "top_k_top_p"):
            _check_graph(report, rows, kind)
    _try_whole(report)


def _slab(table: SamplingTable, rows: int, position: int) -> Slab:
    from seer.services.engine.vllm.sampling.triton_sampler import Slab

    return Slab(table.step(np.full(rows, position)), _VOCAB)


def _check_graph(report: Report, rows: int, kind: str) -> None:
    _, sample = sampler()
    logits = random_logits(rows, _VOCAB, torch.float32).clone()
    table, _ = of_kind(kind, rows, _VOCAB)
    tokens = torch.empty(rows, dtype=torch.int32, device=DEVICE)
    logprobs = torch.empty(rows, dtype=torch.float32, device=DEVICE)
    slab = _slab(table, rows, 100)
    sent = slab.send(DEVICE)
    slab.run(logits, sent, (tokens, logprobs))  # compiles
    sent.copy_(slab.send(DEVICE))
    wait()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        slab.run(logits, sent, (tokens, logprobs))

    def replay(position: int) -> None:
        sent.copy_(_slab(table, rows, position).send(DEVICE), non_blocking=True)
        captured.replay()

    different = 0
    for step in range(10):
        logits.copy_(logits.roll(1000, dims=1))
        replay(200 + step)
        other, shown = sample(logits, table.step(np.full(rows, 200 + step)))
        different += int(((tokens != other) | (logprobs.view(torch.int32) != shown.view(torch.int32))).sum())
    direct = functools.partial(sample, logits, table.step(np.full(rows, 300)))
    report.expect(
        different == 0, f"a graph of {rows} rows {kind}, replayed with other parameters: every bit", _FIX,
        different=different, replay_wall_us=wall_us(lambda: replay(300)),
        replay_host_us=host_us(lambda: replay(300)),
        kernels_us=device_us(captured.replay), direct_wall_us=wall_us(direct), direct_host_us=host_us(direct),
    )  # fmt: skip


def _try_whole(report: Report) -> None:
    """Find out what becomes of a whole call in a graph: its pinned copy is the host's."""
    call = _steps("plain", 64, 1)[0]
    expected = call()[0]
    wait()
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            tokens, _ = call()
        captured.replay()
        wait()
        equal = torch.equal(tokens, expected)
    except RuntimeError as error:
        report.note(f"a whole call cannot be captured: {str(error).splitlines()[0]}")
    else:
        report.note("a whole call can be captured", same_tokens=str(equal))
