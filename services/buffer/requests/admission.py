"""Whether some instance can hold the responses to a prompt."""

from __future__ import annotations

from seer.common.policy.fleet import Fleet


def never_fits(fleet: Fleet, prompt_len: int, max_tokens: int, image_tokens: int = 0) -> str:
    """Return why no instance can ever hold a response to a prompt; empty if one can.

    `image_tokens`: those of the prompt's largest image; 0: it has none.
    """
    if fleet.holding(prompt_len, max_tokens, image_tokens):
        return ""
    most = max(each.image_tokens for each in fleet.capacities)
    if image_tokens and not most:
        return "images: no engine takes images: start engines whose model has images, of this release"
    if image_tokens > most:
        problem = f"an image of {image_tokens} tokens fits no instance, {most} is the most"
        return f"images: {problem}: give a smaller one"
    largest = max(fleet.capacities, key=lambda each: (each.kv_blocks, each.max_model_len, each.block_size))
    return (
        f"prompt of {prompt_len} tokens + max_tokens {max_tokens} fits no instance: the largest has "
        f"max_model_len {largest.max_model_len} and {largest.kv_blocks} KV blocks of "
        f"{largest.block_size}: lower max_tokens, shorten the prompt, or give engines more KV memory"
    )
