"""How many tokens a chunk has where `buffer.chunk_size` is not set."""

from __future__ import annotations

CHUNKS_TO_CAP = 64
LEAST_CHUNK = 256
"""Unless a chunk size is given, it is a response's cap / `CHUNKS_TO_CAP`, and at least `LEAST_CHUNK` tokens.

Shorter chunks reserve less KV that stays unused, but there are more of them, and each costs the buffer and
the engine some work: half the size ends rollouts up to 0.7 % sooner, twice the size 1 % later
(bench/scheduling/moves.py).
"""


def default_chunk(cap: int) -> int:
    """Return a chunk's tokens where no size is configured, for responses of at most `cap` tokens."""
    return max(LEAST_CHUNK, cap // CHUNKS_TO_CAP)
