"""Text of prompts and responses, for callers who need it: the system itself uses token ids only.

Invariants:
- a prompt's ids are the ids that the tokenizer returns for its text, with special tokens (as in vLLM);
- the text of a response is vLLM's (`common/detokenizer.py`): without the string or token that stopped the
  response, which its tokens have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from seer.common.detokenizer import Detokenizer
from seer.common.errors import InvalidField
from seer.common.types import SamplingParams


class Tokenizer(Protocol):
    """The methods that are used; Hugging Face tokenizers have them."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the ids of a prompt; without special tokens, of a text that goes on from others."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""


class _TokenizerFile:
    """`tokenizers.Tokenizer` behind `Tokenizer`."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise InvalidField("tokenizer", str(path), f"not a tokenizer.json: {error}") from error
        # The file may enable padding or truncation, which prompts must not have.
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        try:
            ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises no narrower one
            raise InvalidField("text", text, f"the tokenizer cannot encode it: {error}") from error
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)
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


def ended_by_id(last_token: int, stop_reason: str, sampling: SamplingParams) -> bool:
    """Return whether a token ended a response; a string may read as its number does."""
    if stop_reason not in sampling.stop:
        return bool(stop_reason)
    return stop_reason == str(last_token) and last_token in sampling.stop_token_ids


def response_text(
    detokenizer: Detokenizer,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    stop_reason: str,
    sampling: SamplingParams,
    *,
    whole: bool = False,
) -> str:
    """Return the text of a response to a prompt; `whole`: with what it stopped at.

    A stop string that special tokens interrupt, where the detokenizer shows these, is not cut.
    """
    by_id = ended_by_id(token_ids[-1], stop_reason, sampling)
    text = detokenizer.text(prompt, token_ids[:-1] if by_id and not whole else token_ids)
    if by_id or not stop_reason:
        return text
    # The stop string ends in the last token; earlier occurrences were ignored because of min_tokens.
    before = len(detokenizer.text(prompt, token_ids[:-1]))
    cut = text.find(stop_reason, max(0, before - len(stop_reason) + 1))
    if cut < 0:
        return text
    return text[: cut + len(stop_reason) if whole else cut]
