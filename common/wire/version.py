"""The protocol version.

MAJOR changes when an old peer could misread a new message; peers of different majors refuse each
other. MINOR changes with every backward-compatible addition.

Removed, and never to be used again: in 2.0 `Drain`, `Register.vocab_size` and
`ChunkResult.cached_tokens`.
"""

from __future__ import annotations

MAJOR = 2
MINOR = 8
