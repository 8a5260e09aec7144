"""`[engine.vllm]` reaches a real engine: KV in 8 bits, which vLLM has on CPUs, too.

Invariants:
- vLLM does what the setting says, and the engine reports it;
- the promise holds with it: the same tokens in one go and in chunks of any size;
- engines with other settings share no KV, whatever their weights.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_cases import Response, chunk, run

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

import torch

from seer.common.config import EngineConfig, SharedConfig
from seer.common.errors import EngineError
from seer.common.types import SamplingParams
from seer.common.vllm_settings import VllmSettings
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.kv_pool.sharing import KvSharing

pytestmark = pytest.mark.vllm

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"
LENGTH = 40
PROMPT = [1, *(5 + 7 * i % 60 for i in range(20))]
"""With the output it goes over a block of 32."""


@pytest.fixture(scope="module")
def backend() -> Iterator[VllmBackend]:
    cores = os.sched_getaffinity(0)
    config = EngineConfig(
        kv_blocks=64, max_num_seqs=8, max_model_len=256, cpu_cores=str(min(cores)),
        vllm=VllmSettings(kv_cache_dtype="fp8"),
    )  # fmt: skip
    backend = VllmBackend(config, SharedConfig(model=str(MODEL)))
    try:
        backend.start()
    except EngineError as error:
        if "requires x86 with AVX-512" not in str(error):
            raise
        pytest.skip("this processor has no 8-bit KV: AVX-512 or AMX")
    yield backend
    backend.close()
    os.sched_setaffinity(0, cores)


def response(backend: VllmBackend, sampling: SamplingParams, sizes: list[int]) -> Response:
    """Run a response in chunks of these sizes, the last one again and again."""
    made, sizes = Response(), list(sizes)
    while not made.ends or not made.finish[0]:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        tokens = PROMPT + made.tokens
        part = chunk("one", sampling, tokens=tokens, prompt_len=len(PROMPT), max_new_tokens=size)
        piece = run(backend, [part])["one"]
        made.tokens += piece.tokens
        made.logprobs += piece.logprobs
        made.ends += piece.ends
    return made


def test_kv_has_the_type_that_is_set_and_the_engine_says_so(backend: VllmBackend) -> None:
    runner = backend.core.engine_core.model_executor.driver_worker.worker.model_runner
    assert {cache.dtype for cache in runner.kv_caches} == {torch.uint8}
    assert runner.model_config.dtype == torch.float32, "8 bits would be the default with such a model"
    assert backend.versions["engine.vllm.kv_cache_dtype"] == "fp8"


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=LENGTH, ignore_eos=True),
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.0, repetition_penalty=1.3),
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, top_p=0.9, top_k=20, frequency_penalty=0.2),
    ],
)
def test_tokens_are_the_same_in_one_go_and_in_chunks(backend: VllmBackend, sampling: SamplingParams) -> None:
    whole = response(backend, sampling, [LENGTH])
    assert len(whole.tokens) == LENGTH
    for sizes in ([1], [5], [7], [3, 11, 2]):
        pieces = response(backend, sampling, sizes)
        assert len(pieces.ends) > 1
        assert pieces.tokens == whole.tokens
        assert pieces.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_engines_with_other_settings_share_no_kv(backend: VllmBackend) -> None:
    """Their KV may have the same bytes for other numbers: the type alone does not tell fp8 from others."""
    spaces: list[str] = []

    def rpc(method: str, **arguments: str) -> list[object]:
        if method == "seer_use_pool_namespace":
            spaces.append(arguments["namespace"])
            return [None]
        return backend.core.rpc(method, **arguments)

    backend._sharing = sharing = KvSharing(rpc, MODEL, backend.core.vllm_config)
    try:
        backend.bind_weights("weights")
        backend.bind_weights("weights")
        sharing.bind("weights")  # as an engine without settings does
        backend.bind_weights("other weights")
        backend.bind_weights("")
    finally:
        backend._sharing = None
    first, again, plain, other, none = spaces
    assert first == again
    assert len({first, plain, other, none}) == 4
    assert not none
