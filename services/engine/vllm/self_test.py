"""Proves at start that our sampler samples the tokens which leave the engine.

Invariants:
- an engine starts only if the noise of every rank equals the reference, bit for bit;
- it starts only if its output equals what the reference implementation samples from the same logits. Another
  model runner, or a hook that vLLM no longer calls, fails that test.
"""

from __future__ import annotations

import numpy as np
import torch

from seer.common.errors import EngineError
from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.probe import Probe
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable
from seer.services.engine.vllm.sampling.torch_sampler import noisy_logits

_KEY = 0x5EED_0F_5EE2_7E57
_SAMPLING = SamplingParams(max_tokens=8, temperature=100.0, ignore_eos=True)
"""A high temperature, so that the noise decides: an engine that samples greedily cannot pass."""


def check(probe: Probe) -> None:
    """Raise `EngineError` when any rank's noise, or the engine's output, is not the reference's."""
    for rank, problem in enumerate(probe.noise_errors()):
        if problem:
            raise EngineError(f"self-test, rank {rank}: {problem}")
    prompt = [token % probe.core.vocab_size for token in (3, 1, 4, 1, 5)]
    chunk = Chunk(
        request_id="self-test", group_id="", attempt=0, key=_KEY, prompt_len=len(prompt),
        max_new_tokens=_SAMPLING.max_tokens, sampling=_SAMPLING, tokens=prompt,
    )  # fmt: skip
    tokens, ranks = probe.capture(chunk)
    for rank, logits in enumerate(ranks):
        if len(logits) != len(tokens):
            raise EngineError(
                f"self-test, rank {rank}: the engine produced {len(tokens)} tokens, our sampler sampled "
                f"{len(logits)}: vLLM samples by another path (is VLLM_USE_V2_MODEL_RUNNER overridden?)"
            )
        expected = _reference(logits, len(prompt), probe.core.vocab_size)
        if tokens != expected:
            raise EngineError(
                f"self-test, rank {rank}: the engine produced tokens {tokens} where the reference "
                f"sampler samples {expected} from the same logits"
            )


def _reference(logits: np.ndarray, first_position: int, vocab: int) -> list[int]:
    request = RequestSampling.pack(_SAMPLING, key=_KEY, prompt_len=first_position, stop_ids=(), vocab=vocab)
    positions = first_position + np.arange(len(logits))
    params = SamplingTable([request] * len(logits)).step(positions)
    noisy = noisy_logits(torch.from_numpy(logits), params)[1]
    tokens: list[int] = noisy.argmax(dim=-1).tolist()
    return tokens
