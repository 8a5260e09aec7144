"""The vLLM request of a chunk, and what it carries to the workers for our sampler and drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from seer.common.beside import PROMPT_LOGPROBS, TOP_LOGPROBS, Array
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.checks import token_budget, tokens_left
from seer.services.engine.vllm.sampling.rows import RequestSampling

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

    from seer.common.structured_outputs import StructuredOutputs

EXTRA = "seer"
"""Key of `ExtraArgs` in vLLM's `SamplingParams.extra_args`."""


class ExtraArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What workers must know of a request.

    With `capture`, the raw logits of its rows are kept for `seer_take_captured`; `fault_position` is an
    absolute position that is sampled with a wrong key. `continues`: when the chunk reaches its limit, the
    response goes on in another chunk, or may do so in another turn; `parks`: after a stop it may, too. For
    drafts: `group` names the tree (empty: none), which knows this response as `index`; the chunk has at most
    `limit` tokens, prompt included. From `counts_from` on, tokens are of the response, or of its turn.
    """

    sampling: RequestSampling
    group: str
    index: int
    prompt_len: int
    limit: int
    capture: bool = False
    fault_position: int | None = None
    continues: bool = False
    parks: bool = False
    acceptance: tuple[float, ...] = ()
    probe: bool = False
    counts_from: int = 0


def engine_request(
    engine_id: str,
    chunk: Chunk,
    *,
    stop_ids: tuple[int, ...],
    vocab: int,
    capture: bool = False,
    fault_position: int | None = None,
    group: str = "",
    images: list[MultiModalFeatureSpec] | None = None,
) -> EngineCoreRequest:
    """Return the vLLM request of a chunk: greedy; only the token limit and stop ids end it."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    sampling = RequestSampling.pack(
        chunk.sampling, key=chunk.key, prompt_len=chunk.counts_from, stop_ids=stop_ids, vocab=vocab
    )
    extra = ExtraArgs(
        sampling=sampling, group=group, index=chunk.index, prompt_len=chunk.prompt_len,
        limit=len(chunk.tokens) + token_budget(chunk), capture=capture, fault_position=fault_position,
        continues=chunk.parks or token_budget(chunk) < tokens_left(chunk), parks=chunk.parks,
        acceptance=chunk.acceptance, probe=chunk.probe, counts_from=chunk.counts_from,
    )  # fmt: skip
    top = chunk.sampling.top_logprobs
    params = SamplingParams(
        temperature=0.0, max_tokens=token_budget(chunk), stop_token_ids=list(stop_ids), ignore_eos=True,
        detokenize=False, logprobs=0 if top is None else max(1, top),
        prompt_logprobs=chunk.prompt_logprobs, extra_args={EXTRA: extra},
        structured_outputs=constraint_params(chunk.sampling.structured_outputs),
    )  # fmt: skip
    return EngineCoreRequest(
        request_id=engine_id, prompt_token_ids=chunk.tokens, mm_features=images, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip


def logprobs_beside(output: EngineCoreOutput, chunk: Chunk, tokens: int) -> dict[str, Array]:
    """Return what a step's output has beside a chunk's new `tokens`, and beside its prompt, by word."""
    found, top = {}, chunk.sampling.top_logprobs
    if top is not None:
        ids, values, ranks, _ = output.new_logprobs
        found[TOP_LOGPROBS] = _packed(ids[:tokens, : 1 + top], values[:tokens, : 1 + top], ranks[:tokens])
    if output.new_prompt_logprobs_tensors is not None:
        parts = output.new_prompt_logprobs_tensors
        of_prompt = parts.logprob_token_ids, parts.logprobs, parts.selected_token_ranks
        found[PROMPT_LOGPROBS] = _packed(*(each.numpy() for each in of_prompt))
    return found


def _packed(ids: Array, values: Array, ranks: Array) -> Array:
    """Return logprobs as `common/beside.py` has them; ids and values [tokens, 1 + k] begin with own ones."""
    numbers = np.concatenate([ranks[:, None], ids[:, 1:]], axis=1)
    return np.stack([numbers, values], axis=1).astype("<f4")


def constraint_params(structure: StructuredOutputs | None) -> StructuredOutputsParams | None:
    """Return a constraint as vLLM has it."""
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.utils import choice_as_grammar

    if structure is None:
        return None
    if structure.choice is not None:
        return StructuredOutputsParams(grammar=choice_as_grammar(list(structure.choice)))
    return StructuredOutputsParams(**structure.given)
