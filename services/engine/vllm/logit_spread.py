"""How much an engine's logits at one context vary with the way they are computed. For `seer verify`.

Invariant: all ways below reach the same context with the same weights, so that their logits differ by
rounding alone; their spread is this engine's numerical error at this context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk, PlacedImage
from seer.services.engine.vllm.core import CoreHandle
from seer.services.engine.vllm.probe import Probe
from seer.services.engine.vllm.requests import constraint_params
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable
from seer.services.engine.vllm.sampling.torch_sampler import noisy_logits

if TYPE_CHECKING:
    from seer.services.engine.vllm.grammars import Grammars

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
    images: tuple[PlacedImage, ...] = (),
) -> npt.NDArray[np.float32]:
    """Return the raw logits after `context`, in which `images` stand: [ways, vocab_size].

    First comes what no chunk of a rollout does: a prefill of the whole context as if it were a prompt, from
    its first token on, with nothing found in a cache. The other ways: the same with all full blocks cached,
    and two decodes of its last `DECODED` output tokens, one by one, sampled with the request's own key:
    alone, and beside `COMPANY` other rows. A decode that samples other tokens is left out, as it reaches
    another context.

    With a model of images, outputs are no prompts: what looks like an image there is text. What was generated
    goes on then as an output that is known, like a chunk's.
    """
    probe.core.reset_prefix_cache()
    ways = [probe.logits(context, prompt_len, images) for _ in range(2)]
    start, begun = _where_to_begin(context, prompt_len, sampling, probe.reads_images)
    if start < len(context):
        chunk = Chunk(
            request_id="", group_id="", attempt=0, key=key,
            prompt_len=prompt_len if probe.reads_images else start,
            max_new_tokens=len(context) + 1 - start, sampling=begun, tokens=context[:start], images=images,
        )  # fmt: skip
        rows = min(COMPANY, probe.core.capacity.max_num_seqs - 1)
        company = [replace(chunk, request_id=f"beside {i}", key=i) for i in range(rows)]
        for beside in ([], company):
            tokens, ranks = probe.capture(chunk, beside)
            if tokens[:-1] == context[start:]:
                ways.append(ranks[0][-1])
    return np.stack(ways)


def _where_to_begin(
    context: list[int], prompt_len: int, sampling: SamplingParams, resumed: bool
) -> tuple[int, SamplingParams]:
    """Return where decodes begin whose prompt is all before, and parameters with which they sample alike.

    What counts the output alone begins where the output does, at its first token. `resumed`: decodes do not
    begin with a prompt, and know their output.
    """
    if sampling.frequency_penalty or sampling.presence_penalty or sampling.structured_outputs:
        start = prompt_len
    else:
        start = max(prompt_len, len(context) - DECODED)
    gone = 0 if resumed else start - prompt_len
    most = len(context) + 1 - prompt_len - gone
    least = min(most, max(0, sampling.min_tokens - gone))
    # What ended the response is not in its context.
    return start, replace(sampling, stop=(), max_tokens=most, min_tokens=least)


def forbid(
    logits: npt.NDArray[np.float32],
    context: list[int],
    prompt_len: int,
    sampling: SamplingParams,
    core: CoreHandle,
) -> None:
    """Make those `logits` [ways, vocab_size] -inf whose tokens the request's constraint forbids."""
    params = constraint_params(sampling.structured_outputs)
    if params is not None:
        stop_ids = (*core.eos_ids, *sampling.stop_token_ids)
        grammars: Grammars = core.engine_core.structured_output_manager
        logits[:, ~grammars.allowed(params, context[prompt_len:], stop_ids)] = -np.inf


def noisy_values(
    logits: npt.NDArray[np.float32],
    context: list[int],
    prompt_len: int,
    key: int,
    sampling: SamplingParams,
    eos_ids: Sequence[int],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return logits [vocab_size] through the request's processors, without and with its noise.

    Computed by the reference sampler, without truncation (top-p, top-k, min-p). `eos_ids` are the model's.
    """
    whole = replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
    stop_ids = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids))
    request = RequestSampling.pack(
        whole, key=key, prompt_len=prompt_len, stop_ids=stop_ids, vocab=len(logits)
    )
    params = SamplingTable([request]).step([len(context)], np.array([context], np.int32))
    processed, noisy, _ = noisy_logits(torch.from_numpy(logits[None].copy()), params)
    return processed[0].double().numpy(), noisy[0].double().numpy()
