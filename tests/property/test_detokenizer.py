"""Text and stops against vLLM's own detokenizer, by real tokenizers: the list in `seer.common.detokenizer`.

Two come with mistral-common: the SentencePiece model of Mistral 7B, and a byte-level one, Tekken. The others
are trained here, each as models have them.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("vllm")

from vllm import SamplingParams as VllmSampling
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from seer.client.text import response_text
from seer.common.detokenizer import REPLACEMENT, Detokenizer
from seer.common.types import SamplingParams
from seer.gateway.text import ModelText
from seer.services.engine.vllm.stop_strings import StopStrings

pytestmark = pytest.mark.vllm

CORPUS = [
    "The price is 3 € or 4 €, isn't it? Don't stop: he said so . ( twice )",
    "naïve café, Ångström, e\u0301 and n\u0303 with marks; déjà vu",
    "你好,世界。日本語のテキスト ワールド 안녕하세요 नमस्ते สวัสดี",
    "👨‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin, 🙂🙂 two",
    "def f(x):\n    return x  # two  spaces\n\n\ttab END</s><tool_call>{}",
] * 4
SAMPLES = [*CORPUS[:5], " S3 10", "  lead", "\n\n", "▁", "a\u200db", "\ufffd", "END", " .", "##s", "é", "😀"]


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and how it makes ids of a text."""

    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]


def added(tokenizer: Tokenizer, encode: Callable[[str], list[int]] | None = None) -> Kind:
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("two words", special=False)])
    return Kind(tokenizer, encode or (lambda text: tokenizer.encode(text, add_special_tokens=False).ids))


def trained(tokenizer: Tokenizer, trainer: Any) -> Kind:
    tokenizer.train_from_iterator(CORPUS, trainer)
    return added(tokenizer)


def byte_level() -> Kind:
    """As GPT-2 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))


def llama_3() -> Kind:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r"\s?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))


def tekken() -> Kind:
    """The first 20,000 tokens of Mistral's Tekken; its ids of a text are those of its bytes, some merged."""
    import mistral_common

    file = Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"
    entries = json.loads(file.read_text())["vocab"][:20_000]
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 shows the others as later letters
    others = [byte for byte in range(256) if byte not in itself]
    chars = {byte: chr(byte) for byte in itself} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    pieces = [base64.b64decode(entry["token_bytes"]) for entry in entries]
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE({"".join(chars[b] for b in piece): i for piece, i in ids.items()}, []))
    tokenizer.decoder = decoders.ByteLevel()

    def encode(text: str) -> list[int]:
        data, found = text.encode(), []
        while data:
            size = next(size for size in range(min(16, len(data)), 0, -1) if data[:size] in ids)
            found.append(ids[data[:size]])
            data = data[size:]
        return found

    return added(tokenizer, encode)


def mistral() -> Kind:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral 7B have it."""
    import mistral_common
    import sentencepiece

    file = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    vocab = {model.id_to_piece(i): i for i in range(model.vocab_size())}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return added(tokenizer, model.encode)


def unigram() -> Kind:
    """As T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return trained(
        tokenizer, trainers.UnigramTrainer(vocab_size=250, unk_token="<unk>", special_tokens=["<unk>"])
    )


def word_piece() -> Kind:
    """As BERT: its decoder cleans up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return trained(tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"]))


def word_ends() -> Kind:
    """As the first GPT: a word's last token says so."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    special = ["<unk>"]
    return trained(
        tokenizer, trainers.BpeTrainer(vocab_size=300, special_tokens=special, end_of_word_suffix="</w>")
    )


def countdown() -> Kind:
    """Of the shipped model: no decoder."""
    model = Path(__file__).parents[2] / "examples" / "countdown" / "model" / "tokenizer.json"
    return added(Tokenizer.from_file(str(model)))


KINDS = (byte_level, llama_3, tekken, mistral, unigram, word_piece, word_ends, countdown)


@functools.cache
def kind_of(make: Callable[[], Kind]) -> Kind:
    return make()


@st.composite
def tokens(draw: st.DrawFn, kind: Kind, least: int) -> list[int]:
    """Texts, ends of them that split characters, and any ids: special ones, single bytes, ids of nothing."""
    size = kind.tokenizer.get_vocab_size()
    any_ids = st.integers(0, size) | st.integers(max(0, size - 6), size) | st.integers(0, min(300, size))
    found: list[int] = []
    for _ in range(draw(st.integers(least, 4))):
        ids = kind.encode(draw(st.sampled_from(SAMPLES)))
        if draw(st.booleans()):
            start = draw(st.integers(0, len(ids)))
            found += ids[start : draw(st.integers(start, len(ids)))]
        else:
            found += draw(st.lists(any_ids, max_size=6))
    return found or [draw(any_ids)] if least else found


@dataclass(frozen=True)
class Ended:
    """How a response ended, as vLLM has it."""

    token_ids: list[int]
    stop_reason: str
    text: str


def by_vllm(kind: Kind, prompt: list[int], output: Sequence[int], asked: VllmSampling) -> Ended:
    request: Any = SimpleNamespace(request_id="r", prompt_token_ids=prompt, sampling_params=asked)
    tokenizer: Any = SimpleNamespace(_tokenizer=kind.tokenizer)
    detokenizer = FastIncrementalDetokenizer(tokenizer, request)
    for count, token in enumerate(output, 1):
        by_id = token in asked.stop_token_ids and count > asked.min_tokens
        found = detokenizer.update([token], by_id)
        if found is not None or by_id or count == len(output):
            reason = found if found is not None else str(token) if by_id else ""
            text = detokenizer.get_next_output_text(True, False)
            return Ended(list(output[:count]), reason, text)
    raise AssertionError("no output")


def by_engine(
    kind: Kind, prompt: list[int], output: list[int], asked: SamplingParams, cut: int
) -> tuple[list[int], str]:
    """Return what an engine that gets the output's first `cut` tokens as context keeps, and why it ended."""
    stops = StopStrings(Detokenizer.of(kind.tokenizer), asked.stop, asked.min_tokens, prompt, output[:cut])
    for count in range(cut + 1, len(output) + 1):
        token = output[count - 1]
        by_id = token in asked.stop_token_ids and count > asked.min_tokens
        _, found = stops.cut([token], ends_by_id=by_id)
        if found is not None or by_id:
            return output[:count], found or str(token)
    return output, ""


def streamed(
    text: ModelText, ended: Ended, prompt: list[int], asked: SamplingParams, data: Any, **how: bool
) -> str:
    stream = text.stream(prompt, asked, **how)
    whole = text.text(prompt, ended.token_ids, ended.stop_reason, asked, **how)
    sent, rest = "", ended.token_ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        sent += stream.push(rest[:size])
        rest = rest[size:]
        assert whole.startswith(sent)
    return sent + stream.finish(whole)


@pytest.mark.parametrize("make", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_text_and_stops_are_those_of_vllm(make: Callable[[], Kind], data: st.DataObject) -> None:
    kind = kind_of(make)
    decode = kind.tokenizer.decode
    prompt, output = data.draw(tokens(kind, 0)), data.draw(tokens(kind, 1))
    skip = data.draw(st.booleans())
    assume(
        not decode(prompt).endswith(REPLACEMENT)
        and not decode(prompt, skip_special_tokens=False).endswith(REPLACEMENT)
    )
    shown = decode([*prompt[-3:], *output])
    parts = st.integers(0, len(shown)).flatmap(lambda at: st.integers(1, 5).map(lambda n: shown[at : at + n]))
    strings = tuple(data.draw(st.lists((parts | st.sampled_from(SAMPLES)).filter(bool), max_size=3)))
    ids = tuple(data.draw(st.lists(st.sampled_from(output), max_size=2))) if data.draw(st.booleans()) else ()
    least, whole = data.draw(st.integers(0, 4)), data.draw(st.booleans())
    asked = SamplingParams(stop=strings, stop_token_ids=ids, min_tokens=least)
    theirs = VllmSampling(
        stop=list(strings), stop_token_ids=list(ids), min_tokens=least, max_tokens=100,
        include_stop_str_in_output=whole, skip_special_tokens=skip,
    )  # fmt: skip
    expected = by_vllm(kind, prompt, output, theirs)
    if expected.stop_reason in strings and str(expected.token_ids[-1]) != expected.stop_reason:
        # With `include_stop_str_in_output` vLLM searches the text of a stop token, too; engines never do.
        assume(not (whole and expected.token_ids[-1] in ids))
    if skip and strings:
        for cut in {0, data.draw(st.integers(0, len(expected.token_ids) - 1))}:
            got = by_engine(kind, prompt, output, asked, cut)
            assert got == (expected.token_ids, expected.stop_reason)
    text = ModelText(PreTrainedTokenizerFast(tokenizer_object=kind.tokenizer), 0, trust_templates=False)
    how = {"skip_special": skip, "whole": whole}
    assert text.text(prompt, expected.token_ids, expected.stop_reason, asked, **how) == expected.text
    assert streamed(text, expected, prompt, asked, data, **how) == expected.text
    if skip and not whole:
        texts = Detokenizer.of(kind.tokenizer)
        assert response_text(texts, prompt, expected.token_ids, expected.stop_reason, asked) == expected.text
