"""Real vLLM cores as data-parallel ranks, unevenly loaded: the tokens of one engine.

Invariants:
- tokens, logprobs and experts of a response are those of an engine without ranks, before and after an update and a
  sleep, with drafts and without, and where its KV came from another rank or engine by the KV pool;
- ranks without a request run dummies; a rank that is killed ends the engine, and leaves the pool to others.
"""

import asyncio
import functools
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import Response, chunk, engine_of, run
from msgspec import structs
from pool_alone import pool_alone
from rank_backends import AGREED, patient
from shared_engines import MODEL
from tiny_families import tiny

from seer.common.config import Config, DraftsConfig, EngineConfig, PoolConfig, SharedConfig
from seer.common.errors import EngineError
from seer.common.pool_metrics import ask_master
from seer.common.process.scratch import private_temporary_folder
from seer.common.sleep import SleepState
from seer.common.types import SamplingParams
from seer.common.vllm_settings import VllmSettings
from seer.services.engine.backend import Chunk
from seer.services.engine.ranked import RankedBackend
from seer.services.engine.vllm.data_parallel import ranked_backend

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

LENGTHS = (5, 12, 60, 33, 7)
"""Of responses: in the end one rank has a request, and the other one none."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two tiny mixtures that differ in their weights alone."""
    folders = []
    for scale in (1.0, 1.1):
        folder, model = tmp_path_factory.mktemp("mixture"), tiny("qwen3-moe")
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.mul_(scale)
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((MODEL / name).read_bytes())
        folders.append(folder)
    return folders


def chunks(attempt: int = 0) -> list[Chunk]:
    return [
        chunk(
            f"r{i}", SamplingParams(max_tokens=length, ignore_eos=True), key=i + 1, attempt=attempt, routes_from=0,
            group_id=f"g{i % 2}", prompt=[1, *(5 + 7 * j % 60 for j in range(20 + i))], max_new_tokens=length,
        )
        for i, length in enumerate(LENGTHS)
    ]  # fmt: skip


SETTINGS = {"max_num_seqs": 8, "max_model_len": 160, "kv_blocks": 40, "routed_experts": True}


@contextmanager
def ranks(
    model: Path, source: str = "off", pool: PoolConfig | None = None, digest: str = "", ahead: bool = False
) -> Iterator[RankedBackend]:
    vllm = VllmSettings(data_parallel_size=2, enable_expert_parallel=True)
    backend = ranked_backend(
        Config(
            engine=EngineConfig(**SETTINGS, vllm=vllm, async_scheduling=ahead), shared=SharedConfig(model=str(model)),
            drafts=DraftsConfig(source=source, max_draft=4), pool=pool or PoolConfig(kind="none"),
        )
    )  # fmt: skip
    backend._make = functools.partial(patient, backend._make, ahead)
    with private_temporary_folder():  # as an engine's process has it
        try:
            backend.start()
            backend.bind_weights(digest)
            yield backend
        finally:
            backend.close()


@pytest.fixture(scope="module")
def expected(models: list[Path]) -> list[dict[str, Response]]:
    with engine_of(models[0], **SETTINGS) as backend:
        found = [run(backend, chunks())]
        backend.load_weights(models[1], "new")
        return [*found, run(backend, chunks())]


def assert_same(found: dict[str, Response], expected: dict[str, Response]) -> None:
    for name, length in zip(expected, LENGTHS, strict=True):
        ours, theirs = found[name], expected[name]
        assert len(ours.tokens) == length
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert np.array_equal(np.concatenate([end.routes for end in ours.ends]), theirs.ends[0].routes)


@pytest.mark.parametrize(
    "source",
    [
        "random",
        pytest.param("off", marks=pytest.mark.breadth),
        pytest.param("grouped", marks=pytest.mark.breadth),
    ],
)
def test_ranks_have_the_tokens_of_one_engine_until_one_is_killed(models, expected, source):
    """Without drafts they have them below, too."""
    with ranks(models[0], source) as backend:
        assert backend.capacity.kv_blocks == 80
        assert_same(run(backend, chunks()), expected[0])
        stats = backend.stats()
        assert stats.drafted_tokens > stats.accepted_tokens or source != "random"
        assert 20 < backend.lockstep.dummies < backend.lockstep.granted
        assert stats.dummy_steps == backend.lockstep.dummies
        backend.load_weights(models[1], "new")
        assert_same(run(backend, chunks(1)), expected[1])
        for state in (SleepState.ASLEEP, SleepState.AWAKE):
            backend.sleep(state, 1)
        assert_same(run(backend, chunks(2)), expected[1])
        backend.add(chunks(3)[2])
        backend.step()
        os.kill(backend._processes[1].pid, signal.SIGKILL)
        with pytest.raises(EngineError):
            while backend.has_work():
                backend.step()
    assert not backend._processes


def test_ranks_agree_on_the_drafts_of_each_step_ahead_and_dummies_are_as_large(
    models, expected, tmp_path, monkeypatch
):
    monkeypatch.setenv(AGREED, str(tmp_path))
    with ranks(models[0], "random", ahead=True) as backend:
        assert_same(run(backend, chunks()), expected[0])
        drafted = backend.stats().drafted_tokens
    steps = [line.split() for line in (tmp_path / "rank-0").read_text().splitlines()]
    agreed = [int(both) for _, _, both in steps]
    assert len(set(agreed) - {0}) > 2, "lengths were drawn at random"
    assert agreed.count(0) <= len(steps) // 3, "but where somebody prefills, or has no room for as many"
    assert drafted > 30


BLOCK, SIZE = 32, 16
"""Tokens of a KV block, and of a chunk."""


def advance(backend: RankedBackend, done: dict[str, Response], rounds: int, pool: PoolConfig) -> None:
    """Run the responses' next chunks, each on the rank that has not the KV of the one before."""
    for _ in range(rounds):
        parts = []
        for one in chunks():
            before = done[one.request_id]
            if not before.ends or not before.ends[-1].finish:
                routed = sum(len(each.routes) for each in before.ends)
                parts.append(
                    structs.replace(
                        one, attempt=len(before.ends), tokens=one.tokens + before.tokens, max_new_tokens=SIZE,
                        routes_from=routed,
                    )
                )  # fmt: skip
        homes = backend._placement.homes
        homes |= {name: 1 - rank for name, rank in homes.items()}
        for name, part in run(backend, parts).items():
            done[name].tokens += part.tokens
            done[name].logprobs += part.logprobs
            done[name].ends += part.ends
        until_saved(done, pool)


def until_saved(done: dict[str, Response], pool: PoolConfig) -> None:
    """Wait until the pool has all blocks of chunks that went on."""
    blocks = 0
    for one, length in zip(chunks(), LENGTHS, strict=True):
        went_on = min(len(done[one.request_id].tokens), (length - 1) // SIZE * SIZE)
        blocks += (len(one.tokens) + went_on - 1) // BLOCK
    deadline = time.monotonic() + 60
    while len(asyncio.run(ask_master(pool.metrics, "/get_all_keys", 60)).split()) < blocks:
        assert time.monotonic() < deadline, "blocks do not come into the pool"
        time.sleep(0.05)


def test_ranks_and_engines_find_each_other_s_kv_in_the_pool_with_its_experts(models, expected):
    pytest.importorskip("mooncake.store", reason="needs Mooncake and libibverbs1", exc_type=ImportError)
    done: dict[str, Response] = defaultdict(Response)
    with pool_alone(MODEL) as pool:
        with ranks(models[0], pool=pool, digest="old") as backend:
            advance(backend, done, 2, pool)
            assert backend.stats().pool_tokens == 2 * BLOCK, "of two responses, a block each"
            backend.add(structs.replace(chunks()[2], attempt=9))
            backend.step()
            os.kill(backend._processes[1].pid, signal.SIGKILL)
            with pytest.raises(EngineError):
                while backend.has_work():
                    backend.step()
        with ranks(models[0], pool=pool, digest="old", ahead=True) as backend:
            assert backend.versions["scheduling"] == "asynchronous"
            advance(backend, done, 2, pool)
            assert backend.stats().pool_tokens == 2 * BLOCK + 2 * BLOCK
            assert_same(done, expected[0])
            backend.load_weights(models[1], "new")
            (end,) = run(
                backend, [structs.replace(chunks()[2], tokens=chunks()[2].tokens + done["r2"].tokens[:40])]
            )["r2"].ends
            assert end.cached_tokens == 0
            assert_same(run(backend, chunks(10)), expected[1])
            stats = backend.stats()
            assert (stats.pool_tokens, stats.pinned_blocks, stats.free_blocks) == (4 * BLOCK, 0, 80)
            assert (stats.pool_failures, stats.pool_corrupt, stats.preemptions) == (0, 0, 0)
