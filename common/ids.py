"""Identities and the sampling key.

Invariants:
- a request's id is a function of (rollout id, prompt id, response index) and is unique in a rollout;
- a request's key is a function of (seed, rollout number, prompt id, response index) and of
  nothing else: not of the schedule, the instance, or the order of submission;
- what a submission asks for, its prompts apart, has one digest;
- no two lives of a process share an incarnation, and while clocks are not set back, later is greater.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import time

import msgspec

from seer.common.types import SamplingParams

_KEY_PERSON = b"seer-key-v1"
_INT64 = range(-(2**63), 2**63)
_CHANCE_BITS = 20  # leaves the milliseconds until the year 2248


def request_key(seed: int, rollout_number: int, prompt_id: str, response_index: int) -> int:
    """Return the 64-bit key of one response's noise: BLAKE2b of the four coordinates.

    The prompt id is length-prefixed by position (it comes last), so no two tuples share an
    encoding. Raises `ValueError` when seed or rollout number does not fit 64 signed bits.
    """
    if seed not in _INT64 or rollout_number not in _INT64:
        raise ValueError("seed and rollout_number must fit in 64 signed bits")
    packed = struct.pack("<qqi", seed, rollout_number, response_index) + prompt_id.encode()
    digest = hashlib.blake2b(packed, digest_size=8, person=_KEY_PERSON).digest()
    return int.from_bytes(digest, "little")


def params_digest(seed: int, rollout_number: int, n: int, sampling: SamplingParams) -> int:
    """Return a 63-bit digest of what a submission asks for each of its prompts."""
    packed = msgspec.msgpack.encode((seed, rollout_number, n, sampling), order="sorted")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def group_id(rollout_id: str, prompt_id: str) -> str:
    """Return the id of the group of all responses to one prompt of one rollout."""
    return f"{rollout_id}/{prompt_id}"


def request_id(group: str, index: int) -> str:
    """Return the id of response `index` of a group."""
    return f"{group}#{index}"


def not_before(incarnation: int, other: int) -> bool:
    """Say whether a life did not start before another one, as far as their milliseconds tell."""
    return incarnation >> _CHANCE_BITS >= other >> _CHANCE_BITS


def new_incarnation() -> int:
    """Return a 63-bit number that tells one life of a process from the next: milliseconds, then chance."""
    return time.time_ns() // 10**6 << _CHANCE_BITS | secrets.randbits(_CHANCE_BITS)
