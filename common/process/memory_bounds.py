"""What buffer and dgds hold at most, as bounds that follow from the memory of their process if left out."""

from __future__ import annotations

from seer.common.config import BufferConfig, DgdsConfig
from seer.common.process.memory_limit import Bound
from seer.common.wire import TOKEN_BYTES as DRAFT_TOKEN_BYTES

MOST_UNFINISHED_BYTES, MOST_RESULT_BYTES = 16 * 2**30, 8 * 2**30
"""Of a buffer by default where memory abounds: others need it, too."""

MOST_TOKENS, MOST_REMEMBERED = 500_000_000, 50_000_000
"""Of a dgds by default where memory abounds: 1,900 for each request of 256 engines of 1,024; and of past
groups."""


def buffer_bounds(settings: BufferConfig) -> list[Bound]:
    """Return the bounds on output of unfinished groups and on finished groups."""
    return [
        Bound("buffer.unfinished_bytes", settings.unfinished_bytes, 1 / 3, MOST_UNFINISHED_BYTES),
        Bound("buffer.result_bytes", settings.result_bytes, 1 / 4, MOST_RESULT_BYTES),
    ]


def dgds_bounds(settings: DgdsConfig) -> list[Bound]:
    """Return the bounds on tokens of present groups and of past ones."""
    tokens, past = settings.max_tokens, settings.remember_tokens
    return [
        Bound("dgds.max_tokens", tokens, 0.4, MOST_TOKENS, DRAFT_TOKEN_BYTES),
        Bound("dgds.remember_tokens", past, 0.1, MOST_REMEMBERED, DRAFT_TOKEN_BYTES),
    ]
