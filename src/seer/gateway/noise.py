"""Prompt ids of HTTP requests, which have none: a prompt id is a coordinate of the noise. Pure.

Invariants:
- with a `seed`, the same prompt and sampling give the same tokens, whenever and however often they are sent;
- with an `X-Request-Id` or `Idempotency-Key`, a request that is sent again gives the same tokens; prompts
  that occur in it several times are distinct samples;
- without either, no two requests share noise, in this gateway process or another; which of several equal
  requests gets which sample does not matter, as they are equal;
- memory is bounded: past `most` distinct requests, counting begins anew under another salt.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from seer.common.ids import sortable
from seer.common.types import SamplingParams

MOST_COUNTED = 100_000
"""Distinct requests that are counted; each takes about 200 bytes."""


def request_hash(token_ids: Sequence[int], sampling: SamplingParams) -> str:
    """Return 32 hexadecimal digits that depend on a prompt and how it is sampled, and on nothing else."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(sortable(sampling), order="sorted"), digest_size=16)
    digest.update(np.asarray(token_ids, dtype=np.int32).tobytes())
    return digest.hexdigest()


class NoiseIds:
    """`new_salt` gives text that no other gateway process has."""

    def __init__(
        self, new_salt: Callable[[], str] = lambda: secrets.token_hex(8), most: int = MOST_COUNTED
    ) -> None:
        self._new_salt = new_salt
        self._most = most
        self._salt = new_salt()
        self._counts: Counter[str] = Counter()

    def prompt_ids(self, hashes: Sequence[str], seed: int | None, request_id: str) -> list[str]:
        """Return a prompt id for each prompt of one HTTP request, given its `request_hash`.

        Equal prompts have equal ids only if the request has a seed.
        """
        if seed is not None:
            return [f"seed-{each}" for each in hashes]
        if request_id:
            seen: Counter[str] = Counter()
            return [f"id-{_named(request_id, each, _next(seen, each))}" for each in hashes]
        if len(self._counts) + len(hashes) > self._most:
            self._salt = self._new_salt()
            self._counts.clear()
        return [f"any-{self._salt}-{each}-{_next(self._counts, each)}" for each in hashes]


def _next(counts: Counter[str], key: str) -> int:
    counts[key] += 1
    return counts[key] - 1


def _named(request_id: str, each: str, number: int) -> str:
    text = f"{each} {number} {request_id}"  # the caller's text comes last: no two triples are one text
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
