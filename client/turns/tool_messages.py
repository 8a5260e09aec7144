"""What a chat template adds between two turns of a model, as tokens.

Rendering a whole conversation again may change tokens that were generated, and rendering new messages alone
loses the template's separators. So a stand-in conversation is rendered with and without the new messages:
the difference is what comes after the turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from seer.common.errors import InvalidField

Message = Mapping[str, object]
"""One message of a conversation, as chat templates take it."""

_USER: Message = {"role": "user", "content": "a"}
_ASSISTANT: Message = {"role": "assistant", "content": "b"}


class ChatTokenizer(Protocol):
    """The methods that are used; Hugging Face tokenizers have them."""

    def apply_chat_template(self, conversation: list[Message], **options: object) -> Iterable[int]:
        """Return the ids of a conversation, with `tokenize=True, return_dict=False`."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""


def tool_tokens(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    last_token: int,
    **options: object,
) -> list[int]:
    """Return the tokens from the end of a generated turn to the beginning of the next one.

    `messages` are what the environment says, mostly of role "tool"; `last_token` is the last one that was
    generated: where it is what the template ends a turn by, that is not repeated. `options` go to the
    template (`tools`, `chat_template`, ...). Raises `InvalidField` for templates that render a turn
    otherwise once others follow: then begin a new context.
    """

    def render(conversation: list[Message], *, prompt: bool) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                conversation, tokenize=True, return_dict=False, add_generation_prompt=prompt, **options
            )
        )

    opening = render([_USER], prompt=True) + list(tokenizer.encode("b", add_special_tokens=False))
    turn = render([_USER, _ASSISTANT], prompt=False)
    whole = render([_USER, _ASSISTANT, *messages], prompt=True)
    if turn[: len(opening)] != opening or whole[: len(turn)] != turn:
        fix = "renders a turn otherwise once others follow: send the whole conversation as a new context"
        raise InvalidField("chat_template", type(tokenizer).__name__, fix)
    after = whole[len(opening) :]
    return after[1:] if len(turn) > len(opening) and after[0] == last_token else after
