"""The text of a response whose tokens come in pieces. Pure.

Invariants:
- the pieces put together are the response's whole text, however its tokens are split;
- no piece has text that a later token changes: of a character whose tokens are not all there, of a stop token
  or of a stop string that may have begun;
- the work is linear in the tokens (`common/detokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from seer.common.detokenizer import Detokenizer, TextSteps
from seer.gateway.errors import HttpError


def possible_start(text: str, strings: Sequence[str]) -> int:
    """Return from where on the end of a text may be the beginning of one of the strings."""
    longest = max(map(len, strings), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        end = text[start:]
        if any(len(end) < len(each) and each.startswith(end) for each in strings):
            return start
    return len(text)


class TextStream:
    """`texts` decodes what follows the prompt. `stop`: the stop strings; `ends`: tokens that may end the
    response and have no text then. `whole`: the text has the stop string that ends the response.
    """

    def __init__(
        self,
        texts: Detokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        ends: Container[int] = (),
        *,
        whole: bool = False,
    ) -> None:
        self._steps = TextSteps(texts, prompt)
        self._stop = stop
        self._ends = ends
        self._whole = whole
        self._waiting: list[int] = []
        self._held = ""
        self._shown: list[str] = []  # as pieces: to add to a text copies it

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next tokens, at least one; return the text that they settle."""
        tokens = [*self._waiting, *token_ids]
        # The last token may be the one that ended the response, with a stop string inside.
        end = len(tokens) - (bool(self._stop) or tokens[-1] in self._ends)
        self._waiting = tokens[end:]
        self._held += "".join(map(self._steps.step, tokens[:end]))
        settled = len(self._held) if self._whole else possible_start(self._held, self._stop)
        piece, self._held = self._held[:settled], self._held[settled:]
        self._shown.append(piece)
        return piece

    def finish(self, whole: str) -> str:
        """Return the rest of the response's whole text. Raises `HttpError` if that is another text."""
        shown = "".join(self._shown)
        if not whole.startswith(shown):
            raise HttpError(500, "the model's tokenizer changed text that was sent: do not stream")
        return whole[len(shown) :]
