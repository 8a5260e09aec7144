"""A waiting request as policies see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestView:
    """`group_number` counts groups in order of arrival; `index` is the response's in its group.

    `queued` numbers the times at which requests started to wait, so it orders them by arrival in the queue.
    `last_instance` ran the last chunk; empty before the first.
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
        """Tokens before the next chunk: prompt and output so far."""
        return self.prompt_len + self.generated

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.max_tokens - self.generated
