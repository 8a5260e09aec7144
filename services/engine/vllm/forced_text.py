"""An engine forced along a given text: what its logits are at one context, and what they become.

Invariants:
- every way below reaches the same context with the same weights, so that the logits differ by
  arithmetic alone; their spread is this engine's error at this context.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.probe import Probe
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable
from seer.services.engine.vllm.sampling.torch_sampler import noisy_logits

DECODED = 32
"""Output tokens before the context's end that a decode starts from, as chunks do."""

COMPANY = 15
"""Rows beside the decoded one: another batch size is another order of summation."""


def logits_by_ways(
    probe: Probe, context: list[int], prompt_len: int, key: int, sampling: SamplingParams
) -> npt.NDArray[np.float32]:
    """Return the raw logits after `context` [ways, vocab_size].

    The ways: one prefill of it all (but for what this engine had cached of it); one more, which
    finds all full blocks cached; and two decodes of its last `DECODED` output tokens, one by one,
    drawn with the request's own key: alone, and beside `COMPANY` other rows. A decode that draws
    other tokens is left out, since it reaches another context.
    """
    ways = [probe.logits(context), probe.logits(context)]
    start = max(prompt_len, len(context) - DECODED)
    if start < len(context):
        chunk = Chunk(
            request_id="", group_id="", attempt=0, key=key, prompt_len=prompt_len,
            max_new_tokens=len(context) - start + 1, sampling=sampling, tokens=context[:start],
        )  # fmt: skip
        rows = min(COMPANY, probe.core.capacity.max_num_seqs - 1)
        company = [replace(chunk, request_id=f"beside {i}", key=i) for i in range(rows)]
        for beside in ([], company):
            tokens, ranks = probe.capture(chunk, beside)
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
