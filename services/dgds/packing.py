"""Tokens and names in their short form: 3 bytes a token, 63 bits a group.

Fixed width: any part of a stream is a slice of its bytes, so the dgds neither packs nor unpacks. At a
vocabulary of 151k a varint takes 2.9 bytes, and 16 times as long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from seer.common import ids
from seer.common.wire import TOKEN_BYTES, Bytes, Tokens

TOKEN_IDS = range(2 ** (8 * TOKEN_BYTES))
"""Ids that can be packed."""


def pack(tokens: Tokens) -> Bytes:
    """Return int32 token ids, all of them in `TOKEN_IDS`, as bytes: little-endian, `TOKEN_BYTES` each."""
    wide = np.ascontiguousarray(tokens, dtype="<i4").view(np.uint8)
    packed = np.empty(TOKEN_BYTES * len(tokens), dtype=np.uint8)
    for place in range(TOKEN_BYTES):  # five times as fast as one strided copy
        packed[place::TOKEN_BYTES] = wide[place::4]
    return packed


def unpack(packed: Bytes | bytes | bytearray) -> Tokens:
    """Return the int32 token ids that `pack` packed."""
    narrow: NDArray[np.uint8] = np.frombuffer(packed, dtype=np.uint8)
    wide = np.zeros(len(narrow) // TOKEN_BYTES * 4, dtype=np.uint8)
    for place in range(TOKEN_BYTES):
        wide[place::4] = narrow[place::TOKEN_BYTES]
    return wide.view("<i4").astype(np.int32, copy=False)


def unpackable(tokens: Sequence[int] | Tokens) -> int | None:
    """Return a token id that `pack` cannot take, None if there is none."""
    if len(tokens) == 0:
        return None
    if isinstance(tokens, np.ndarray):
        tokens = int(tokens.min()), int(tokens.max())
    return next((end for end in (min(tokens), max(tokens)) if end not in TOKEN_IDS), None)


@lru_cache(maxsize=65_536)
def group_digest(group_id: str) -> int:
    """Return the number that names a group on the wire."""
    digest = hashlib.blake2b(group_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_digest(tokens: Tokens) -> int:
    """Return the number that names a prompt's int32 tokens; never 0, which says that it is unknown."""
    return ids.prompt_digest(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
