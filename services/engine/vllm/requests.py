"""How a chunk is put to vLLM, and what its request carries to every worker for our sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.checks import budget
from seer.services.engine.vllm.sampling.rows import RequestSampling

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

EXTRA = "seer"
"""Key of `Extra` in vLLM's `SamplingParams.extra_args`."""


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled.

    `capture` keeps the raw logits of its rows for `seer_take_captured`; `fault_position` is an
    absolute position that is sampled with a wrong key; `goes_on` says that the response will, when
    this chunk reaches its limit. For drafts: the tree that `group` names (empty: none) holds this
    response as `index`; the chunk ends at the latest with `limit` tokens, prompt included.
    """

    sampling: RequestSampling
    group: str
    index: int
    prompt_len: int
    limit: int
    capture: bool = False
    fault_position: int | None = None
    goes_on: bool = False
    acceptance: tuple[float, ...] = ()
    probe: bool = False


def engine_request(
    engine_id: str,
    chunk: Chunk,
    *,
    stop_ids: tuple[int, ...],
    vocab: int,
    capture: bool = False,
    fault_position: int | None = None,
    group: str = "",
) -> EngineCoreRequest:
    """Return the vLLM request of a chunk: greedy, ended by the token limit and stop ids alone."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    sampling = RequestSampling.pack(
        chunk.sampling, key=chunk.key, prompt_len=chunk.prompt_len, stop_ids=stop_ids, vocab=vocab
    )
    left = chunk.sampling.max_tokens - (len(chunk.tokens) - chunk.prompt_len)
    extra = Extra(
        sampling=sampling, group=group, index=chunk.index, prompt_len=chunk.prompt_len,
        limit=len(chunk.tokens) + budget(chunk), capture=capture, fault_position=fault_position,
        goes_on=budget(chunk) < left, acceptance=chunk.acceptance, probe=chunk.probe,
    )  # fmt: skip
    params = SamplingParams(
        temperature=0.0, max_tokens=budget(chunk), stop_token_ids=list(stop_ids), ignore_eos=True,
        detokenize=False, logprobs=0, extra_args={EXTRA: extra},
    )  # fmt: skip
    return EngineCoreRequest(
        request_id=engine_id, prompt_token_ids=chunk.tokens, mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
