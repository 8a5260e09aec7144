"""What a trainer submits, checked before anything is sent.

Invariants:
- every error names the prompt by position and field, `prompts[3].token_ids`;
- ids are unique within a rollout: an id is a coordinate of the response's noise key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from msgspec import structs

from seer.client.image_uploads import Placed, check_images
from seer.client.text import Tokenizer
from seer.common import types
from seer.common.bounds import INT64, check_whole
from seer.common.errors import InvalidField
from seer.common.types import SamplingParams
from seer.common.wire import MAX_GROUP_SIZE, Submit, Tokens

MAX_ID_BYTES = 400
"""A request id, of at most 512 bytes, consists of the rollout's id, the prompt's id and an index."""

MAX_ROLLOUT_ID_BYTES = 64

BATCH_TOKENS = 2**20
"""Most prompt tokens per `Submit` (4 MiB): a large rollout must not block the buffer's loop."""

BATCH_PROMPTS = 1024
"""Most prompts per `Submit`, for the same reason; the buffer accepts `MAX_PROMPTS`."""

T = TypeVar("T")

_MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: `text` or `token_ids`, not both. `metadata` stays with the client.

    `images`: in the order in which they stand in `token_ids`, in place of the model's placeholders;
    `seer.client.images.prepare` makes both.
    """

    id: str
    text: str | None = None
    token_ids: Sequence[int] | Tokens | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    images: Sequence[Placed] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked prompt. `token_ids`: int32 [length], length >= 1."""

    id: str
    token_ids: Tokens
    metadata: Mapping[str, object]
    images: tuple[Placed, ...] = ()

    @property
    def places(self) -> list[types.Placed]:
        """Where its images stand, by name, as messages have it."""
        return [each.on_wire for each in self.images]

    def shows(self, name: str) -> bool:
        """Return whether an image of this name is in it."""
        return any(each.image.name == name for each in self.images)


def prepare(
    prompts: Iterable[Prompt | str | Sequence[int] | Tokens], tokenizer: Tokenizer | None, first: int = 0
) -> dict[str, Prepared]:
    """Check and tokenize prompts, in order; those without an id get their position, counted from `first`.

    Raises `InvalidField` naming the first prompt and field that cannot be accepted.
    """
    if isinstance(prompts, str):
        raise InvalidField("prompts", prompts, "give a sequence of prompts, not one string")
    prepared: dict[str, Prepared] = {}
    for position, given in enumerate(prompts, first):
        prompt = prepare_one(given, position, tokenizer)
        if prompt.id in prepared:
            where = f"prompts[{position}].id"
            raise InvalidField(where, prompt.id, "was given before; ids must be unique in a rollout")
        prepared[prompt.id] = prompt
    if not prepared:
        raise InvalidField("prompts", [], "give at least one prompt")
    return prepared


def prepare_one(
    given: Prompt | str | Sequence[int] | Tokens, position: int, tokenizer: Tokenizer | None
) -> Prepared:
    """Check and tokenize one prompt. Raises `InvalidField` naming it as `prompts[position]`."""
    where = f"prompts[{position}]"
    prompt = _as_prompt(given, position)
    check_id(prompt.id, f"{where}.id")
    if (prompt.text is None) == (prompt.token_ids is None):
        raise InvalidField(where, prompt.id, "give either text or token_ids")
    if prompt.images and prompt.token_ids is None:
        fix = "give token_ids with placeholders, as seer.client.images.prepare makes them"
        raise InvalidField(f"{where}.images", len(prompt.images), fix)
    tokens = _encode(prompt, where, tokenizer)
    return Prepared(
        prompt.id, tokens, prompt.metadata, check_images(prompt.images, tokens.size, f"{where}.images")
    )


def batches(items: Iterable[T], tokens_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items in lists of what one `Submit` may have; at least one list."""
    batch: list[T] = []
    tokens = 0
    for item in items:
        if batch and (tokens + tokens_of(item) > BATCH_TOKENS or len(batch) == BATCH_PROMPTS):
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += tokens_of(item)
    yield batch


def with_images(submit: Submit, prompts: Sequence[Prepared]) -> Submit:
    """Return the message that submits prompts, which names their images if they have any."""
    if not any(prompt.images for prompt in prompts):
        return submit
    return structs.replace(submit, images=[prompt.places for prompt in prompts])


def check_place(group: str, first_index: int, n: int) -> None:
    """Raise `InvalidField` if n responses cannot be those from `first_index` on of a group of this name."""
    if group:
        check_id(group, "group")
    check_whole("first_index", first_index, 0, MAX_GROUP_SIZE - n)


def check_request(
    n: int, sampling: SamplingParams, seed: int, rollout_number: int, weight_version: int = -1
) -> None:
    """Raise `InvalidField` naming the field that the buffer would refuse."""
    check_whole("n", n, 1, MAX_GROUP_SIZE)
    check_whole("seed", seed, *INT64)
    check_whole("rollout_number", rollout_number, *INT64)
    check_whole("weight_version", weight_version, -1, INT64[1])
    sampling.check()
    sampling.check_alternatives(n, 0)


def version_of(weight_version: int | None, expect_weights: int | None, otherwise: int) -> int:
    """Return the version that a parameter names, or `otherwise`. Raises `InvalidField` if they name two."""
    if expect_weights is None:
        return otherwise if weight_version is None else weight_version
    check_whole("expect_weights", expect_weights, 0, INT64[1])
    if weight_version not in (None, expect_weights):
        fix = f"weight_version says {weight_version}: give one of them"
        raise InvalidField("expect_weights", expect_weights, fix)
    return expect_weights


def check_rollout_id(rollout_id: str) -> str:
    """Return the id. Raises `InvalidField` if it is empty, too long, or has a '/'."""
    if not 1 <= len(rollout_id.encode()) <= MAX_ROLLOUT_ID_BYTES or "/" in rollout_id:
        raise InvalidField("rollout_id", rollout_id, f"give 1 to {MAX_ROLLOUT_ID_BYTES} bytes without '/'")
    return rollout_id


def _as_prompt(given: Prompt | str | Sequence[int] | Tokens, position: int) -> Prompt:
    match given:
        case Prompt():
            return given
        case str():
            return Prompt(str(position), text=given)
        case _:
            return Prompt(str(position), token_ids=given)


def check_id(prompt_id: object, where: str) -> None:
    """Raise `InvalidField` naming `where` if this cannot be an id."""
    if not isinstance(prompt_id, str) or not prompt_id:
        raise InvalidField(where, prompt_id, "give a non-empty string")
    try:
        size = len(prompt_id.encode())
    except UnicodeEncodeError as error:
        raise InvalidField(where, prompt_id, "is not valid Unicode (a lone surrogate)") from error
    if size > MAX_ID_BYTES:
        raise InvalidField(where, prompt_id, f"is {size} bytes long; give at most {MAX_ID_BYTES}")


def _encode(prompt: Prompt, where: str, tokenizer: Tokenizer | None) -> Tokens:
    if prompt.text is None:
        return token_array(prompt.token_ids, f"{where}.token_ids")
    if not isinstance(prompt.text, str) or not prompt.text:
        raise InvalidField(f"{where}.text", prompt.text, "give a non-empty string")
    if tokenizer is None:
        raise InvalidField(f"{where}.text", prompt.text, "give the client a tokenizer, or token_ids")
    return token_array(tokenizer.encode(prompt.text), f"{where}.text")


def token_array(token_ids: object, where: str) -> Tokens:
    """Return ids as int32 [length >= 1]. Raises `InvalidField` naming `where`."""
    try:
        array = np.asarray(token_ids)
    except ValueError as error:
        raise InvalidField(where, token_ids, "give a flat sequence of token ids") from error
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InvalidField(where, token_ids, "give a flat, non-empty sequence of integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _MAX_TOKEN:
        raise InvalidField(where, low if low < 0 else high, f"token ids must be in [0, {_MAX_TOKEN}]")
    return array.astype(np.int32)
