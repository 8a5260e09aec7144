"""What a client hands out: groups of responses, checked as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from seer.client.prompts import Prepared
from seer.client.text import Tokenizer, response_text
from seer.common import beside, receipt
from seer.common.beside import TopLogprobs
from seer.common.detokenizer import Detokenizer
from seer.common.receipt import Receipt
from seer.common.types import FinishReason, SamplingParams
from seer.common.wire import Bytes, GroupDone, Logprobs, StreamedPart, Tokens, TokensGenerated


@dataclass(frozen=True, slots=True)
class Response:
    """One response. `token_ids`: int32 [length], `logprobs`: float32 [length], length >= 1.

    `text` (None without a tokenizer) is without the stop string or token that ended it. `stop_reason` is
    that string or the stop token id as text, empty when the response ran to max_tokens. `routed_experts`:
    expert ids, uint8 or uint16 [tokens, layers, experts of a token], of prompt and response without its last
    token, which no model has read; None unless `SamplingParams.routed_experts_from` asks for them.
    `top_logprobs`: None unless `SamplingParams.top_logprobs` asks for them; so is `receipt`.
    """

    index: int
    token_ids: Tokens
    logprobs: Logprobs
    text: str | None
    finish_reason: FinishReason
    stop_reason: str
    routed_experts: beside.Array | None = None
    top_logprobs: TopLogprobs | None = None
    receipt: Receipt | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """All n responses to one prompt, in index order, and how they were scheduled.

    `prompt_logprobs`: of the prompt's tokens but the first; None unless `SamplingParams.prompt_logprobs` asks
    for them, and for a prompt of one token.
    """

    prompt_id: str
    prompt_token_ids: Tokens
    metadata: Mapping[str, object]
    weight_version: int
    weights_digest: str
    responses: tuple[Response, ...]
    chunks: int
    migrations: int
    preemptions: int
    prompt_logprobs: TopLogprobs | None = None


class Noise(NamedTuple):
    """Where a prompt's responses have their noise from: they are those from `first_index` on of `group`."""

    seed: int
    rollout_number: int
    group: str
    first_index: int = 0


def malformed(message: GroupDone, n: int, prompt: Prepared, sampling: SamplingParams) -> str:
    """Return what is wrong with a message that should have n responses to a prompt; empty: nothing."""
    counts = {len(message.finish_reasons), len(message.stop_reasons), len(message.lengths)}
    if counts != {n}:
        return f"{sorted(counts)} responses where {n} were asked for"
    if min(message.lengths) < 1:
        return f"response {message.lengths.index(min(message.lengths))} is empty"
    if not sum(message.lengths) == message.tokens.size == message.logprobs.size:
        return f"{message.tokens.size} tokens and {message.logprobs.size} logprobs for {sum(message.lengths)}"
    extra = 0 if message.beside is None else message.beside.size
    if len(message.beside_sizes) not in (0, n) or beside.total(message.beside_sizes) != extra:
        return f"{extra} bytes beside the tokens where {beside.total(message.beside_sizes)} are announced"
    expected = [{beside.TOP_LOGPROBS: (length, sampling.top_logprobs)} for length in message.lengths]
    expected[0][beside.PROMPT_LOGPROBS] = len(prompt.token_ids) - 1, sampling.prompt_logprobs
    try:
        for extras, each, length in zip(_extras(message), expected, message.lengths, strict=True):
            beside.array_of(beside.ROUTED_EXPERTS, extras)
            if sampling.receipt is True:
                _chunks(extras, length)
            for word, (tokens, top) in each.items():
                found = beside.array_of(word, extras)
                shape = (tokens, 2, 1 + top) if top is not None and tokens else None
                if (None if found is None else found.shape) != shape:
                    return f"{word} of shape {None if found is None else found.shape}, not {shape}"
    except (TypeError, ValueError) as error:
        return f"what is beside the tokens cannot be read: {error}"
    return ""


@dataclass(frozen=True, slots=True)
class Streamed:
    """Tokens of an unfinished response from position `start` on, and their alternatives if they came, too."""

    index: int
    start: int
    token_ids: Tokens
    logprobs: Logprobs
    top_logprobs: TopLogprobs | None


def streamed(message: TokensGenerated) -> Iterator[tuple[StreamedPart, Streamed]]:
    """Yield what a message has of each response; nothing of one that disagrees with its arrays: groups do."""
    sizes, counts = [part.beside for part in message.parts], [part.count for part in message.parts]
    extra = 0 if message.beside is None else message.beside.size
    if not sum(counts) == message.tokens.size == message.logprobs.size or beside.total(sizes) != extra:
        return
    start = 0
    for part, extras in zip(message.parts, beside.split(message.beside, sizes), strict=True):
        its = slice(start, start := start + part.count)
        tops = _tops(extras, part.count) if extras else None
        yield part, Streamed(part.index, part.start, message.tokens[its], message.logprobs[its], tops)


def _tops(extras: Mapping[str, Bytes], count: int) -> TopLogprobs | None:
    """Return the alternatives of `count` tokens; None: these are not what there should be."""
    try:
        tops = TopLogprobs.of(beside.TOP_LOGPROBS, extras)
    except (TypeError, ValueError, IndexError):
        return None
    return tops if tops is not None and len(tops) == count else None


def _extras(message: GroupDone) -> list[dict[str, Bytes]]:
    """Return what comes beside each response, by kind."""
    return list(beside.split(message.beside, message.beside_sizes or [{}] * len(message.lengths)))


def group_of(
    message: GroupDone, prompt: Prepared, tokenizer: Tokenizer | None, sampling: SamplingParams, noise: Noise
) -> Group:
    """Return a message's group; `malformed` found nothing wrong with the message."""
    return Group(
        prompt_id=prompt.id,
        prompt_token_ids=prompt.token_ids,
        metadata=prompt.metadata,
        weight_version=message.weight_version,
        weights_digest=message.weights_digest,
        responses=tuple(_responses(message, prompt, tokenizer, sampling, noise)),
        chunks=message.chunks,
        migrations=message.migrations,
        preemptions=message.preemptions,
        prompt_logprobs=TopLogprobs.of(beside.PROMPT_LOGPROBS, _extras(message)[0]),
    )


def _responses(
    message: GroupDone, prompt: Prepared, tokenizer: Tokenizer | None, sampling: SamplingParams, noise: Noise
) -> Iterable[Response]:
    start, detokenizer = 0, None if tokenizer is None else Detokenizer.of(tokenizer)
    before = [] if detokenizer is None else prompt.token_ids.tolist()
    extras = _extras(message)
    for index, length in enumerate(message.lengths):
        token_ids = message.tokens[start : start + length]
        stop_reason, text = message.stop_reasons[index], None
        if detokenizer is not None:
            text = response_text(detokenizer, before, token_ids.tolist(), stop_reason, sampling)
        response = Response(
            index=index,
            token_ids=token_ids,
            logprobs=message.logprobs[start : start + length],
            text=text,
            finish_reason=message.finish_reasons[index],
            stop_reason=stop_reason,
            routed_experts=beside.array_of(beside.ROUTED_EXPERTS, extras[index]),
            top_logprobs=TopLogprobs.of(beside.TOP_LOGPROBS, extras[index]),
        )
        if sampling.receipt is True:
            chunks = _chunks(extras[index], length)
            its = _receipt(response, chunks, message.weights_digest, prompt, sampling, noise)
            response = replace(response, receipt=its)
        yield response
        start += length


def _chunks(extras: Mapping[str, Bytes], length: int) -> list[receipt.ChunkRecord]:
    """Return the records of a response's chunks. Raises `ValueError` unless they have all its tokens."""
    lines = beside.array_of(receipt.WORD, extras)
    return receipt.chunks(b"" if lines is None else lines.tobytes(), length)


def _receipt(
    response: Response,
    chunks: list[receipt.ChunkRecord],
    weights_digest: str,
    prompt: Prepared,
    sampling: SamplingParams,
    noise: Noise,
) -> Receipt:
    seed, number, group, first = noise
    index = first + response.index
    return receipt.sealed(
        Receipt(
            weights_digest=weights_digest, prompt_token_ids=prompt.token_ids.tolist(), images=prompt.places,
            sampling=sampling, seed=seed, rollout_number=number, group=group, index=index,
            key=receipt.key_of(seed, number, group, index), chunks=chunks,
            token_ids=response.token_ids.tolist(), logprobs=response.logprobs.tolist(),
            finish_reason=response.finish_reason, stop_reason=response.stop_reason,
        )
    )  # fmt: skip
