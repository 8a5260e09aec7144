"""Time of an engine's steps by part: the host's share outside the forward pass, ours and vLLM's.

Invariant: a part's time is without what it calls of other parts, so that parts can be added up.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from typing import Any

from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.backend import VllmBackend

PARTS = {"seer": ("backend", "sampler", "proposer"), "vllm": ("scheduler", "runner")}
"""`backend`: results of a step, stops; `sampler`: what is prepared for the draw, and read from it;
`proposer`: drafts; `runner`: inputs, bookkeeping, the engine core. Beside them: `device`, the forward pass,
logits and the draw on CPUs, their launch on GPUs; `wait`: for a GPU."""

GROUP = 16
"""Requests of one group: they draft for each other."""

_PROMPT = (1, 9, 7, 5, 3)


class Clock:
    """Thread time by part, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def watch(self, owner: object, name: str, part: str) -> None:
        """Count the calls of a method, or of a function of a module, for a part."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def timed(*arguments: object, **named: object) -> object:
            self._inner.append(0.0)
            begun = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                whole = time.thread_time() - begun
                self.seconds[part] += whole - self._inner.pop()
                self._inner[-1] += whole

        setattr(owner, name, timed)


def watch_engine(backend: VllmBackend) -> Clock:
    """Time the parts of an engine's steps from now on. Its one rank must be in this process."""
    import torch

    from seer import _native

    core, clock = backend.core.engine_core, Clock()
    runner = core.model_executor.driver_worker.worker.model_runner
    clock.watch(runner.model, "forward", "device")
    clock.watch(runner.model, "compute_logits", "device")
    clock.watch(_native, "sample", "device")
    if torch.cuda.is_available():
        clock.watch(torch.cuda.Event, "synchronize", "wait")
    clock.watch(runner, "sample", "sampler")
    for name in ("schedule", "update_from_output", "update_draft_token_ids"):
        clock.watch(core.scheduler, name, "scheduler")
    if runner.speculator is not None:
        clock.watch(runner.speculator, "propose", "proposer")
    clock.watch(backend.core, "step", "runner")
    clock.watch(backend, "step", "backend")
    return clock


def run_steps(
    backend: VllmBackend,
    clock: Clock | None,
    rows: int,
    warm: int,
    steps: int,
    **sampling: Any,  # noqa: ANN401
) -> dict[str, float]:
    """Run so many requests, and return medians of `steps` steps after `warm` others.

    `wall` and each part, also their sums `seer` and `vllm`, are milliseconds a step; without a clock there is
    `wall` alone. `tokens_per_step` is what they generated. `sampling` are fields of `SamplingParams`.
    """
    for chunk in _chunks(backend, rows, warm + steps, sampling):
        backend.add(chunk)
    times: dict[str, list[float]] = defaultdict(list)
    generated = 0
    for step in range(warm + steps):
        if clock is not None:
            clock.seconds.clear()
        begun = time.perf_counter()
        output = backend.step()
        wall = time.perf_counter() - begun
        if step >= warm:
            generated += sum(len(one.token_ids) for one in output.generated)
            for part, seconds in {"wall": wall, **(clock.seconds if clock is not None else {})}.items():
                times[part].append(1e3 * seconds)
    for row in range(rows):
        backend.drop(str(row), 0)
    medians = {part: statistics.median(each) for part, each in times.items()}
    sums = {whose: sum(medians.get(part, 0.0) for part in parts) for whose, parts in PARTS.items()}
    found = medians if clock is None else sums | medians
    return {"tokens_per_step": round(generated / steps, 1)} | {
        name: round(ms, 2) for name, ms in found.items()
    }


def _chunks(backend: VllmBackend, rows: int, steps: int, sampling: dict[str, Any]) -> list[Chunk]:
    """Return requests that outlast so many steps, whatever is accepted of their drafts."""
    length = steps * (backend.capacity.draft_tokens + 1) + 1
    length = min(length, backend.capacity.max_model_len - len(_PROMPT) - 1 - backend.capacity.draft_tokens)
    given = SamplingParams(max_tokens=length, ignore_eos=True, **sampling)
    chunks = []
    for row in range(rows):
        tokens = [token % backend.core.vocab_size for token in (*_PROMPT, 6 + row // GROUP)]
        chunks.append(Chunk(
            request_id=str(row), group_id=f"g{row // GROUP}", index=row % GROUP, attempt=0, key=row,
            prompt_len=len(tokens), max_new_tokens=length, sampling=given, tokens=tokens,
        ))  # fmt: skip
    return chunks
