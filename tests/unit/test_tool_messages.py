"""Tokens between two turns: those of the template, with its separators, and never of the turn itself."""

import pytest

from seer.client import InvalidField
from seer.client.turns import tool_tokens

TOOL = {"role": "tool", "content": "42"}


class Characters:
    """A tokenizer of characters with a chat template; `render` is that template."""

    def __init__(self, render):
        self._render = render

    def encode(self, text, *, add_special_tokens):
        return [ord(each) for each in text]

    def apply_chat_template(self, conversation, *, tokenize, return_dict, add_generation_prompt, **options):
        return self.encode(self._render(conversation, add_generation_prompt), add_special_tokens=False)


def chatml(conversation, prompt):
    """As Qwen's: a newline follows the token that ends a turn, which the model generates itself."""
    text = "".join(f"<{each['role']}>\n{each['content']}|\n" for each in conversation)
    return text + ("<assistant>\n" if prompt else "")


def forgetful(conversation, prompt):
    """A template that renders only the last turn of the assistant in full."""
    last = max((i for i, each in enumerate(conversation) if each["role"] != "tool"), default=0)
    keep = [each for i, each in enumerate(conversation) if i >= last or each["role"] == "user"]
    return (
        "".join(f"[{len(conversation) - i}{each['content']}]" for i, each in enumerate(keep)) + "?" * prompt
    )


def text_of(render, last, messages=(TOOL,)):
    return "".join(map(chr, tool_tokens(Characters(render), messages, last_token=ord(last))))


def test_the_separator_after_a_turn_is_kept_and_its_end_not_repeated():
    assert text_of(chatml, "|") == "\n<tool>\n42|\n<assistant>\n"
    assert (
        text_of(chatml, "x") == "|\n<tool>\n42|\n<assistant>\n"
    )  # a stop string ended it: the end is missing
    assert text_of(chatml, "|", [TOOL, TOOL]).count("<tool>") == 2


def test_a_turn_and_what_follows_are_the_whole_conversation():
    user = {"role": "user", "content": "how much?"}
    spoken = {"role": "assistant", "content": "let me see"}
    whole = chatml([user, spoken, TOOL], True)
    generated = chatml([user], True) + "let me see|"
    assert generated + text_of(chatml, "|") == whole


def test_a_template_without_a_turns_end_works_too():
    assert text_of(lambda talk, prompt: "".join(f"{m['role']}:{m['content']} " for m in talk) + "assistant:" * prompt, "x") == " tool:42 assistant:"  # fmt: skip


def shortened(conversation, prompt):
    """As Qwen's, but what the assistant said is left out once others follow."""
    last = conversation[-1]
    said = [m if m is last or m["role"] != "assistant" else m | {"content": ""} for m in conversation]
    return chatml(said, prompt)


def appending(conversation, prompt):
    """A template that counts the messages that follow a turn."""
    left = range(len(conversation) - 1, -1, -1)
    return "".join(f"{m['content']}{n}" for m, n in zip(conversation, left, strict=True)) + "?" * prompt


def upper(conversation, prompt):
    """A template that renders what the assistant said otherwise than it was generated."""
    said = "".join(f"{each['role']}:{each['content']} ".upper() for each in conversation)
    return said + "ASSISTANT:" * prompt


@pytest.mark.parametrize("render", [forgetful, shortened, appending, upper])
def test_templates_that_rewrite_are_refused_by_name(render):
    with pytest.raises(InvalidField, match=r"chat_template = .*renders a turn otherwise once others follow"):
        text_of(render, "|")
