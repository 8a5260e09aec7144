"""Text and chat: prompts to token ids, token ids to text, by the model's own tokenizer and chat template.

Invariants:
- a prompt of text has the ids that vLLM gives it: with special tokens, unless the request says otherwise; a
  chat has those that its template writes, and no others;
- the text of a response that a stop string ended is cut before that string, unless the request says
  otherwise; its tokens are not;
- the same text, from tokens that come in pieces: `text_stream`;
- a template of the request's own is run only if the configuration trusts it: it is a program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seer.client.text import response_text
from seer.common.errors import ConfigError
from seer.gateway.errors import HttpError, bad
from seer.gateway.text_stream import TextStream

_OWN_ARGUMENTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
    "messages", "padding", "return_dict", "return_tensors", "tokenize", "tools", "truncation",
}  # fmt: skip
"""Arguments of the tokenizer's method that `chat_template_kwargs` must not replace."""


class ModelText:
    """`tokenizer` is a Hugging Face tokenizer; `vocab_size` the model's, token ids are below it (0: unknown).

    `trust_templates`: requests may bring chat templates.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, *, trust_templates: bool) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._trust_templates = trust_templates
        backend = tokenizer.backend_tokenizer
        names = (f"<0x{byte:02X}>" for byte in range(256))
        self._bytes = {token for name in names if (token := backend.token_to_id(name)) is not None}
        # Of BPE, transformers never cleans up the text; of others that may change any of it at any token.
        self._cleans_up = tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"

    @classmethod
    def load(cls, model: str, *, trust_templates: bool) -> ModelText:
        """Read tokenizer and vocabulary of a model folder. Raises `ConfigError` if they are not there."""
        if not Path(model).is_dir():
            raise ConfigError(f"shared.model = {model!r}: give the model's folder, for its tokenizer")
        try:
            # The class of all tokenizer.json files: others would import torch, where it is installed.
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
            config = json.loads((Path(model) / "config.json").read_text())
        except ImportError as error:
            raise ConfigError(
                f"the gateway needs transformers: pip install '.[gateway]' ({error})"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"shared.model = {model!r}: no tokenizer can be read: {error}") from error
        vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
        return cls(tokenizer, vocab_size, trust_templates=trust_templates)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text, with the special tokens that prompts begin or end with if `special`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def check(self, token_ids: Sequence[int], where: str) -> None:
        """Raise `HttpError` unless these are ids of the model, at least one."""
        if not token_ids:
            raise bad(where, list(token_ids), "give at least one token")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= (self.vocab_size or 2**31):
            raise bad(where, low if low < 0 else high, f"token ids are in [0, {self.vocab_size or 2**31})")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """Return a chat of plain messages as text. Raises `HttpError` for what the template cannot take."""
        if template is not None and not self._trust_templates:
            raise bad("chat_template", template, "set gateway.trust_chat_templates, or use the model's own")
        taken = sorted((arguments or {}).keys() & _OWN_ARGUMENTS)
        if taken:
            raise bad(
                f"chat_template_kwargs.{taken[0]}", (arguments or {})[taken[0]], "has a field of its own"
            )
        if template is None and not self._tokenizer.chat_template:
            raise HttpError(
                400, "the model has no chat template: send prompts to /v1/completions", "messages"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                documents=list(documents) if documents else None,
                chat_template=template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **(arguments or {}),
            )
        except Exception as error:  # a template is a program, which says no in its own ways
            raise HttpError(400, f"the chat template cannot take this: {error}", "messages") from error
        return text

    def text(
        self,
        token_ids: Sequence[int],
        stop_reason: str,
        stop: tuple[str, ...],
        *,
        skip_special: bool,
        whole: bool,
    ) -> str:
        """Return a response's text; `whole`: with the stop string that ended it."""
        decoder = _Decoder(self._tokenizer, skip_special=skip_special)
        return response_text(decoder, token_ids, "" if whole else stop_reason, stop)

    def stream(self, stop: tuple[str, ...], *, skip_special: bool, whole: bool) -> TextStream:
        """Return what decodes a response whose tokens come in pieces; the parameters are those of `text`."""
        # `all_special_ids` has those with a role alone; the decoder leaves out all that are marked special.
        added = self._tokenizer.added_tokens_decoder.items() if skip_special else ()
        hidden = {token for token, text in added if text.special}

        def open_ended(token: int) -> bool:
            # A run of bytes that makes no text, as a whole, is shown as other text than a part of it. A token
            # without text is part of the run.
            if not self._bytes:
                return bool(self._cleans_up)
            unknown = self._tokenizer.backend_tokenizer.id_to_token(token) is None
            return self._cleans_up or token in self._bytes or token in hidden or unknown

        decoder = _Decoder(self._tokenizer, skip_special=skip_special)
        return TextStream(decoder.decode, open_ended, () if whole else stop)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token's own text."""
        return [self._tokenizer.decode([token]) for token in token_ids]


class _Decoder:
    """A Hugging Face tokenizer behind `client.text.Tokenizer`."""

    def __init__(self, tokenizer: Any, *, skip_special: bool) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self._skip_special = skip_special

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special)
        return text
