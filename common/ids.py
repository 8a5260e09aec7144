"""Identities and the sampling key.

Invariants:
- a request's id is a function of (rollout id, prompt id, response index) and is unique in a rollout;
- a request's key is a function of (seed, rollout number, name of its group, index in it) and of nothing
  else: not of the schedule, the instance, or the order of submission; a group's name is its prompt's id, or
  what the trainer calls it;
- `params_digest` is the same for two submissions that ask for the same of each prompt;
- no two incarnations of a process are equal, and later ones are greater unless clocks are set back.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import time
from collections.abc import Sequence

import msgspec

from seer.common.types import Placed, SamplingParams

_KEY_PERSON = b"seer-key-v1"
_INT64 = range(-(2**63), 2**63)
_RANDOM_BITS = 20  # leaves room for milliseconds until the year 2248


def request_key(seed: int, rollout_number: int, group: str, response_index: int) -> int:
    """Return the 64-bit key of one response's noise: a BLAKE2b hash of the four arguments.

    The group's name comes last, so no two tuples have the same encoding. Raises `ValueError` when seed or
    rollout number does not fit 64 signed bits.
    """
    if seed not in _INT64 or rollout_number not in _INT64:
        raise ValueError("seed and rollout_number must fit in 64 signed bits")
    packed = struct.pack("<qqi", seed, rollout_number, response_index) + group.encode()
    digest = hashlib.blake2b(packed, digest_size=8, person=_KEY_PERSON).digest()
    return int.from_bytes(digest, "little")


def params_digest(
    seed: int,
    rollout_number: int,
    n: int,
    sampling: SamplingParams,
    group: str = "",
    first_index: int = 0,
    images: Sequence[Placed] = (),
) -> int:
    """Return a 63-bit digest of what a submission asks for a prompt: with its tokens, it makes the responses.

    `group`, `first_index` and `images` are as in `wire.Submit`.
    """
    place: tuple[object, ...] = (group, first_index, images) if images else (group, first_index)
    if not (group or first_index or images):
        place = ()
    packed = msgspec.msgpack.encode((seed, rollout_number, n, sortable(sampling), *place), order="sorted")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def sortable(sampling: SamplingParams) -> dict[str, object]:
    """Return the parameters by name, in a form that msgspec encodes in sorted order: all keys are text.

    Those that are not given are left out: a parameter that came later changes nothing where it is not used.
    """
    unused = None, msgspec.UNSET
    given = {name: value for name, value in msgspec.structs.asdict(sampling).items() if value not in unused}
    return given | {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()}}


def group_id(rollout_id: str, prompt_id: str) -> str:
    """Return the id of the group of all responses to one prompt of one rollout."""
    return f"{rollout_id}/{prompt_id}"


def shared_group_id(rollout_id: str, name: str) -> str:
    """Return the id of a group that a trainer named; names that begin with "/" are those of all rollouts."""
    return name if name.startswith("/") else group_id(rollout_id, name)


def prompt_digest(tokens: bytes) -> int:
    """Return the number by which a prompt, as little-endian int32, is remembered; never 0: it is unknown."""
    return int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest(), "little") >> 1 or 1


def request_id(group: str, index: int) -> str:
    """Return the id of response `index` of a group."""
    return f"{group}#{index}"


def not_before(incarnation: int, other: int) -> bool:
    """Return whether a process started no earlier than another, by the milliseconds of their incarnations."""
    return incarnation >> _RANDOM_BITS >= other >> _RANDOM_BITS


def new_incarnation() -> int:
    """Return a 63-bit number that identifies this run of a process: milliseconds, then random bits."""
    return time.time_ns() // 10**6 << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
