"""Text that comes in pieces, for tokenizers of every kind: the list in `seer.gateway.text_stream`."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seer.common.detokenizer import MOST_PENDING, Detokenizer, TextSteps
from seer.common.types import SamplingParams
from seer.gateway.errors import HttpError
from seer.gateway.text import ModelText
from seer.gateway.text_stream import TextStream, possible_start
from seer.gateway.tools import HERMES, CallReader, CallStream, json_calls
from seer.services.engine.vllm.stop_strings import StopStrings

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
    text: ModelText, ids: list[int], sampling: SamplingParams, prompt: list[int]
) -> tuple[list[int], str]:
    """What an engine makes of tokens: it ends with the first stop string that ends in its last token."""
    if not sampling.stop:
        return ids, ""
    detokenizer = Detokenizer.of(text._tokenizer)
    kept, found = StopStrings(detokenizer, sampling.stop, sampling.min_tokens, prompt, []).cut(
        ids, ends_by_id=False
    )
    return kept, found or ""


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
    prompt = data.draw(st.lists(tokens, max_size=3))
    drawn = data.draw(st.lists(tokens, min_size=1, max_size=40))
    shown = text.text(prompt, drawn, "", SamplingParams(), skip_special=True, whole=True)
    parts = st.integers(0, 40).map(lambda start: shown[start : start + 4]).filter(bool)
    strings = st.lists(
        parts | st.text("ab<>stop ", min_size=1, max_size=6) if shown else st.just("a"), max_size=3
    )
    sampling = SamplingParams(stop=tuple(data.draw(strings)), min_tokens=data.draw(st.integers(0, 10)))
    how = {"skip_special": data.draw(st.booleans()), "whole": data.draw(st.booleans())}
    ids, reason = response(text, drawn, sampling, prompt)
    if not reason and data.draw(st.booleans()):
        reason = str(ids[-1])
        sampling = SamplingParams(stop_token_ids=(ids[-1],))
    expected = text.text(prompt, ids, reason, sampling, **how)
    stream = text.stream(prompt, sampling, **how)
    sent = ""
    for piece in cut(ids, data.draw(st.sets(st.integers(0, 40)))):
        sent += stream.push(piece)
        assert expected.startswith(sent)
    assert sent + stream.finish(expected) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_is_not_held_back(kind: str) -> None:
    text = KINDS[kind]
    token = text._tokenizer.backend_tokenizer.token_to_id("a")
    stream = text.stream([], SamplingParams(), skip_special=True, whole=False)
    pushed = [stream.push([token] * 3) for _ in range(3)]
    whole = text.text([], [token] * 9, "", SamplingParams(), skip_special=True, whole=True)
    assert "".join(pushed) == whole
    assert all(pushed)
    for last in (SamplingParams(stop=("b",)), SamplingParams(stop_token_ids=(token,))):
        careful = text.stream([], last, skip_special=True, whole=False)  # only the last token is
        assert sum(careful.push([token] * 3).count("a") for _ in range(3)) == 8


class Counting:
    """A byte a token; counts how many tokens it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("byte", [0x61, 0x80])
def test_the_work_is_linear_even_where_no_token_makes_text(byte: int) -> None:
    tokenizer = Counting()
    stream = TextStream(Detokenizer.of(tokenizer), [0x61] * 1000)
    for _ in range(1000):
        stream.push([byte] * 10)
    assert tokenizer.decoded < (4 if byte == 0x61 else MOST_PENDING) * 10_000
    stream.push([0x62])
    assert "".join(stream._shown).count("\ufffd" if byte == 0x80 else "a") >= 9_000


@pytest.mark.parametrize("call", ["", "<tool_call>"])
def test_a_piece_copies_nothing_of_what_came_before(call: str) -> None:
    texts, calls = TextStream(Detokenizer.of(Counting()), []), CallStream(HERMES)
    for push, piece in ((texts.push, b"abcd" * 4), (calls.push, "abcd" * 4)):
        calls.push(call)
        for _ in range(8_000):
            push(piece)
        tracemalloc.start()
        push(piece)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20_000


def test_special_tokens_without_end_cost_little() -> None:
    text = KINDS["byte_fallback"]
    token, eos = text._tokenizer.backend_tokenizer.token_to_id("▁a"), len(text._tokenizer) - 1
    steps = TextSteps(Detokenizer.of(text._tokenizer), [token])
    assert not any(steps.step(eos) for _ in range(10 * MOST_PENDING))
    assert len(steps.window) <= MOST_PENDING + 1
    assert steps.step(token) == " a"


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_prompt_that_ends_within_a_character_is_not_shown_again(split: int) -> None:
    text = KINDS["byte_level"]
    known = text._tokenizer.backend_tokenizer
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = [known.token_to_id(letter) for letter in pre.pre_tokenize_str("ab 🙂 ab")[0][0]]
    prompt, output = ids[: 3 + split], ids[3 + split :]
    assert text.text(prompt, output, "", SamplingParams(), skip_special=True, whole=False) == "🙂 ab"
    assert response(text, output, SamplingParams(stop=("ab",)), prompt) == (output, "ab")


def test_text_that_changed_is_an_error() -> None:
    stream = TextStream(Detokenizer(lambda ids: "a" * len(ids)), [])
    assert stream.push([1]) == "a"
    with pytest.raises(HttpError, match="do not stream"):
        stream.finish("b")


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


JSON_CALLS = st.lists(
    st.sampled_from(["[", "]", ",", '{"name": "f", "parameters": {}}', " ", "a"]), max_size=6
)


@settings(max_examples=400)
@given(
    st.one_of(st.tuples(st.just(HERMES), CALLS), st.tuples(st.just(CallReader(json_calls)), JSON_CALLS)),
    st.sets(st.integers(1, 60)),
)
def test_tool_calls_in_pieces(given_calls: tuple[CallReader, list[str]], places: set[int]) -> None:
    reader, text = given_calls[0], "".join(given_calls[1])
    content, calls = reader.read(text)
    stream = CallStream(reader)
    ends = sorted({*(place for place in places if place < len(text)), len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    sent = ""
    for piece in pieces[:-1]:
        sent += stream.push(piece)
        assert (content or "").startswith(sent)
    rest, found = stream.finish(pieces[-1])
    assert sent + rest == (content or "")
    assert [call["function"] for call in found] == [call["function"] for call in calls]
