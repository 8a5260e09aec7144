"""Finds stop strings in the text of a request's output, or of its current turn's.

Invariants:
- the state depends on the tokens before that output and the output itself, not on where chunks began;
- a match ends within the text that the newest token added; the one that ends first wins, then the
  one listed first, so several tokens at once give what one at a time gives;
- nothing matches before `min_tokens` tokens are generated, and nothing of what is before the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.common.detokenizer import Detokenizer


class StopStrings:
    """Detokenises one request's output incrementally and searches it for stop strings.

    `prompt`, all tokens before, primes the detokeniser (leading spaces and split characters depend on it);
    `output` is what earlier chunks generated, none of which stopped. Special tokens have no text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        min_tokens: int,
        prompt: list[int],
        output: list[int],
    ) -> None:
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._keep = max(map(len, stops)) - 1
        self._count = len(output)
        self._tail, self._text = detokenizer.after(prompt, output, self._keep)

    def cut(self, tokens: list[int], *, ends_by_id: bool) -> tuple[list[int], str | None]:
        """Add new tokens; return them up to the one that completes a stop string, and that string.

        With `ends_by_id` the last one is a stop id: it has no text to search.
        """
        for count, token in enumerate(tokens[:-1] if ends_by_id else tokens, 1):
            found = self._feed(token)
            if found is not None:
                return tokens[:count], found
        return tokens, None

    def _feed(self, token: int) -> str | None:
        text, fresh = self._tail, self._grow(token)
        if not fresh or self._count <= self._min_tokens:
            return None
        found: tuple[int, str] | None = None
        for stop in self._stops:
            # A match must end in the fresh text: an older one was deferred by min_tokens.
            at = (text + fresh).find(stop, max(len(text) - len(stop) + 1, 0))
            if at >= 0 and (found is None or at + len(stop) < found[0]):
                found = at + len(stop), stop
        return found[1] if found else None

    def _grow(self, token: int) -> str:
        self._count += 1
        fresh = self._text.step(token)
        if fresh:
            self._tail = (self._tail + fresh)[-self._keep :] if self._keep else ""
        return fresh
