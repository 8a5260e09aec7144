"""Refuses chunks that this engine cannot run, before vLLM sees them: they would fail a step of all others.

Invariant: a chunk that passes runs to its end: its tokens exist, it fits, and some token can always be
sampled.
"""

from __future__ import annotations

from collections.abc import Iterable

from seer.common.errors import InvalidField, Unsampleable
from seer.common.structured_outputs import StructuredOutputs
from seer.common.types import Capacity
from seer.services.engine.backend import Chunk


def token_budget(chunk: Chunk) -> int:
    """Return the most tokens that the chunk may generate, by its own limit and its turn's."""
    return min(chunk.max_new_tokens, tokens_left(chunk))


def tokens_left(chunk: Chunk) -> int:
    """Return how many tokens the chunk's turn may still have."""
    return chunk.sampling.max_tokens - (len(chunk.tokens) - chunk.counts_from)


def unmet(chunk: Chunk, why: str) -> InvalidField:
    """Return the error of a chunk whose constraint its tokens cannot meet."""
    structure = chunk.sampling.structured_outputs
    ((name, value),) = structure.given.items() if structure is not None else (("", ""),)
    return InvalidField(f"sampling.structured_outputs.{name}", value, why)


def no_token(chunk: Chunk, position: int) -> Unsampleable | InvalidField:
    """Return the error of a chunk for which no token can be sampled at a position."""
    why = (
        f"no token can be sampled at position {position}: its logits are not numbers (NaN, or an infinite "
        "maximum), or every token is masked; check the weights, engine.dtype, "
    )
    if chunk.sampling.structured_outputs is not None:
        return unmet(chunk, f"{why}and whether the model's tokens can spell what is asked for")
    return Unsampleable(f"request {chunk.request_id}: {why}and the request's min_tokens")


def check_chunk(
    chunk: Chunk, *, vocab: int, capacity: Capacity, stop_ids: tuple[int, ...], has_tokenizer: bool
) -> None:
    """Raise `InvalidField` naming what this engine cannot run; `stop_ids` includes the model's own."""
    sampling, known = chunk.sampling, len(chunk.tokens)
    sampling.check()
    _check_bounds("tokens", known, 1, None, "tokens are needed: give a prompt")
    chunk.check_positions()
    _check_bounds("max_new_tokens", chunk.max_new_tokens, 1, None, "must be at least 1")
    _check_bounds("key", chunk.key, 0, 2**64 - 1, "must be an unsigned 64-bit number")
    if token_budget(chunk) < 1:
        raise InvalidField("sampling.max_tokens", sampling.max_tokens, "this turn has as many already")
    if known + token_budget(chunk) > capacity.max_model_len:
        fix = f"with {known} tokens before it exceeds engine.max_model_len = {capacity.max_model_len}"
        raise InvalidField("max_new_tokens", chunk.max_new_tokens, fix)
    worst = capacity.blocks_for(known, token_budget(chunk))
    if chunk.wait_for_room and worst > capacity.kv_blocks:
        fix = f"needs {worst} KV blocks, this engine has {capacity.kv_blocks}: it could never start"
        raise InvalidField("max_new_tokens", chunk.max_new_tokens, fix)
    for name in ("top_logprobs", "prompt_logprobs"):
        _check_bounds(f"sampling.{name}", getattr(sampling, name) or 0, 0, vocab, f"there are {vocab} tokens")
    _check_ids("tokens", chunk.tokens, vocab)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab)
    _check_ids("sampling.logit_bias", sampling.logit_bias, vocab)
    if sampling.min_tokens and len(set(stop_ids)) == vocab:
        fix = "leave a token that can be sampled before min_tokens"
        raise InvalidField("sampling.stop_token_ids", "every token", fix)
    if sampling.stop and not has_tokenizer:
        fix = "the model folder has no tokenizer.json, which stop strings need"
        raise InvalidField("sampling.stop", sampling.stop, fix)
    if sampling.structured_outputs is not None:
        _check_structure(sampling.structured_outputs, stop_ids=stop_ids, has_tokenizer=has_tokenizer)


def _check_structure(structure: StructuredOutputs, *, stop_ids: tuple[int, ...], has_tokenizer: bool) -> None:
    fix = ""
    if not has_tokenizer:
        fix = "the model folder has no tokenizer.json, which they need"
    elif not stop_ids:
        fix = "nothing could end the response: the model has no end-of-sequence token; give stop_token_ids"
    if fix:
        raise InvalidField("sampling.structured_outputs", list(structure.given), fix)


def _check_bounds(field: str, value: int, low: int, high: int | None, fix: str) -> None:
    if value < low or (high is not None and value > high):
        raise InvalidField(field, value, fix)


def _check_ids(field: str, ids: Iterable[int], vocab: int) -> None:
    for worst in (max(ids, default=0), min(ids, default=0)):
        if not 0 <= worst < vocab:
            raise InvalidField(field, worst, f"token ids must be in [0, {vocab})")
