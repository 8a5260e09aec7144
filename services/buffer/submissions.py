"""Validates submissions and turns them into events; a malformed one never reaches a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, repeat

import numpy as np

from seer.common import ids, wire
from seer.common.errors import InvalidField
from seer.common.types import check_placed
from seer.services.buffer.conversations import MOST_CONTEXT, Conversations, context
from seer.services.buffer.images.image_machine import ImageMachine
from seer.services.buffer.log.kept_chunks import KeptChunks
from seer.services.buffer.requests.events import GroupSpec, GroupsSubmitted
from seer.services.buffer.response_store import Store, SubmittedPrompt

PART_REQUESTS = 1024
"""Requests of one event: to open them takes about 20 ms, in which the buffer does nothing else."""

PART_SESSIONS = 256
"""The same where the buffer looks what each goes on from."""


def prompts(submit: wire.Submit) -> dict[str, SubmittedPrompt]:
    """Return the prompts by id; their tokens are views. Raises `InvalidField` for a malformed submission."""
    _check(submit)
    params = (submit.seed, submit.rollout_number, submit.n, submit.sampling)
    usual = ids.params_digest(*params)
    pieces = np.split(submit.tokens, np.cumsum(submit.lengths)[:-1])
    groups, firsts = submit.groups or repeat(""), submit.first_indices or repeat(0)
    turns, sessions = submit.turns or repeat(None), submit.sessions or repeat(None)
    places = zip(groups, firsts, turns, sessions, submit.images or repeat(()), strict=False)
    found = {}
    for prompt_id, tokens, place in zip(submit.prompt_ids, pieces, places, strict=False):
        group, first, turn, session, seen = place
        found[prompt_id] = SubmittedPrompt(
            tokens=tokens,
            group=group or prompt_id,
            shared_id=ids.shared_group_id(submit.rollout_id, group) if group else "",
            first_index=first,
            n=submit.n,
            sampling=submit.sampling,
            seed=submit.seed,
            rollout_number=submit.rollout_number,
            params_digest=ids.params_digest(*params, group, first, seen) if group or first or seen else usual,
            turn=turn,
            session=session,
            images=seen,
        )
    return found


def with_turns(
    rollout_id: str, prompts: Mapping[str, SubmittedPrompt], store: Store, conversations: Conversations
) -> dict[str, SubmittedPrompt]:
    """Return the prompts, with the turns that new prompts of sessions are.

    Only `MOST_CONTEXT` tokens are looked up, as many as a client sends at once; the rest begins anew.
    """
    found = {}
    left = MOST_CONTEXT
    for prompt_id, prompt in prompts.items():
        group_id = ids.group_id(rollout_id, prompt_id)
        looked_up = group_id not in store and len(prompt.tokens) <= left
        if prompt.session is not None and looked_up:
            left -= len(prompt.tokens)
            turn = conversations.begin(group_id, context(prompt.tokens, prompt.images), prompt.session)
            prompt = replace(prompt, turn=turn.spec(prompt.sampling.max_tokens))
        found[prompt_id] = prompt
    return found


def parts(
    submit: wire.Submit, prompts: Mapping[str, SubmittedPrompt], store: Store
) -> Iterator[Mapping[str, SubmittedPrompt]]:
    """Yield the prompts of a valid submission in parts of bounded size, one event each.

    If a prompt is known, all are one part: a rollout that is submitted again is judged as a whole.
    """
    size = PART_SESSIONS if submit.sessions else max(1, PART_REQUESTS // submit.n)
    known = any(ids.group_id(submit.rollout_id, prompt_id) in store for prompt_id in prompts)
    if known or len(prompts) <= size:
        yield prompts
        return
    left = iter(prompts.items())
    while part := dict(islice(left, size)):
        yield part


def event(
    trainer: str,
    address: bytes,
    submit: wire.Submit,
    prompts: Mapping[str, SubmittedPrompt],
    store: Store,
    kept: KeptChunks,
    images: ImageMachine,
    share: str = "",
) -> GroupsSubmitted:
    """Return the event of a valid submission, with what `kept` and `images` have of its prompts.

    `share`: the trainer by whose share it runs.
    """
    params_digest = ids.params_digest(submit.seed, submit.rollout_number, submit.n, submit.sampling)
    rollout_id = submit.rollout_id
    specs = [
        GroupSpec(
            prompt_id,
            len(prompt.tokens),
            store.same(ids.group_id(rollout_id, prompt_id), prompt),
            kept.offer(rollout_id, prompt_id, prompt.params_digest, prompt.tokens),
            prompt.shared_id,
            prompt.first_index,
            prompt.turn,
            max((each.length for each in prompt.images), default=0),
            images.missing(each.name for each in prompt.images),
            submit.stream,
        )
        for prompt_id, prompt in prompts.items()
    ]
    return GroupsSubmitted(
        trainer, submit.rollout_id, submit.n, submit.sampling.max_tokens, specs, submit.weight_version,
        submit.submission, params_digest, address, submit.open, share, submit.expects,
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
    _check_places(submit)
    _check_turns(submit)
    submit.sampling.check_alternatives(submit.n, max(submit.lengths, default=0))
    for place, (images, length) in enumerate(zip(submit.images, submit.lengths, strict=False)):
        check_placed(images, length, f"images[{place}]")


def _check_places(submit: wire.Submit) -> None:
    for name in ("groups", "first_indices", "turns", "sessions", "images"):
        value = getattr(submit, name)
        if len(value) not in (0, len(submit.prompt_ids)):
            raise InvalidField(name, len(value), f"give one per prompt, {len(submit.prompt_ids)}, or none")
    longest = max(submit.groups, key=len, default="")
    if len(ids.shared_group_id(submit.rollout_id, longest)) > wire.MAX_ID:
        raise InvalidField("groups", longest, f"makes an id of over {wire.MAX_ID} characters")
    last = max(submit.first_indices, default=0) + submit.n
    if last > wire.MAX_GROUP_SIZE:
        raise InvalidField("first_indices", last - submit.n, f"must be <= {wire.MAX_GROUP_SIZE - submit.n}")


def _check_turns(submit: wire.Submit) -> None:
    for name, given in (("turns", submit.turns), ("sessions", submit.sessions)):
        if given and not (submit.open and submit.n == 1 and submit.groups and all(submit.groups)):
            fix = "give each the name of its group, and n = 1, in an open rollout"
            raise InvalidField(name, len(given), fix)
    if submit.turns and submit.sessions:
        raise InvalidField("sessions", len(submit.sessions), "give turns, or sessions")
    for turn, length in zip(submit.turns, submit.lengths, strict=False):
        turn.check(length)
        if turn.trajectory:
            raise InvalidField("turns.trajectory", turn.trajectory, "the buffer names it: give a session")
