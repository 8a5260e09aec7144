"""The KV pool against computing: what an engine fetches and prefills in a second, and what follows."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from seer.common.config import Config
from seer.common.errors import SeerError
from seer.common.types import SamplingParams
from seer.doctor.checked_config import given
from seer.doctor.engine import in_one_process
from seer.doctor.report_lines import Report
from seer.local.beside import beside
from seer.local.child import Child
from seer.local.hardware import plan_engines
from seer.local.pool_plan import POOL_SERVICES, plan_pool
from seer.services.engine.backend import Chunk

if TYPE_CHECKING:
    from seer.common.policy.fetch_choice import FetchChoice
    from seer.services.engine.vllm.backend import VllmBackend

LENGTHS = (512, 1024, 2048)
"""Tokens of the contexts that are computed, saved and fetched; the engine's limit bounds them."""

ROUNDS = 4
START_SECONDS, SAVE_SECONDS = 60.0, 30.0


@in_one_process
def check(report: Report) -> None:
    """Compute contexts, save them, fetch them again, and compare."""
    config = given(report)
    plan = plan_pool(config.pool, config.engine, private=True)
    if plan.config.kind == "none":
        report.skip(plan.note or "pool.kind = none: engines share no KV")
        return
    config = replace(config, pool=replace(plan.config, pull_tokens=0))
    try:
        with beside(config) as own:
            asyncio.run(_with_pool(report, own, starts=plan.starts))
    except SeerError as error:
        report.expect(False, f"no engine with the KV pool: {error}", "mend that, or set pool.kind = none")


async def _with_pool(report: Report, config: Config, *, starts: bool) -> None:
    """Start the pool if it is ours, and measure; both end with it."""
    with tempfile.TemporaryDirectory(prefix="seer-doctor-") as folder, ExitStack() as stack:
        for name in POOL_SERVICES if starts else ():
            child = await Child.spawn(name, name, config, {}, Path(folder), logged=True)
            stack.callback(child.kill_group)
            await child.ready(START_SECONDS)
        await asyncio.to_thread(_measure, report, config)


def _measure(report: Report, config: Config) -> None:
    from seer.services.engine.vllm.backend import VllmBackend

    engine = plan_engines(config.engine, None)[0]
    os.environ.update(engine.environ)
    backend = VllmBackend(engine.config, config.shared, config.pool)
    backend.start()
    try:
        backend.bind_weights(f"doctor-{uuid.uuid4()}")
        for row, length in enumerate(_lengths(backend)):
            saved = _handled(backend) + (length - 1) // backend.capacity.block_size
            for expected in (saved, 0):  # computed and saved, then fetched
                _run(backend, row, length)
                _until_saved(backend, expected)
                backend.core.reset_prefix_cache()
        _judge(report, backend)
    finally:
        backend.close()


def _lengths(backend: VllmBackend) -> Iterator[int]:
    most = backend.capacity.max_model_len - 2
    for length in LENGTHS:
        if length <= most:
            yield from [length] * ROUNDS


def _run(backend: VllmBackend, row: int, length: int) -> None:
    """Run a context for a token; then its chunk ends, and its KV is saved, as its response goes on."""
    tokens = [(row * 31 + i * 7) % backend.core.plain_tokens for i in range(length - 1)]
    backend.add(Chunk(
        request_id=str(row), group_id="", attempt=0, key=row, prompt_len=length - 1, max_new_tokens=1,
        sampling=SamplingParams(max_tokens=2, ignore_eos=True), tokens=tokens,
    ))  # fmt: skip
    while backend.stats().running or backend.stats().waiting:
        backend.step()


def _until_saved(backend: VllmBackend, blocks: int) -> None:
    """Step until so many blocks are saved and none is held. Raises `SeerError` if that takes too long."""
    deadline = time.monotonic() + SAVE_SECONDS
    most = backend.capacity.kv_blocks
    while backend.has_work() or backend.core.kv.free < most or _handled(backend) < blocks:
        backend.step()
        if time.monotonic() > deadline:
            raise SeerError(f"the pool did not take KV within {SAVE_SECONDS:g} s")


def _handled(backend: VllmBackend) -> int:
    """Return how many blocks every rank has saved, or given up."""
    counts: list[dict[str, int]] = backend.core.rpc("seer_pool_counts")
    return min(each.get("saved_blocks", 0) + each.get("dropped_blocks", 0) for each in counts)


def _judge(report: Report, backend: VllmBackend) -> None:
    stats = backend.stats()
    report.expect(
        stats.pool_tokens > 0 and not stats.pool_failures and not stats.pool_corrupt,
        "an engine fetches KV that it has saved",
        "see what the pool logs, and docs/kv-pool.md",
        fetched_tokens=stats.pool_tokens, failures=stats.pool_failures, corrupt=stats.pool_corrupt,
        dropped_blocks=stats.pool_dropped_blocks,
    )  # fmt: skip
    choice: FetchChoice = backend.core.engine_core.scheduler.connector.choice
    speeds = choice.speeds()
    if speeds is None:
        report.skip("too few contexts were fetched to compare: raise engine.max_model_len")
        return
    latency, fetch, compute = speeds
    size = token_bytes(backend)
    pull = choice.pull_tokens(time.monotonic())
    report.note(
        "fetching against computing", kv_bytes_per_token=size,
        fetch_gb_per_s=round(size / fetch / 1e9, 3) if fetch else None,
        fetch_tokens_per_s=round(1 / fetch) if fetch else None, fetch_latency_ms=round(1e3 * latency, 1),
        prefill_tokens_per_s=round(1 / compute), prefill_gb_per_s=round(size / compute / 1e9, 3),
        pull_tokens=pull,
    )  # fmt: skip


def token_bytes(backend: VllmBackend) -> int:
    """Return the bytes of one token's KV, on all ranks together."""
    kv = backend.core.engine_core.scheduler.kv_cache_config
    size: int = sum(each.size for each in kv.kv_cache_tensors)
    ranks: int = backend.core.vllm_config.parallel_config.tensor_parallel_size
    tokens: int = kv.num_blocks * backend.capacity.block_size
    return size * ranks // tokens
