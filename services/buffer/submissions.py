"""Validates submissions and turns them into events; a malformed one never reaches a machine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from seer.common import ids, wire
from seer.common.errors import InvalidField
from seer.services.buffer.log.kept import KeptChunks
from seer.services.buffer.requests.events import GroupSpec, GroupsSubmitted
from seer.services.buffer.store import Store


def prompts(submit: wire.Submit) -> dict[str, wire.Tokens]:
    """Return each prompt's tokens by id, as views. Raises `InvalidField` for a malformed submission."""
    _check(submit)
    pieces = np.split(submit.tokens, np.cumsum(submit.lengths)[:-1])
    return dict(zip(submit.prompt_ids, pieces, strict=True))


def event(
    trainer: str,
    life: bytes,
    submit: wire.Submit,
    prompts: Mapping[str, wire.Tokens],
    store: Store,
    kept: KeptChunks,
) -> GroupsSubmitted:
    """Return the event of a valid submission, with what `kept` has of its prompts."""
    params_digest = ids.params_digest(submit.seed, submit.rollout_number, submit.n, submit.sampling)
    rollout_id = submit.rollout_id
    specs = [
        GroupSpec(
            prompt_id,
            len(tokens),
            store.same(ids.group_id(rollout_id, prompt_id), tokens),
            kept.offer(rollout_id, prompt_id, params_digest, tokens),
        )
        for prompt_id, tokens in prompts.items()
    ]
    return GroupsSubmitted(
        trainer, submit.rollout_id, submit.n, submit.sampling.max_tokens, specs, submit.weight_version,
        submit.submission, params_digest, life,
    )  # fmt: skip


def _check(submit: wire.Submit) -> None:
    if len(submit.prompt_ids) > wire.MAX_PROMPTS:
        raise InvalidField(
            "prompt_ids", len(submit.prompt_ids), f"submit at most {wire.MAX_PROMPTS} at a time"
        )
    submit.sampling.check()
    for name in ("seed", "rollout_number"):
        value = getattr(submit, name)
        if not -(2**63) <= value < 2**63:
            raise InvalidField(name, value, "must fit in 64 signed bits")
    if not submit.rollout_id or "/" in submit.rollout_id:  # else group ids are ambiguous
        raise InvalidField("rollout_id", submit.rollout_id, "give a non-empty string without '/'")
    longest = max(submit.prompt_ids, key=len, default="")
    if len(ids.request_id(ids.group_id(submit.rollout_id, longest), submit.n)) > wire.MAX_ID:
        raise InvalidField("prompt_ids", longest, f"makes request ids of over {wire.MAX_ID} characters")
    if len(set(submit.prompt_ids)) != len(submit.prompt_ids):
        raise InvalidField("prompt_ids", submit.prompt_ids, "must be unique")
    total = len(submit.tokens)
    valid = len(submit.lengths) == len(submit.prompt_ids) and min(submit.lengths, default=1) >= 1
    if not valid or sum(submit.lengths) != total:
        raise InvalidField("lengths", submit.lengths, f"give one >= 1 per prompt, {total} in all")
    if total and submit.tokens.min() < 0:
        raise InvalidField("tokens", int(submit.tokens.min()), "token ids must be >= 0")
