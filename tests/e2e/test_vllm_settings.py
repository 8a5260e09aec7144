"""`[engine.vllm]` reaches a real engine: KV in 8 bits, which vLLM has on CPUs, too.

Invariants:
- vLLM does what the setting says, and the engine reports it;
- the promise holds with it: the same tokens in one go and in chunks of any size.

That engines with other settings share no KV stands in tests/unit/test_vllm_settings.py.
"""

from collections.abc import Iterator

import pytest
import torch
from engine_cases import engine_of, in_chunks, one_go
from shared_engines import MODEL

from seer.common.errors import EngineError
from seer.common.types import SamplingParams
from seer.common.vllm_settings import VllmSettings
from seer.services.engine.vllm.backend import VllmBackend

LENGTH = 40
PROMPT = [1, *(5 + 7 * i % 60 for i in range(20))]
"""With the output it goes over a block of 32."""


@pytest.fixture(scope="module")
def backend() -> Iterator[VllmBackend]:
    settings = VllmSettings(kv_cache_dtype="fp8")
    try:
        with engine_of(MODEL, kv_blocks=64, max_num_seqs=8, vllm=settings) as backend:
            yield backend
    except EngineError as error:
        if "needs AVX-512" not in str(error):
            raise
        pytest.skip("this processor has no 8-bit KV: AVX-512 or AMX")


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
    whole = one_go(backend, sampling, prompt=PROMPT)
    assert len(whole.tokens) == LENGTH
    for pieces in in_chunks(backend, [[1], [5], [7], [3, 11, 2]], sampling, PROMPT):
        assert len(pieces.ends) > 1
        assert pieces.tokens == whole.tokens
        assert pieces.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
