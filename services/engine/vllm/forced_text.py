"""How much an engine's logits at one context vary with the way they are computed. For `seer verify`.

Invariant: all ways below reach the same context with the same weights, so that their logits differ by
rounding alone; their spread is this engine's numerical error at this context.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk, PlacedMedium
from seer.services.engine.vllm.probe import Probe
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable
from seer.services.engine.vllm.sampling.torch_sampler import noisy_logits

DECODED = 32
"""The decodes generate the last so many output tokens of the context."""

COMPANY = 15
"""Other rows in the second decode: another batch size changes the order of summation."""


def logits_by_ways(
    probe: Probe,
    context: list[int],
    prompt_len: int,
    key: int,
    sampling: SamplingParams,
    media: tuple[PlacedMedium, ...] = (),
) -> npt.NDArray[np.float32]:
    """Return the raw logits after `context`, in which `media` stand: [ways, vocab_size].

    The ways: a prefill of the whole context (except what is cached); a second one, with all full blocks
    cached; and two decodes of its last `DECODED` output tokens, one by one, sampled with the request's own
    key: alone, and beside `COMPANY` other rows. A decode that samples other tokens is left out, as it
    reaches another context.
    """
    ways = [probe.logits(context, prompt_len, media) for _ in range(2)]
    start = max(prompt_len, len(context) - DECODED)
    if start < len(context):
        chunk = Chunk(
            request_id="", group_id="", attempt=0, key=key, prompt_len=prompt_len,
            max_new_tokens=len(context) - start + 1, sampling=sampling, tokens=context[:start],
            media=media,
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

    Computed by the reference sampler, without truncation (top-p, top-k, min-p). Stop ids are not masked:
    min_tokens must be 0.
    """
    whole = replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
    request = RequestSampling.pack(whole, key=key, prompt_len=prompt_len, stop_ids=(), vocab=len(logits))
    params = SamplingTable([request]).step([len(context)], np.array([context], np.int32))
    processed, noisy, _ = noisy_logits(torch.from_numpy(logits[None].copy()), params)
    return processed[0].double().numpy(), noisy[0].double().numpy()
