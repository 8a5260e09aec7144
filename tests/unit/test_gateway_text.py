"""Text and chat: the list in `seer.gateway.text`."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import pytest

from seer.common.errors import ConfigError
from seer.common.types import SamplingParams
from seer.gateway.errors import HttpError
from seer.gateway.text import ModelText

MODEL = str(Path(__file__).parents[2] / "examples" / "countdown" / "model")
USER = {"role": "user", "content": "1 2"}


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText.load(MODEL, trust_templates=True)


def test_a_response_is_cut_before_what_ended_it(text: ModelText) -> None:
    ids = text.encode("1 2 3 2", special=False)
    asked = SamplingParams(stop=("2",))

    def shown(tokens: list[int], reason: str, **how: bool) -> str:
        given = {"skip_special": True, "whole": False} | how
        return text.text([5], tokens, reason, asked, **given)

    # The shipped tokenizer has no decoder: a space stands between tokens, and before the first, as in vLLM.
    assert shown(ids, "2") == " 1 2 3 "
    assert shown(ids, "2", whole=True) == shown(ids, "") == " 1 2 3 2"
    assert shown([4, 2], "99") == " 1"  # the last token ended it
    assert shown([4, 2], "99", skip_special=False) == " 1"
    assert shown([4, 2], "99", skip_special=False, whole=True) == " 1 <eos>"


def test_token_ids_must_be_the_model_s(text: ModelText) -> None:
    text.check([0, 65], "prompt")
    for ids, shown in (([66], "66"), ([-1], "-1"), ([], r"\[\]")):
        with pytest.raises(HttpError, match=f"prompt = {shown}: "):
            text.check(ids, "prompt")


def test_a_chat_without_a_template_is_refused(text: ModelText) -> None:
    assert text.render([USER]) == "<bos> 1 2"  # the shipped model's: a chat is its task's prompt
    bare = copy(text._tokenizer)
    bare.chat_template = None
    with pytest.raises(HttpError, match=r"no chat template: put chat_template\.jinja into its folder"):
        ModelText(bare, 66, trust_templates=True).render([USER])


def test_templates_of_requests_are_run_only_if_trusted(text: ModelText) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    assert text.render([USER], template=template) == "1 2!"
    assert text.render([USER], template=template, generation_prompt=False) == "1 2"
    careful = ModelText(text._tokenizer, 66, trust_templates=False)
    with pytest.raises(HttpError, match=r"set gateway\.trust_chat_templates"):
        careful.render([USER], template=template)
    for broken in ("{% for %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"):
        with pytest.raises(HttpError, match="the chat template cannot take this"):
            text.render([USER], template=broken)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for folder in ("", "/nowhere", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"shared\.model"):
            ModelText.load(folder, trust_templates=False)
