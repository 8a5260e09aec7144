"""A waiting request as policies see it."""

from __future__ import annotations

import msgspec


class RequestView(msgspec.Struct, array_like=True):
    """`group_number` counts groups in order of arrival; `index` is the response's in its (named) group.

    In a turn of a trajectory, `prompt_len` is the context that it began with, `earlier` tokens were generated
    in earlier turns, and all turns together generate at most `cap`; 0: it is no turn. `queued` numbers the
    times at which requests started to wait, so `queued` orders requests by arrival in the queue.
    `last_instance` ran the last chunk; empty before the first. `came_with`: what the request had `produced`
    when it last came to that instance, from elsewhere or after waiting. `image_tokens`: those of the largest
    image in its prompt; 0: no image.
    """

    request_id: str
    group_number: int
    index: int
    prompt_len: int
    max_tokens: int
    generated: int = 0
    queued: int = 0
    last_instance: str = ""
    came_with: int = 0
    earlier: int = 0
    cap: int = 0
    image_tokens: int = 0

    @property
    def context(self) -> int:
        """Tokens before the next chunk: prompt and output so far."""
        return self.prompt_len + self.generated

    @property
    def produced(self) -> int:
        """Tokens generated so far, in all turns."""
        return self.earlier + self.generated

    @property
    def most(self) -> int:
        """Bound on `produced`."""
        return self.cap or self.max_tokens

    @property
    def remaining(self) -> int:
        """Output tokens still allowed, in this turn."""
        return self.max_tokens - self.generated
