"""Text of prompts and responses, for callers who need it: the system itself uses token ids only.

Invariants:
- a prompt's ids are those that the tokenizer returns for it, with special tokens (as in vLLM);
- the text of a response that a stop string ended is cut before that string; its tokens are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from seer.common.errors import InvalidField


class Tokenizer(Protocol):
    """The methods that are used; Hugging Face tokenizers have them."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the ids of a prompt; without special tokens, of a text that goes on from others."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        ...


class _TokenizerFile:
    """`tokenizers.Tokenizer` behind `Tokenizer`."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise InvalidField("tokenizer", str(path), f"not a tokenizer.json: {error}") from error
        # The file may enable padding or truncation, which prompts must not have.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def load_tokenizer(source: str | Path | Tokenizer) -> Tokenizer:
    """Return a tokenizer from a model folder, a tokenizer.json or an object with encode and decode.

    Raises `InvalidField` for a path that holds none.
    """
    if not isinstance(source, str | Path):
        return source
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidField(
            "tokenizer", str(source), "give a model folder with a tokenizer.json, or that file"
        )
    return _TokenizerFile(file)


def response_text(
    tokenizer: Tokenizer, token_ids: Sequence[int], stop_reason: str, stop: tuple[str, ...]
) -> str:
    """Decode a response and cut it at the stop string that ended it."""
    text = tokenizer.decode(token_ids)
    if stop_reason not in stop:
        return text
    # The stop string ends in the last token; earlier occurrences were ignored because of min_tokens.
    before = len(tokenizer.decode(token_ids[:-1]))
    cut = text.find(stop_reason, max(0, before - len(stop_reason) + 1))
    return text if cut < 0 else text[:cut]
