"""Real vLLM cores as data-parallel ranks, unevenly loaded: the tokens of one engine.

Invariants:
- tokens, logprobs and experts of a response are those of an engine without ranks, before and after an update and a
  sleep, with drafts and without;
- ranks without a request run dummies; a rank that is killed ends the engine.
"""

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

import numpy as np
import torch
from engine_cases import Response, chunk, engine_of, run
from shared_engines import MODEL
from tiny_families import tiny

from seer.common.config import Config, DraftsConfig, EngineConfig, PoolConfig, SharedConfig
from seer.common.errors import EngineError
from seer.common.process.scratch import private_temporary_folder
from seer.common.sleep import SleepState
from seer.common.types import SamplingParams
from seer.common.vllm_settings import VllmSettings
from seer.services.engine.backend import Chunk
from seer.services.engine.ranked import RankedBackend
from seer.services.engine.vllm.data_parallel import ranked_backend

pytestmark = [pytest.mark.vllm, pytest.mark.ranks, pytest.mark.timeout(400)]

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
def ranks(model: Path, source: str = "off") -> Iterator[RankedBackend]:
    vllm = VllmSettings(data_parallel_size=2, enable_expert_parallel=True)
    backend = ranked_backend(
        Config(
            engine=EngineConfig(**SETTINGS, vllm=vllm), shared=SharedConfig(model=str(model)),
            drafts=DraftsConfig(source=source, max_draft=4), pool=PoolConfig(kind="none"),
        )
    )  # fmt: skip
    with private_temporary_folder():  # as an engine's process has it
        try:
            backend.start()
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
        assert np.array_equal(ours.ends[0].routes, theirs.ends[0].routes)


def test_ranks_have_the_tokens_of_one_engine_until_one_is_killed(models, expected):
    with ranks(models[0]) as backend:
        assert backend.capacity.kv_blocks == 80
        assert_same(run(backend, chunks()), expected[0])
        assert 20 < backend.lockstep.dummies < backend.lockstep.granted
        assert backend.stats().dummy_steps == backend.lockstep.dummies
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


@pytest.mark.parametrize("source", ["random", pytest.param("grouped", marks=pytest.mark.breadth)])
def test_ranks_that_draft_have_them_too(models, expected, source):
    with ranks(models[0], source) as backend:
        assert_same(run(backend, chunks()), expected[0])
        stats = backend.stats()
        assert stats.drafted_tokens > stats.accepted_tokens or source == "grouped"
