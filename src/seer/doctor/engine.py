"""An engine of the configuration, in this process: its start, its largest batch, its steps, sleep and
updates.

Invariants:
- checks of one process share one engine, which has the share of the machine that it gets in a whole system;
- tokens after sleep, and after loading the same weights again, are those from before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from seer.common.config import Config, load
from seer.common.errors import SeerError
from seer.common.process.scratch import private_temporary_folder
from seer.common.sleep import SleepState
from seer.common.types import SamplingParams
from seer.doctor.checked_config import given
from seer.doctor.report_lines import Report
from seer.local.beside import beside
from seer.local.hardware import plan_engines
from seer.services.engine.backend import Backend, Chunk

if TYPE_CHECKING:
    from seer.services.engine.vllm.backend import VllmBackend

BATCHES = (1, 8, 64, 256, 1024)
DRAFTS = (0, 1, 2, 4, 8, 16)
"""What the step table has, as far as the engine's limits allow."""

WARM, STEPS = 3, 9
"""Untimed and timed steps per entry of the table."""

LARGE_HOST_SHARE = 0.4
"""On GPUs, a host that takes more of a step keeps the device waiting."""

REQUESTS, TOKENS = 4, 32
"""Requests whose tokens are compared, and how many of each."""

_PLAIN = 64
"""Token ids that every model has."""

_RSS = 18
"""Place of the resident pages in `/proc/PID/stat`, counted from behind the process group."""

_files = contextlib.ExitStack()
"""The engine's temporary files. Never closed: whoever starts next removes what this process leaves."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A started engine; `seconds` is how long that took."""

    config: Config
    backend: VllmBackend
    seconds: float

    @property
    def gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.backend.core.versions["device"] == "cuda"

    @property
    def max_draft(self) -> int:
        """Most drafted tokens of a request and step; 0 without drafts."""
        return self.config.drafts.max_draft if self.config.drafts.source != "off" else 0


@functools.cache
def started(config_file: str) -> Engine:
    """Return the engine of a configuration, started once in this process. Raises `SeerError`."""
    from seer.services.engine.vllm.backend import VllmBackend

    _files.enter_context(private_temporary_folder())
    config = _files.enter_context(beside(load(Path(config_file))))
    plan = plan_engines(config.engine, None)[0]
    os.environ.update(plan.environ)
    begun = time.monotonic()
    backend = VllmBackend(plan.config, config.shared, None, config.drafts)
    backend.start()
    return Engine(replace(config, engine=plan.config), backend, time.monotonic() - begun)


def start(report: Report) -> None:
    """Start the engine; say what it resolved, and compare every rank's noise with the reference."""
    if not given(report).shared.model:
        report.expect(
            False, "no model is given, so no engine was checked", "give --model DIR: a small one is enough"
        )
        return
    try:
        if given(report).engine.vllm.data_parallel_size > 1:
            _start_ranks(report, given(report))
            return
        engine = started(report.config)
    except SeerError as error:
        report.expect(False, str(error), "do what the line says, and run `seer doctor --only start`")
        return
    backend, seconds = engine.backend, round(engine.seconds, 1)
    report.expect(True, "an engine starts, and its tokens are those of the reference", "", seconds=seconds)
    capacity = backend.capacity
    report.note(
        "capacity", kv_blocks=capacity.kv_blocks, block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs, max_model_len=capacity.max_model_len,
        max_num_batched_tokens=backend.core.vllm_config.scheduler_config.max_num_batched_tokens,
        kv_tokens=capacity.kv_blocks * capacity.block_size,
    )  # fmt: skip
    report.note("versions", **backend.versions, layout=backend.core.rpc("seer_kv_layout")[0][0])
    _say_graphs(report, engine)
    for rank, problem in enumerate(backend.probe.noise_errors()):
        text = f"rank {rank}: the sampler's noise is the reference's, bit for bit"
        report.expect(not problem, problem or text, "run `--only bits,repeats`, and report what it says")


def _start_ranks(report: Report, config: Config) -> None:
    """Start all data-parallel ranks, and have them run the same twice. Raises `SeerError`."""
    from seer.services.engine.vllm.data_parallel import ranked_backend

    with private_temporary_folder(), beside(config) as own:
        plan = plan_engines(own.engine, None)[0]
        os.environ.update(plan.environ)
        backend = ranked_backend(replace(own, engine=plan.config, pool=replace(own.pool, kind="none")))
        begun = time.monotonic()
        try:
            backend.start()
            seconds = round(time.monotonic() - begun, 1)
            tokens, again = (tokens_of(backend, _PLAIN, attempt) for attempt in range(2))
        finally:
            backend.close()
    capacity = backend.capacity
    report.expect(
        tokens == again, f"{capacity.parts} data-parallel ranks start, and give the same tokens twice",
        "report this, with `seer doctor --bundle`", seconds=seconds,
    )  # fmt: skip
    report.note(
        "capacity of all ranks", ranks=capacity.parts, kv_blocks=capacity.kv_blocks,
        block_size=capacity.block_size, max_num_seqs=capacity.max_num_seqs,
        max_model_len=capacity.max_model_len,
    )  # fmt: skip
    report.note("versions", **backend.versions)


def in_one_process(check: Callable[[Report], None]) -> Callable[[Report], None]:
    """Return a check that is left out where data-parallel ranks are processes of their own."""

    @functools.wraps(check)
    def checked(report: Report) -> None:
        ranks = given(report).engine.vllm.data_parallel_size
        if ranks == 1:
            check(report)
        else:
            report.skip(
                f"{ranks} data-parallel ranks are processes of their own: this looks into one process"
            )

    return checked


def _say_graphs(report: Report, engine: Engine) -> None:
    compilation = engine.backend.core.vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    sizes = compilation.cudagraph_capture_sizes or []
    shown = {
        "graph_mode": getattr(mode, "name", str(mode)),
        "graph_sizes": len(sizes),
        "largest": max(sizes, default=0),
    }
    report.note("graphs", compile_mode=str(compilation.mode), **shown)
    if engine.gpu:
        graphs = bool(sizes) and shown["graph_mode"] != "NONE"
        report.prefer(
            graphs, "steps run as CUDA graphs" if graphs else "steps run without CUDA graphs",
            "leave out engine.vllm.enforce_eager and cudagraph_mode: else the host launches each kernel",
        )  # fmt: skip


@in_one_process
def largest_batch(report: Report) -> None:
    """Run the largest batch that the sampler can meet, on every rank; fail if it does not fit."""
    engine = started(report.config)
    try:
        ranks = engine.backend.core.rpc("seer_measure_largest_batch", max_draft=engine.max_draft)
    except Exception as error:  # noqa: BLE001 - whatever a full device raises in a worker
        report.expect(
            False, f"the largest batch fails: {error}", "lower engine.max_num_seqs or drafts.max_draft"
        )
        return
    for rank, found in enumerate(ranks):
        report.expect(
            True, f"rank {rank}: the largest batch fits beside KV", "", rows=int(found["rows"]),
            seconds=round(found["seconds"], 3), logits_mib=round(found["logits_bytes"] / 2**20, 1),
            peak_mib=round(found["peak_bytes"] / 2**20, 1),
        )  # fmt: skip


@in_one_process
def step_table(report: Report) -> None:
    """Time steps by batch and drafts, and the host's share of them outside the forward pass."""
    from seer.doctor.step_clock import run_steps, watch_engine

    engine = started(report.config)
    backend, capacity = engine.backend, engine.backend.capacity
    clock = None
    if engine.config.engine.tensor_parallel == 1:
        clock = watch_engine(backend)
    else:
        report.skip("several ranks: the host's share is not measured, as they are processes of their own")
    most = min(capacity.max_num_seqs, capacity.kv_blocks // capacity.blocks_for(16, 256))
    for batch in [each for each in BATCHES if each < most] + [max(1, most)]:
        for drafts in [each for each in DRAFTS if each <= engine.max_draft]:
            if engine.max_draft:
                backend.probe.hold_drafts(drafts)
            found = run_steps(backend, clock, batch, WARM, STEPS)
            host = {} if clock is None else {
                "seer_ms": found["seer"], "vllm_ms": found["vllm"],
                "host_share": round((found["seer"] + found["vllm"]) / found["wall"], 2),
            }  # fmt: skip
            report.note("step", batch=batch, drafts=drafts, ms=found["wall"], **host)
    if engine.max_draft:
        backend.probe.hold_drafts(None)
    if engine.gpu and clock is not None:
        share = float(host["host_share"])
        report.prefer(
            share <= LARGE_HOST_SHARE, f"the host takes {share:.0%} of the largest batch's step",
            "give engines faster or more CPU cores, and leave engine.async_scheduling out",
        )  # fmt: skip


@in_one_process
def sleep(report: Report) -> None:
    """Sleep and wake at level 1, then at level 2 as colocated trainers do: the same tokens each time."""
    engine = started(report.config)
    backend, model = engine.backend, Path(engine.config.shared.model)
    plain = backend.core.plain_tokens
    expected = tokens_of(backend, plain)
    before = memory_in_use(engine.gpu)
    asleep = _seconds(lambda: backend.sleep(SleepState.ASLEEP, 1))
    freed = (before - memory_in_use(engine.gpu)) / 2**20
    awake = _seconds(lambda: backend.sleep(SleepState.AWAKE, 1))
    report.prefer(
        freed > 0, "sleep frees memory" if freed > 0 else "sleep frees no memory",
        "see which other processes took memory meanwhile",
        freed_mib=round(freed, 1), seconds=asleep, wake_seconds=awake,
    )  # fmt: skip
    _compare(report, "after sleep", expected, tokens_of(backend, plain))
    asleep = _seconds(lambda: backend.sleep(SleepState.ASLEEP, 2))
    freed = (before - memory_in_use(engine.gpu)) / 2**20
    backend.sleep(SleepState.KV_ASLEEP, 2)
    load = _seconds(lambda: backend.load_weights(model, ""))
    awake = _seconds(lambda: backend.sleep(SleepState.AWAKE, 2))
    report.note(
        "level 2, weights loaded while KV sleeps",
        freed_mib=round(freed, 1), seconds=asleep, load_seconds=load, wake_seconds=awake,
    )  # fmt: skip
    _compare(report, "after level 2 and loading the same weights", expected, tokens_of(backend, plain))


def _compare(report: Report, when: str, expected: list[list[int]], found: list[list[int]]) -> None:
    different = sum(
        a != b for one, other in zip(expected, found, strict=True) for a, b in zip(one, other, strict=True)
    )
    report.expect(expected == found, f"the same tokens {when}",
                  "report this, with `seer doctor --bundle`", different=different)  # fmt: skip


def tokens_of(backend: Backend, plain: int, attempt: int = 0) -> list[list[int]]:
    """Return the tokens of a few requests, one after the other in the engine's first free batch.

    Token ids below `plain` stand for no image.
    """
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    found: list[list[int]] = [[] for _ in range(REQUESTS)]
    for row in range(REQUESTS):
        prompt = [(row + 5 * i + 1) % plain for i in range(12)]
        backend.add(Chunk(
            request_id=str(row), group_id="", attempt=attempt, key=row, prompt_len=len(prompt),
            max_new_tokens=TOKENS, sampling=sampling, tokens=prompt,
        ))  # fmt: skip
    while backend.has_work():
        for generated in backend.step().generated:
            found[int(generated.request_id)] += generated.token_ids
    return found


def memory_in_use(gpu: bool) -> int:
    """Return the bytes in use: on the whole device, or of this process and its ranks."""
    if gpu:
        import torch

        free, total = torch.cuda.mem_get_info()
        return int(total - free)
    pages, ours = 0, os.getpgrp()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, _, group, *rest = stat.read_text().rpartition(")")[2].split()
            pages += int(rest[_RSS]) if int(group) == ours else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _seconds(work: Callable[[], None]) -> float:
    begun = time.monotonic()
    work()
    return round(time.monotonic() - begun, 2)
