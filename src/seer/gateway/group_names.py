"""Groups of prompts that come over HTTP: name, indices and seed fix the noise of responses. Pure.

Invariants:
- with `X-Seer-Group` and `X-Seer-Index`, requests of one name are of one group in all gateway processes;
  noise repeats only for equal requests (prompts, sampling, seed) with the same name and index;
- with a `seed`, the same prompt and sampling give the same tokens, whenever and however often they are sent;
- with an `X-Request-Id` or `Idempotency-Key`, a request that is sent again gives the same tokens; prompts
  that occur in it several times are distinct samples;
- without any of them, no two requests share noise, in this gateway process or another; which of several equal
  requests gets which sample does not matter, as they are equal;
- memory is bounded: past `most` distinct requests, counting begins anew under another salt.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from seer.common.ids import sortable
from seer.common.types import SamplingParams
from seer.common.wire import MAX_GROUP_SIZE, Tokens
from seer.gateway.errors import bad

GROUP_HEADER = "X-Seer-Group"
INDEX_HEADER = "X-Seer-Index"

MAX_NAME_BYTES = 256
"""Bound on a group's name in a header."""

MOST_COUNTED = 100_000
"""Distinct requests that are counted; each takes about 200 bytes."""


class Place(NamedTuple):
    """A prompt's responses are those from `first_index` on of `group`."""

    group: str
    first_index: int = 0


def request_hashes(
    prompts: Iterable[Sequence[int] | Tokens], sampling: SamplingParams, images: Sequence[str] = ()
) -> list[str]:
    """Return for each prompt 32 hexadecimal digits that depend on its tokens, images and sampling alone.

    `images`: the names of its images. The sampling parameters, which may be long, are hashed once, without
    what only adds to an answer: who asks for that gets the same tokens.
    """
    sampling = structs.replace(sampling, routed_experts_from=None, top_logprobs=None, prompt_logprobs=None)
    sampled = hashlib.blake2b(msgspec.msgpack.encode(sortable(sampling), order="sorted"), digest_size=16)
    hashes = []
    for token_ids in prompts:
        digest = sampled.copy()
        digest.update(np.asarray(token_ids, dtype=np.int32).tobytes())
        digest.update("".join(images).encode())
        hashes.append(digest.hexdigest())
    return hashes


class GroupNames:
    """`new_salt` gives text that no other gateway process has."""

    def __init__(
        self, new_salt: Callable[[], str] = lambda: secrets.token_hex(8), most: int = MOST_COUNTED
    ) -> None:
        self._new_salt = new_salt
        self._most = most
        self._salt = new_salt()
        self._counts: Counter[str] = Counter()

    def places(self, hashes: Sequence[str], seed: int | None, request_id: str) -> list[Place]:
        """Return a place for each prompt of one HTTP request, by their `request_hashes`: a group of its own.

        Equal prompts have equal places only if the request has a seed.
        """
        if seed is not None:
            return [Place(f"seed-{each}") for each in hashes]
        if request_id:
            seen: Counter[str] = Counter()
            return [Place(f"id-{_named(request_id, each, _next(seen, each))}") for each in hashes]
        if len(self._counts) + len(hashes) > self._most:
            self._salt = self._new_salt()
            self._counts.clear()
        return [Place(f"any-{self._salt}-{each}-{_next(self._counts, each)}") for each in hashes]


def places_in_headers(headers: Mapping[str, str], prompts: int, n: int) -> list[Place]:
    """Return places for n responses to each of so many prompts in the group that headers name.

    Empty: they name none. The prompts have the indices from the header's on. Raises `HttpError`.
    """
    group, index = headers.get(GROUP_HEADER), headers.get(INDEX_HEADER)
    if group is None and index is None:
        return []
    if not group or len(group.encode()) > MAX_NAME_BYTES:
        raise bad(GROUP_HEADER, group, f"give a name of 1 to {MAX_NAME_BYTES} bytes beside {INDEX_HEADER}")
    last = MAX_GROUP_SIZE - prompts * n
    if last < 0:
        raise bad(GROUP_HEADER, group, f"a group has at most {MAX_GROUP_SIZE} responses, not {prompts * n}")
    if index is None or not (
        index.isascii() and index.isdecimal() and len(index) <= 4 and int(index) <= last
    ):
        raise bad(INDEX_HEADER, index, f"give the index of the first response in its group, in [0, {last}]")
    return [Place(f"/{group}", int(index) + number * n) for number in range(prompts)]


def group_seed(hashes: Sequence[str], seed: int | None) -> int:
    """Return a seed for a request in a named group: other prompts at the same place get other noise."""
    text = " ".join([str(seed), *hashes])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _next(counts: Counter[str], key: str) -> int:
    counts[key] += 1
    return counts[key] - 1


def _named(request_id: str, each: str, number: int) -> str:
    text = f"{each} {number} {request_id}"  # the caller's text comes last: no two triples are one text
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
