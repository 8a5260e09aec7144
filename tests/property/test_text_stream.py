"""Text that comes in pieces, for tokenizers of every kind: the list in `seer.gateway.text_stream`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seer.gateway.errors import HttpError
from seer.gateway.text import ModelText
from seer.gateway.text_stream import TextStream, possible_start
from seer.gateway.tools import HermesStream, hermes_calls

LETTERS = ("a", "b", "ab", "<stop>", "\ufffd", "é")


def wrapped(tokenizer: Tokenizer) -> ModelText:
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return ModelText(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 0, trust_templates=False)


def byte_level() -> ModelText:
    """As GPT-2 and Qwen: a token is some bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "aa", "Ġab"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer)


def byte_fallback() -> ModelText:
    """As Llama 2: words, and a run of bytes for what is none."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁a", "▁▁", *LETTERS]
    model = models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<0x00>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(tokenizer)


def metaspace() -> ModelText:
    """As SentencePiece's unigram models."""
    names = ["▁", "▁a", "▁▁", *LETTERS]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], 0))
    tokenizer.decoder = decoders.Metaspace()
    return wrapped(tokenizer)


def words() -> ModelText:
    """No decoder: a space between tokens."""
    return wrapped(
        Tokenizer(models.WordLevel({name: i for i, name in enumerate(LETTERS)}, unk_token="\ufffd"))
    )


KINDS = {each.__name__: each() for each in (byte_level, byte_fallback, metaspace, words)}


def response(
    text: ModelText, ids: list[int], stop: tuple[str, ...], min_tokens: int
) -> tuple[list[int], str]:
    """What an engine makes of tokens: it ends with the first stop string that ends in its last token."""
    for count in range(min_tokens + 1, len(ids) + 1):
        so_far = text.text(ids[:count], "", (), skip_special=True, whole=True)
        before = len(text.text(ids[: count - 1], "", (), skip_special=True, whole=True))
        for each in stop:
            if so_far.find(each, max(0, before - len(each) + 1)) >= 0:
                return ids[:count], each
    return ids, ""


def cut(ids: Sequence[int], places: set[int]) -> list[list[int]]:
    inside = sorted(place % len(ids) for place in places)
    ends = [*dict.fromkeys(place for place in inside if place), len(ids)]
    return [list(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole_text_and_are_never_taken_back(kind: str, data: st.DataObject) -> None:
    text = KINDS[kind]
    size = len(text._tokenizer)
    # Characters of two to four bytes, beside any tokens: one more id than there are has no text.
    char = [text._tokenizer.backend_tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é€😀".encode()]
    common = [token for token in char if token is not None] or [size - 1]
    tokens = st.one_of(st.integers(0, size), st.integers(max(0, size - 12), size), st.sampled_from(common))
    drawn = data.draw(st.lists(tokens, min_size=1, max_size=40))
    shown = text.text(drawn, "", (), skip_special=True, whole=True)
    parts = st.integers(0, 40).map(lambda start: shown[start : start + 4]).filter(bool)
    strings = st.lists(
        parts | st.text("ab<>stop ", min_size=1, max_size=6) if shown else st.just("a"), max_size=3
    )
    stop = tuple(data.draw(strings))
    skip, whole = data.draw(st.booleans()), data.draw(st.booleans())
    ids, reason = response(text, drawn, stop, data.draw(st.integers(0, 10)))
    expected = text.text(ids, reason, stop, skip_special=skip, whole=whole)
    stream = text.stream(stop, skip_special=skip, whole=whole)
    sent = ""
    for piece in cut(ids, data.draw(st.sets(st.integers(0, 40)))):
        sent += stream.push(piece)
        assert expected.startswith(sent)
    assert sent + stream.finish(expected) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_is_not_held_back(kind: str) -> None:
    text = KINDS[kind]
    token = text._tokenizer.backend_tokenizer.token_to_id("a")
    stream = text.stream((), skip_special=True, whole=False)
    pushed = [stream.push([token] * 3) for _ in range(3)]
    assert "".join(pushed) == text.text([token] * 9, "", (), skip_special=True, whole=True)
    assert all(pushed)
    careful = text.stream(("b",), skip_special=True, whole=False)  # only the last token is
    assert sum(careful.push([token] * 3).count("a") for _ in range(3)) == 8


def test_the_work_is_linear() -> None:
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return "a" * len(ids)

    stream = TextStream(decode, lambda token: False)
    for _ in range(1000):
        stream.push([1] * 10)
    assert decoded < 4 * 10_000


def test_text_that_changed_is_an_error() -> None:
    stream = TextStream(lambda ids: "a" * len(ids), lambda token: False)
    assert stream.push([1]) == "a"
    with pytest.raises(HttpError, match="do not stream"):
        stream.finish("b")


def test_a_tokenizer_that_cleans_up_text_holds_all_of_it_back() -> None:
    tokenizer = Tokenizer(models.WordLevel({"do": 0, "n't": 1}, unk_token="do"))
    backend = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
    stream = ModelText(backend, 0, trust_templates=False).stream((), skip_special=True, whole=False)
    assert stream.push([0]) == stream.push([1]) == ""
    assert stream.finish("don't") == "don't"


@given(st.text("ab"), st.lists(st.text("ab", min_size=1), max_size=3))
def test_where_a_string_may_have_begun(text: str, strings: list[str]) -> None:
    starts = (
        start for start in range(len(text))
        if any(each != text[start:] and each.startswith(text[start:]) for each in strings)
    )  # fmt: skip
    assert possible_start(text, strings) == next(starts, len(text))


CALLS = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f"}', "<tool", "_call>", "<", "a"]), max_size=8
)


@settings(max_examples=400)
@given(CALLS, st.sets(st.integers(1, 60)))
def test_tool_calls_in_pieces(words_of_text: list[str], places: set[int]) -> None:
    text = "".join(words_of_text)
    content, calls = hermes_calls(text)
    stream = HermesStream()
    ends = sorted({*(place for place in places if place < len(text)), len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    sent = ""
    for piece in pieces[:-1]:
        sent += stream.push(piece)
        assert (content or "").startswith(sent)
    rest, found = stream.finish(pieces[-1])
    assert sent + rest == (content or "")
    assert [call["function"] for call in found] == [call["function"] for call in calls]


def test_a_token_that_is_left_out_does_not_end_a_run_of_bytes() -> None:
    text = KINDS["byte_fallback"]
    ids = [0xC2, 0x80, len(text._tokenizer) - 1, 0x80]  # the character U+0080, <eos>, and a byte too many
    expected = text.text(ids, "", (), skip_special=True, whole=True)
    assert expected == "\ufffd" * 3
    stream = text.stream((), skip_special=True, whole=True)
    assert "".join(stream.push([token]) for token in ids) + stream.finish(expected) == expected
