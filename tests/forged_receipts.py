"""Receipts of which something was changed: what `seer recompute` must find, also where the chain fits again."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from seer.common.receipt import Receipt, key_of


def one_more(tokens: list[int], at: int) -> list[int]:
    """Have another token at a position."""
    return [*tokens[:at], (tokens[at] + 1) % 60, *tokens[at + 1 :]]


def with_seed(receipt: Receipt, seed: int) -> Receipt:
    return replace(receipt, seed=seed, key=key_of(seed, receipt.rollout_number, receipt.group, receipt.index))


def shorter(receipt: Receipt) -> Receipt:
    """Leave out the last token, and say that the response ended there."""
    chunks = [*receipt.chunks[:-1], replace(receipt.chunks[-1], count=receipt.chunks[-1].count - 1)]
    return replace(receipt, token_ids=receipt.token_ids[:-1], logprobs=receipt.logprobs[:-1], chunks=chunks)


def sampled(receipt: Receipt, **fields: object) -> Receipt:
    return replace(receipt, sampling=replace(receipt.sampling, **fields))


FORGED: dict[str, tuple[Callable[[Receipt], Receipt], str]] = {
    "a token": (lambda it: replace(it, token_ids=one_more(it.token_ids, 9)), "token 9 is "),
    "the last token": (lambda it: replace(it, token_ids=one_more(it.token_ids, len(it.token_ids) - 1)), "token "),
    "no token of the model": (lambda it: replace(it, token_ids=[2**30, *it.token_ids[1:]]), "token 0 is 107374"),
    "a token left out": (shorter, "the end is "),
    "the prompt": (lambda it: replace(it, prompt_token_ids=one_more(it.prompt_token_ids, 2)), "token "),
    "no prompt of the model": (
        lambda it: replace(it, prompt_token_ids=[2**30]), "it cannot be generated: tokens = 1073741824"
    ),
    "the seed": (lambda it: with_seed(it, 77), "token "),
    "the temperature": (lambda it: sampled(it, temperature=5.0), "token "),
    "top_k": (lambda it: sampled(it, top_k=1), "token "),
    "max_tokens": (lambda it: sampled(it, max_tokens=5), "the end is "),
    "a stop id": (lambda it: sampled(it, stop_token_ids=(it.token_ids[3],)), "the end is "),
    "a logprob": (lambda it: replace(it, logprobs=[it.logprobs[0] - 0.1, *it.logprobs[1:]]), "logprob 0 is "),
    "the finish reason": (
        lambda it: replace(it, finish_reason="stop" if it.finish_reason == "length" else "length"), "the end is "
    ),
    "the stop reason": (lambda it: replace(it, stop_reason="x"), "the end is "),
}  # fmt: skip
"""What is changed, with a chain that fits again; and what is found."""
