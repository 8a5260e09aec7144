"""The text of generated tokens, the same for all who need it: engines, clients and the gateway. Pure.

Invariants:
- the text that a token adds depends on the tokens before it, the prompt's among them, and on nothing else;
- put together it is what vLLM's detokenizer gives: without a character whose tokens are not all there;
- it holds nothing of the prompt, even where the prompt ends within a character (vLLM then gives all of it);
- a token costs the decoding of a few; of at most `MOST_PENDING`, where none of them makes text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that make no character, so far."""

MOST_PENDING = 256
"""Tokens that may wait for text: bytes that make no character, or special tokens, which have none."""

_SPLIT = 8
"""The last tokens of a text among which one character may lie: it has at most 4 bytes."""

_CONTEXT = 32
"""How many of a prompt's last tokens are decoded first, for the text before a response."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """`decode` returns the text of token ids. `joins`: where no character is split, that of two parts is the
    text of each, put together; but for a space at the very start.
    """

    def __init__(self, decode: Decode, *, joins: bool = False) -> None:
        self.decode = decode
        self.single = functools.lru_cache(2**14)(lambda token: decode([token]))
        self._joins = joins

    @classmethod
    def of(cls, tokenizer: Any, *, skip_special: bool = True) -> Detokenizer:  # noqa: ANN401
        """Return the detokenizer of a `tokenizers.Tokenizer`, its wrapper, or anything with `decode`."""
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if hasattr(backend, "get_added_tokens_decoder"):
            decode: Decode = functools.partial(backend.decode, skip_special_tokens=skip_special)
            return cls(decode, joins=_joins(backend.decoder))
        if hasattr(tokenizer, "convert_ids_to_tokens"):  # of transformers, in Python alone
            return cls(functools.partial(tokenizer.decode, skip_special_tokens=skip_special))
        return cls(tokenizer.decode)

    def text(self, prompt: Sequence[int], output: Sequence[int]) -> str:
        """Return the text of an output, as `TextSteps` adds it up."""
        steps = TextSteps(self, prompt)
        if self._joins and not steps.waits:
            start, before = len(steps.prefix), steps.window
            for end in range(len(output), max(len(output) - _SPLIT, 0), -1):
                text = self.decode([*before, *output[:end]])
                if REPLACEMENT not in text and text.startswith(steps.prefix):
                    last = TextSteps(self, [*before, *output[:end]])
                    return text[start:] + "".join(map(last.step, output[end:]))
        return "".join(map(steps.step, output))

    def after(self, prompt: Sequence[int], output: Sequence[int], chars: int) -> tuple[str, TextSteps]:
        """Return the last `chars` characters of an output's text, and what gives the text of what follows."""
        size = _CONTEXT + chars
        while self._joins and size + _SPLIT < len(output):
            for split in range(_SPLIT):  # it may begin within a character
                context = output[-size - split :]
                text = self.decode(context)
                if REPLACEMENT not in text and len(text) >= chars:
                    return text[len(text) - chars :], TextSteps(self, context)
            size *= 8
        steps, text = TextSteps(self, prompt), ""
        for token in output:
            text += steps.step(token)
            text = text[max(0, len(text) - chars) :]
        return text, steps


class TextSteps:
    """Gives the text of an output token by token, as `DecodeStream` of the library `tokenizers` does."""

    def __init__(self, texts: Detokenizer, prompt: Sequence[int]) -> None:
        self._texts = texts
        # Tokens whose text later tokens may add to. The first `_known`, the prefix, have had their text.
        self.window: list[int] = []
        self.prefix = ""
        self._known = 0
        context = self._context(prompt)
        for split in range(_SPLIT + 1):
            self.window = context[: max(0, len(context) - split)]
            self.prefix = texts.decode(self.window)
            if not self.prefix.endswith(REPLACEMENT):
                self._known = len(self.window)
                for token in context[self._known :]:
                    self.step(token)
                return
        self._clear()

    @property
    def waits(self) -> bool:
        """Whether there are tokens that have no text yet."""
        return len(self.window) > self._known

    def step(self, token: int) -> str:
        """Return the text that the next token adds, with the text of earlier tokens that waited for it."""
        decode = self._texts.decode
        if not self.prefix and self.window:
            text = decode(self.window)
            if not text.endswith(REPLACEMENT):
                self.prefix, self._known = text, len(self.window)
        self.window.append(token)
        text, prefix = decode(self.window), self.prefix
        begins = text.startswith(prefix)
        if text.endswith(REPLACEMENT) or not (len(text) > len(prefix) if begins else _longer(text, prefix)):
            return self._later(text)
        if not begins:
            # Bytes made a character, but make none with those that came after: what waits is given up.
            self._clear()
            return self.step(token)
        self.window = self.window[self._known :]
        self._known = len(self.window)
        self.prefix = self._texts.single(token) if self._known == 1 else decode(self.window)
        return text[len(prefix) :]

    def _later(self, text: str) -> str:
        """Return nothing, unless too many tokens wait: they are not decoded with every token that follows."""
        known = self._known if self.prefix else 0
        if len(self.window) - known <= MOST_PENDING:
            return ""
        if text == self.prefix:
            del self.window[known:]
            return ""
        rest = text[len(self.prefix) :] if text.startswith(self.prefix) else ""
        self._clear()
        return rest

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Return as many of the last tokens as have a text without split characters."""
        size = _CONTEXT
        while size < len(prompt):
            text = self._texts.decode(prompt[-size:])
            if text and REPLACEMENT not in text:
                break
            size *= 8
        return list(prompt[-size:])

    def _clear(self) -> None:
        self.window, self.prefix, self._known = [], "", 0


def _longer(text: str, other: str) -> bool:
    """Return whether a text has more bytes, which the library counts."""
    return len(text.encode(errors="surrogatepass")) > len(other.encode(errors="surrogatepass"))


def _joins(decoder: Any) -> bool:  # noqa: ANN401
    """Return whether a `tokenizers.decoders.Decoder` gives each token's text whatever stands beside it."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    parts = state.get("decoders", [state])
    kinds = [part.get("type") for part in parts]
    whole_ends = all(part.get("stop", 0) == 0 for part in parts)
    return whole_ends and kinds in (
        ["ByteLevel"],
        ["Metaspace"],
        ["Replace", "ByteFallback", "Fuse"],
        ["Replace", "ByteFallback", "Fuse", "Strip"],
    )
