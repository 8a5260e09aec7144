"""A waiting request as policies see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestView:
    """`group_number` counts groups in order of arrival.

    `queued` grows with every time any request starts waiting; `last_instance` ran its last chunk.
    """

    request_id: str
    group_number: int
    index: int
    prompt_len: int
    max_tokens: int
    generated: int = 0
    queued: int = 0
    last_instance: str = ""

    @property
    def context(self) -> int:
        """Tokens whose KV the next chunk starts from."""
        return self.prompt_len + self.generated

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.max_tokens - self.generated
