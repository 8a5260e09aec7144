"""Stop strings: found at the same token however the output is cut, on text as the tokenizer gives it."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from seer.common.detokenizer import Detokenizer
from seer.services.engine.vllm.stop_strings import StopStrings

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> Tokenizer:
    """One token per byte, then a special one."""
    vocab = {char: i for i, char in enumerate(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_to_id("<end>")


def ids(text: str) -> list[int]:
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [TOKENIZER.token_to_id(char) for char in pre.pre_tokenize_str(text)[0][0]] if text else []


def search(stops, tokens, *, start=0, min_tokens=0, at_once=False, ends_by_id=False):
    """Return (tokens kept, stop) when the first `start` tokens came from an earlier chunk."""
    state = StopStrings(Detokenizer.of(TOKENIZER), stops, min_tokens, ids("prompt "), tokens[:start])
    rest = tokens[start:]
    pieces = [rest] if at_once else [[token] for token in rest]
    kept = tokens[:start]
    for piece in pieces:
        part, found = state.cut(piece, ends_by_id=ends_by_id)
        kept = kept + part
        if found is not None:
            return kept, found
    return kept, None


TEXTS = st.text(alphabet="abäß€🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="abäß€🙂", min_size=1, max_size=4), min_size=1, max_size=3)


@given(text=TEXTS, stops=STOPS, min_tokens=st.integers(0, 10))
def test_every_cut_finds_the_same(text, stops, min_tokens):
    tokens = ids(text)
    kept, found = search(stops, tokens, min_tokens=min_tokens)
    assert search(stops, tokens, min_tokens=min_tokens, at_once=True) == (kept, found)
    for start in range(len(kept)):
        assert search(stops, tokens, start=start, min_tokens=min_tokens) == (kept, found)


@given(text=TEXTS, stops=STOPS)
def test_the_first_match_to_end_wins(text, stops):
    kept, found = search(stops, ids(text))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (kept, found) == (ids(text), None)
        return
    assert kept == ids(text[: min(ends)])
    assert found in stops
    assert text[: min(ends)].endswith(found)


def test_among_matches_that_end_together_the_first_listed_wins():
    assert search(["b", "ab"], ids("xab"))[1] == "b"
    assert search(["ab", "b"], ids("xab"))[1] == "ab"


def test_nothing_matches_before_min_tokens_and_nothing_old_matches_after():
    assert search(["ab"], ids("abxab"), min_tokens=2) == (ids("abxab"), "ab")
    assert search(["ab"], ids("abxyz"), min_tokens=2) == (ids("abxyz"), None)
    assert search(["ab"], ids("abc"), min_tokens=1) == (ids("ab"), "ab")  # it ends after the minimum


def test_special_tokens_have_no_text():
    assert search(["ab"], [*ids("a"), END, *ids("b")]) == ([*ids("a"), END, *ids("b")], "ab")
    assert search(["<end>"], [END]) == ([END], None)


def test_the_text_of_a_stop_id_is_not_searched():
    assert search(["b"], ids("ab"), at_once=True, ends_by_id=True) == (ids("ab"), None)


def test_the_prompt_is_not_searched():
    assert search(["t a"], ids("a"))[1] is None


def test_a_prompt_that_ends_within_a_character_is_not_searched():
    state = StopStrings(Detokenizer.of(TOKENIZER), ["ab"], 0, ids("ab€")[:-1], [])
    assert state.cut([ids("€")[-1], *ids("c")], ends_by_id=False) == ([ids("€")[-1], *ids("c")], None)
    state = StopStrings(Detokenizer.of(TOKENIZER), ["€"], 0, ids("ab€")[:-1], [])
    assert state.cut(ids("€")[-1:], ends_by_id=False)[1] == "€"  # it ends here


def test_bytes_that_are_no_text_do_not_end_the_search():
    broken = [TOKENIZER.token_to_id(BYTES[-1]), *ids("€")[:2], *ids("ab")]
    assert search(["ab"], broken)[1] == "ab"


def test_a_chunk_of_a_long_response_begins_without_decoding_all_of_it():
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return TOKENIZER.decode(tokens, skip_special_tokens=True)

    output = ids("a€🙂 " * 5000)
    state = StopStrings(Detokenizer(decode, joins=True), ["🙂 b"], 0, ids("prompt"), output)
    assert sum(decoded) < 1000
    assert state.cut(ids("bc"), ends_by_id=False) == (ids("b"), "🙂 b")
