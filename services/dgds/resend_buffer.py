"""Output tokens that an engine keeps until the dgds surely has them, so that they can be sent again.

Invariants:
- the tokens kept never exceed `max_tokens`: the response that got no token for longest is dropped whole;
- `batch` hands out every kept token once, in order per response; it does so again from where a gap was
  reported, and from the start after a restart of the dgds;
- when the dgds lacks tokens that were dropped here, nothing more of that response is handed out.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from seer.common.wire import MAX_APPENDS

Tokens = NDArray[np.int32]

RESEND_SECONDS = 1.0
"""A response is rewound at most this often: several gaps may be reported before a re-send arrives."""

OVERHEAD_TOKENS = 128
"""Counted for each response besides its tokens: about 500 bytes of objects, at 4 a token."""

Key = tuple[int, int]
"""Group digest and response index."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one response that follow its first `previous` tokens."""

    key: Key
    attempt: int
    previous: int
    tokens: Tokens


@dataclass(slots=True)
class _Output:
    """Output positions `start` up to `end` of one response; those before `sent` were handed out."""

    attempt: int
    start: int
    context: Tokens
    sent: int
    new: array[int] = field(default_factory=lambda: array("i"))
    rewound: float = float("-inf")
    lost: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.context) + len(self.new)

    @property
    def size(self) -> int:
        return self.end - self.start + OVERHEAD_TOKENS

    def take(self, most: int) -> Tokens:
        place, base = self.sent - self.start, len(self.context)
        if place < base:
            part = self.context[place : place + most]
        else:
            part = np.frombuffer(self.new[place - base : place - base + most], dtype=np.int32)
        self.sent += len(part)
        return part


class ResendBuffer:
    """See the module's docstring. `held` tokens are kept; `counters` are totals."""

    def __init__(self, max_tokens: int, counters: Counter[str] | None = None) -> None:
        self.counters: Counter[str] = Counter() if counters is None else counters
        self.held = 0
        self._max_tokens = max_tokens
        self._outputs: OrderedDict[Key, _Output] = OrderedDict()
        self._unsent: dict[Key, None] = {}

    @property
    def unsent(self) -> bool:
        """Whether `batch` has something to hand out."""
        return bool(self._unsent)

    def begin(self, key: Key, attempt: int, context: Tokens) -> None:
        """Follow an attempt of a response that has `context` (int32) so far; kept, not copied.

        The engine that generated `context` has sent it; what this one did not send yet stays unsent.
        """
        known = self._release(key)
        sent = len(context) if known is None else min(known.sent, len(context))
        self._keep(key, _Output(attempt, 0, context, sent))

    def append(self, key: Key, attempt: int, previous: int, tokens: Sequence[int]) -> None:
        """Add the tokens after the first `previous`."""
        output = self._outputs.get(key)
        if output is None or output.attempt != attempt or output.end != previous:
            self._release(key)
            output = _Output(attempt, previous, np.empty(0, dtype=np.int32), previous)
            self._keep(key, output)
        output.new.extend(tokens)
        self.held += len(tokens)
        self._outputs.move_to_end(key)
        if not output.lost:
            self._unsent[key] = None
        self._make_room()

    def batch(self, most_tokens: int) -> list[Part]:
        """Hand out what is unsent, at most `most_tokens`, and what one message may have."""
        parts: list[Part] = []
        while self._unsent and most_tokens > 0 and len(parts) < MAX_APPENDS:
            key = next(iter(self._unsent))
            output = self._outputs[key]
            previous, tokens = output.sent, output.take(most_tokens)
            most_tokens -= len(tokens)
            parts.append(Part(key, output.attempt, previous, tokens))
            if output.sent == output.end:
                del self._unsent[key]
        return parts

    def rewind(self, key: Key, attempt: int, have: int, now: float) -> None:
        """Hand out again what follows the first `have` tokens: the dgds lacks it."""
        self.counters["gaps"] += 1
        output = self._outputs.get(key)
        if output is None or output.attempt != attempt or now - output.rewound < RESEND_SECONDS:
            return
        if have < output.start:
            output.lost = True
            self._unsent.pop(key, None)
            self.counters["unfillable"] += 1
        elif have < output.sent:
            output.sent, output.rewound = have, now
            self._unsent[key] = None

    def rewind_all(self) -> None:
        """Hand out everything again: the dgds has lost it all."""
        for key, output in self._outputs.items():
            output.sent, output.rewound, output.lost = output.start, float("-inf"), False
            if output.sent < output.end:
                self._unsent[key] = None

    def _keep(self, key: Key, output: _Output) -> None:
        self._outputs[key] = output
        self.held += output.size
        if output.sent < output.end:
            self._unsent[key] = None
        self._make_room()

    def _release(self, key: Key) -> _Output | None:
        output = self._outputs.pop(key, None)
        if output is not None:
            self.held -= output.size
            self._unsent.pop(key, None)
        return output

    def _make_room(self) -> None:
        while self.held > self._max_tokens:
            output = self._release(next(iter(self._outputs)))
            if output is not None:
                self.counters["dropped_responses"] += 1
                self.counters["dropped_tokens"] += output.end - output.sent
