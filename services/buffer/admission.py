"""What a prompt must meet to be taken: a bound on unfinished requests, and an instance that can hold it."""

from __future__ import annotations

from seer.common.policy.fleet import Fleet
from seer.services.buffer.events import Limits


def misfit(held: int, limits: Limits, fleet: Fleet, prompt_len: int, max_tokens: int, n: int) -> str:
    """Return why n responses to a prompt cannot be taken beside `held` unfinished requests; "": they can."""
    if held + n > limits.max_requests:
        return (
            f"the buffer holds {held} unfinished requests and takes at most "
            f"{limits.max_requests}: submit fewer at a time, or raise buffer.max_requests"
        )
    if fleet.holding(prompt_len, max_tokens):
        return ""
    largest = max(fleet.capacities, key=lambda capacity: capacity.kv_blocks)
    return (
        f"prompt of {prompt_len} tokens + max_tokens {max_tokens} fits no instance: the largest has "
        f"max_model_len {largest.max_model_len} and {largest.kv_blocks} KV blocks of "
        f"{largest.block_size}: lower max_tokens, shorten the prompt, or give engines more KV memory"
    )
