"""Text and chat: prompts to token ids, token ids to text, by the model's own tokenizer and chat template.

Invariants:
- a prompt of text has the ids that vLLM gives it: with special tokens, unless the request says otherwise; a
  chat has the special tokens that its template writes, and no others;
- the text of a response is vLLM's: without the string or token that it stopped at, unless the request says
  otherwise; its tokens have both;
- the same text, from tokens that come in pieces: `text_stream`;
- a template of the request's own is run only if the configuration trusts it: it is a program.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seer.client.text import response_text
from seer.common.detokenizer import Detokenizer
from seer.common.errors import ConfigError
from seer.common.types import SamplingParams
from seer.gateway.errors import HttpError, bad
from seer.gateway.text_stream import TextStream

_OWN_ARGUMENTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
    "messages", "padding", "return_dict", "return_tensors", "tokenize", "tools", "truncation",
}  # fmt: skip
"""Arguments of the tokenizer's method that `chat_template_kwargs` must not replace."""


class ModelText:
    """`tokenizer` is a Hugging Face tokenizer; `vocab_size` the model's, token ids are below it (0: unknown).

    `eos`: tokens that end a response, beside the tokenizer's own. `trust_templates`: requests may bring chat
    templates.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401
        vocab_size: int,
        eos: Iterable[int] = (),
        *,
        trust_templates: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos = {*eos, *(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))}
        self._trust_templates = trust_templates
        self._texts = {skip: Detokenizer.of(tokenizer, skip_special=skip) for skip in (True, False)}

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
            generation = Path(model) / "generation_config.json"
            eos = (json.loads(generation.read_text()) if generation.exists() else config).get("eos_token_id")
            vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
        except ImportError as error:
            raise ConfigError(
                f"the gateway needs transformers: pip install 'seer-rollout[gateway]' ({error})"
            ) from error
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(f"shared.model = {model!r}: no tokenizer can be read: {error}") from error
        ends = eos if isinstance(eos, list) else () if eos is None else (eos,)
        return cls(tokenizer, vocab_size, ends, trust_templates=trust_templates)

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
            fix = (
                "put chat_template.jinja into its folder (shared.model) and start the gateway again, give "
                "chat_template with gateway.trust_chat_templates=true, or send prompts to /v1/completions"
            )
            raise HttpError(400, f"the model has no chat template: {fix}", "messages")
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
            said = str(error)[:1000] or type(error).__name__
            raise HttpError(400, f"the chat template cannot take this: {said}", "messages") from error
        return text

    def text(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        stop_reason: str,
        sampling: SamplingParams,
        *,
        skip_special: bool,
        whole: bool,
    ) -> str:
        """Return a response's text; `whole`: with the stop string or token that ended it."""
        texts = self._texts[skip_special]
        return response_text(texts, prompt, token_ids, stop_reason, sampling, whole=whole)

    def stream(
        self, prompt: Sequence[int], sampling: SamplingParams, *, skip_special: bool, whole: bool
    ) -> TextStream:
        """Return what decodes a response whose tokens come in pieces; the parameters are those of `text`."""
        ends = self._eos.union(sampling.stop_token_ids)
        texts = self._texts[skip_special]
        return TextStream(texts, prompt, sampling.stop, () if whole else ends, whole=whole)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(token_ids)
        return text

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token's own text."""
        return [self._tokenizer.decode([token]) for token in token_ids]
