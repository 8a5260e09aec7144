"""What the client refuses before it sends anything, and text on both ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from letters import Letters

from seer.client import InvalidField, Prompt, SamplingParams
from seer.client.prompts import check_request, check_rollout_id, prepare
from seer.client.text import load_tokenizer, response_text
from seer.common.detokenizer import Detokenizer


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([], "prompts = []: give at least one"),
        ("text", "prompts = 'text': give a sequence"),
        ([[1], []], r"prompts[1].token_ids = []: give a flat, non-empty"),
        ([[1], [2, -1]], r"prompts[1].token_ids = -1: token ids must be in"),
        ([[2**31]], r"prompts[0].token_ids = 2147483648: token ids"),
        ([[1.5]], r"prompts[0].token_ids = [1.5]: give a flat"),
        ([[[1], [2]]], r"prompts[0].token_ids = [[1], [2]]: give a flat"),
        ([[[1], [2, 3]]], r"prompts[0].token_ids = [[1], [2, 3]]: give a flat"),
        ([[2**70]], "prompts[0].token_ids = [1180591620717411303424]: give a flat"),
        ([Prompt("a", token_ids=[1]), Prompt("a", token_ids=[2])], "prompts[1].id = 'a': was given before"),
        ([Prompt("", token_ids=[1])], "prompts[0].id = '': give a non-empty"),
        ([Prompt(7, token_ids=[1])], "prompts[0].id = 7: give a non-empty string"),
        ([Prompt("\ud800", token_ids=[1])], "is not valid Unicode"),
        ([Prompt("é" * 201, token_ids=[1])], "is 402 bytes long; give at most 400"),
        ([Prompt("a")], "prompts[0] = 'a': give either text or token_ids"),
        ([Prompt("a", text="t", token_ids=[1])], "prompts[0] = 'a': give either text or token_ids"),
        ([""], "prompts[0].text = '': give a non-empty"),
    ],
)
def test_refused(prompts: object, told: str) -> None:
    with pytest.raises(InvalidField) as info:
        prepare(prompts, Letters())
    assert told in str(info.value)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidField, match=r"prompts\[0\].text = 'hi': give the client a tokenizer"):
        prepare(["hi"], None)
    assert prepare(["hi"], Letters())["0"].token_ids.tolist() == [104, 105]


def test_token_ids_keep_their_value_whatever_their_type() -> None:
    prepared = prepare([[1, 2], (3,), np.array([4], np.uint16), range(5, 7)], None)
    assert [p.token_ids.tolist() for p in prepared.values()] == [[1, 2], [3], [4], [5, 6]]
    assert {p.token_ids.dtype for p in prepared.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ((0, SamplingParams(), 0, 0), "n = 0: must be in"),
        ((1, SamplingParams(), 2**63, 0), "seed = "),
        ((1, SamplingParams(), 0, -(2**63) - 1), "rollout_number = "),
        ((1, SamplingParams(top_p=0.0), 0, 0), "sampling.top_p = 0.0"),
    ],
)
def test_request_refused(request_: tuple[int, SamplingParams, int, int], told: str) -> None:
    with pytest.raises(InvalidField) as info:
        check_request(*request_)
    assert str(info.value).startswith(told)


@pytest.mark.parametrize(
    ("text", "reason", "stop", "shown"),
    [
        ("abc", "", ("c",), "abc"),
        ("abc.", "46", ("c",), "abc"),  # a token that ended it has no text, as in vLLM
        ("a;b;", ";", (";", "x"), "a;b"),
        ("abEND", "END", ("END",), "ab"),
        ("ENDabEND", "END", ("END",), "ENDab"),
    ],
)
def test_text_ends_before_the_stop_string(text: str, reason: str, stop: tuple[str, ...], shown: str) -> None:
    letters, sampling = Detokenizer.of(Letters()), SamplingParams(stop=stop)
    assert response_text(letters, [97], Letters().encode(text), reason, sampling) == shown


def test_a_stop_string_within_a_longer_last_token() -> None:
    class Words:
        def encode(self, text: str) -> Sequence[int]:
            raise NotImplementedError

        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join(("ab", "c\n\nd\n\n")[token] for token in token_ids)

    text = response_text(Detokenizer.of(Words()), [0], [0, 1], "\n\n", SamplingParams(stop=("\n\n",)))
    assert text == "abc"


def test_a_stop_string_that_reads_as_a_number_is_no_token() -> None:
    letters, sampling = Detokenizer.of(Letters()), SamplingParams(stop=("51",), stop_token_ids=(51,))
    assert response_text(letters, [], Letters().encode("a51"), "51", sampling) == "a"
    assert response_text(letters, [], Letters().encode("a3"), "51", sampling) == "a"  # 51 is the token of "3"


def test_tokenizer_from_a_folder_or_file(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<eos>": 1, "one": 2, "two": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(max_length=1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for source in (tmp_path, str(tmp_path / "tokenizer.json")):
        loaded = load_tokenizer(source)
        assert list(loaded.encode("one two one")) == [2, 3, 2]
        assert loaded.decode([2, 3, 1]) == "one two"


def test_a_text_that_the_tokenizer_cannot_encode(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0}, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidField, match="text = 'two': the tokenizer cannot encode it"):
        load_tokenizer(tmp_path).encode("two")


def test_no_tokenizer_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"give a model folder with a tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidField, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("bad", ["", "a/b", "x" * 65])
def test_rollout_ids_must_fit_into_request_ids(bad):
    assert check_rollout_id("step-1") == "step-1"
    with pytest.raises(InvalidField, match=r"rollout_id = .*give 1 to 64 bytes without '/'"):
        check_rollout_id(bad)
