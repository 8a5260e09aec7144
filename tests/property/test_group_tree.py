"""The native group tree is the readable one is the brute-force one, whatever is appended in whatever order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tree import ReferenceTree, brute_matches

from seer._native import GroupTree

MIX = st.sampled_from(["new", "again", "overlap", "conflict"])


@st.composite
def histories(draw):
    """A prompt and appends: few token values and repeated pieces, so that contexts recur and lists overflow."""
    values = draw(st.sampled_from([2, 3, 8]))
    token = st.integers(0, values - 1)
    piece = st.lists(token, min_size=1, max_size=20)
    pieces = draw(st.lists(piece, min_size=1, max_size=4))
    tokens = st.one_of(st.sampled_from(pieces), piece, st.sampled_from(pieces).map(lambda p: p * 5))
    appends = st.lists(st.tuples(st.integers(0, 3), MIX, st.floats(0, 1), tokens), min_size=1, max_size=25)
    return draw(st.one_of(st.just([]), piece)), draw(appends), values


def play(history):
    prompt, appends, _ = history
    native, reference = GroupTree(prompt), ReferenceTree(prompt)
    known = {}
    for request, kind, where, tokens in appends:
        output = known.setdefault(request, [])
        at = round(where * len(output))
        sent = {
            "new": (len(output), tokens),
            "again": (at, output[at : at + len(tokens)]),
            "overlap": (at, output[at:] + tokens),
            "conflict": (at, tokens),
        }[kind]
        native.append(request, *sent)
        reference.append(request, *sent)
        known[request] = reference.output(request)
        assert native.length(request) == len(known[request])
    return native, reference, sorted(known)


def contexts_of(reference, requests, values):
    """Each request's end, cuts of it, and ends that never occurred."""
    for request in requests:
        context = reference.context(request)
        yield from (context[:cut] for cut in range(len(context), max(-1, len(context) - 40), -7))
        yield [*context[-5:], values]


def drafted(draft):
    return list(zip(draft.token_ids, draft.parents, draft.scores, strict=True))


def as_float32(draft):
    return [(token, parent, float(np.float32(score))) for token, parent, score in draft]


@settings(max_examples=150, deadline=None)
@given(histories())
def test_matches_are_those_of_the_reference_and_of_brute_force(history):
    native, reference, requests = play(history)
    for context in contexts_of(reference, requests, history[2]):
        found = [(length, token.value) for length, token in reference.matches(context)]
        brute = [(length, token.value) for length, token in brute_matches(reference.arrived, context)]
        assert found == brute
        assert native.matches(context) == found


@settings(max_examples=150, deadline=None)
@given(
    histories(),
    st.integers(0, 24),
    st.sampled_from([1, 2, 4, 30]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from([None, 1, 4]),
)
def test_drafts_are_those_of_the_reference(history, max_tokens, top_k, min_score, max_depth):
    native, reference, requests = play(history)
    options = {"top_k": top_k, "min_score": min_score, "max_depth": max_depth}
    for request in requests:
        expected = reference.draft(reference.context(request), max_tokens, own=request, **options)
        made = native.draft(request, max_tokens, **options)
        assert drafted(made) == as_float32(expected)
        context = reference.context(request)
        assert drafted(native.draft(context, max_tokens, **options, own=request)) == as_float32(expected)
        assert len(set(range(len(made))) - set(made.parents)) <= top_k
        assert all(parent < i for i, parent in enumerate(made.parents))
    for context in contexts_of(reference, requests, history[2]):
        expected = as_float32(reference.draft(context, max_tokens, **options))
        assert drafted(native.draft(context, max_tokens, **options)) == expected
        assert drafted(native.draft(np.array(context, dtype=np.int32), max_tokens, **options)) == expected


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_how_an_output_was_cut_into_appends_does_not_matter(history, data):
    """Unless other requests come in between: places are kept by age."""
    prompt, appends, values = history
    tokens = [token for *_, piece in appends for token in piece]
    whole, pieces = GroupTree(prompt), GroupTree(prompt)
    whole.append(0, 0, tokens)
    at = 0
    while at < len(tokens):
        size = data.draw(st.integers(1, len(tokens)))
        pieces.append(0, at, tokens[at : at + size])
        at += size
    assert whole.tokens == pieces.tokens == len(prompt) + len(tokens)
    for context in ([*prompt, *tokens], tokens[: len(tokens) // 2], [values]):
        assert whole.matches(context) == pieces.matches(context)
        assert drafted(whole.draft(context, 16, 4)) == drafted(pieces.draft(context, 16, 4))


def test_a_loop_reaches_every_level_and_keeps_the_newest_places():
    """The tests above compare little if no list ever overflows: here all do."""
    native, reference = GroupTree(), ReferenceTree()
    for request in range(4):
        for tree in (native, reference):
            tree.append(request, 0, [request, *[5, 6] * 200])
    context = [5, 6] * 20
    found = reference.matches(context)
    assert native.matches(context) == [(length, token.value) for length, token in found] == [(32, 5)] * 15
    assert {token.owner for _, token in found} == {3}
    assert native.draft(context, 8).token_ids == [5, 6] * 4
