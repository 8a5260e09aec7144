"""The text of a response whose tokens come in pieces. Pure.

Invariants:
- the pieces put together are the response's whole text, however its tokens are split;
- no piece has text that a later token changes: of a character whose tokens are not all there, of the tokens
  that `open_ended` names, or of a stop string that may have begun;
- the work is linear in the tokens, unless they make no whole character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seer.gateway.errors import HttpError

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that make no character, so far."""


def possible_start(text: str, strings: Sequence[str]) -> int:
    """Return from where on the end of a text may be the beginning of one of the strings."""
    longest = max(map(len, strings), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        end = text[start:]
        if any(len(end) < len(each) and each.startswith(end) for each in strings):
            return start
    return len(text)


class TextStream:
    """`decode` returns the text of token ids; `open_ended`, whether later tokens may change that of this one.

    `stop`: the stop strings, at one of which the whole text may be cut.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        open_ended: Callable[[int], bool],
        stop: Sequence[str] = (),
    ) -> None:
        self._decode = decode
        self._open_ended = open_ended
        self._stop = stop
        # What is decoded: tokens whose text is settled, since a token's text may depend on what is before it,
        # and those that came after them.
        self._window: list[int] = []
        self._context = 0
        self._settled = 0
        self._held = ""
        self._shown = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next tokens, at least one; return the text that they settle."""
        self._window += token_ids
        self._held += self._next()
        end = possible_start(self._held, self._stop)
        piece, self._held = self._held[:end], self._held[end:]
        self._shown += piece
        return piece

    def finish(self, whole: str) -> str:
        """Return the rest of the response's whole text. Raises `HttpError` if that is another text."""
        if not whole.startswith(self._shown):
            raise HttpError(500, "the model's tokenizer changed text that was sent: do not stream")
        return whole[len(self._shown) :]

    def _next(self) -> str:
        # The last token may be the one that ended the response, with a stop string inside.
        end = len(self._window) - bool(self._stop)
        while end > self._context and self._open_ended(self._window[end - 1]):
            end -= 1
        text = self._decode(self._window[:end])
        settled = text.rstrip(REPLACEMENT)
        new = settled[self._settled :]
        self._settled = max(self._settled, len(settled))
        if new and len(settled) == len(text):
            self._window = self._window[self._context :]
            self._context = end - self._context
            self._settled = len(self._decode(self._window[: self._context]))
        return new
