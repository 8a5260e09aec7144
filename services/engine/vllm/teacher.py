"""An engine forced along a given text: what its logits are at one context, and what they become.

Invariants:
- every way below reaches the same context with the same weights, so that the logits differ by
  arithmetic alone; their spread is the error of this engine at this context.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.sampling import RequestSampling, SamplingTable
from seer.services.engine.vllm.sampling_torch import noisy_logits

DECODED = 32
"""Tokens before the context's end that the last way decodes one by one, as rollouts do."""


def logits_by_ways(
    backend: VllmBackend, context: list[int], prompt_len: int, key: int, sampling: SamplingParams
) -> npt.NDArray[np.float32]:
    """Return the raw logits after `context` [ways, vocab_size].

    The ways: one prefill of all of it (but of what this engine prefilled before); one more, which
    finds all full blocks cached and prefills the rest; and a decode of the last `DECODED` output
    tokens, one by one at batch 1, drawn with the request's own key. The last is left out when that
    draws other tokens: it is then another context.
    """
    ways = [backend.logits(context), backend.logits(context)]
    tail = min(DECODED, len(context) - prompt_len)
    if tail:
        start = len(context) - tail
        chunk = Chunk(
            request_id="", group_id="", attempt=0, key=key, prompt_len=prompt_len, max_new_tokens=tail + 1,
            sampling=sampling, tokens=context[:start],
        )  # fmt: skip
        tokens, ranks = backend.captured(chunk)
        if tokens[:-1] == context[start:]:
            ways.append(ranks[0][-1])
    return np.stack(ways)


def noisy_values(
    logits: npt.NDArray[np.float32], context: list[int], prompt_len: int, key: int, sampling: SamplingParams
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return logits [vocab_size] through the request's processors, without and with its noise.

    By the reference sampler. Not truncated; stop ids are not masked: min_tokens must be 0.
    """
    whole = replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
    request = RequestSampling.pack(whole, key=key, prompt_len=prompt_len, stop_ids=(), vocab=len(logits))
    params = SamplingTable([request]).step([len(context)], np.array([context], np.int32))
    processed, noisy, _ = noisy_logits(torch.from_numpy(logits[None].copy()), params)
    return processed[0].double().numpy(), noisy[0].double().numpy()
