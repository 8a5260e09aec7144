"""The group tree's small promises: what is refused, what it costs, who may call it at once."""

import threading

import numpy as np
import pytest

from seer._native import MAX_DRAFT_TOKENS, GroupTree


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, [1]), "prev_token_count is 4, but request 0 has 3 tokens: append from there"),
        ((9, 1, [1]), "prev_token_count is 1, but request 9 has 0 tokens"),
        ((0, -1, [1]), "prev_token_count is -1"),
        ((-1, 0, [1]), "request_id is -1"),
        ((0, 3, [4, -1]), r"tokens\[1\] is -1; token ids are not negative"),
    ],
)
def test_a_bad_append_is_refused_and_changes_nothing(arguments, message):
    tree = GroupTree()
    tree.append(0, 0, [1, 2, 3])
    with pytest.raises(ValueError, match=message):
        tree.append(*arguments)
    assert (tree.length(0), tree.length(9), tree.tokens) == (3, None, 3)


@pytest.mark.parametrize("tokens", [[2**31], [1.5], ["a"], np.array([[1]], np.int32), np.array([1.0])])
def test_tokens_are_int32(tokens):
    with pytest.raises(TypeError):
        GroupTree().append(0, 0, tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": MAX_DRAFT_TOKENS + 1}, "max_tokens is 129; must be 0 to 128"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"top_k": 0}, "top_k is 0; must be at least 1"),
        ({"max_depth": 0}, "max_depth is 0; must be at least 1"),
        ({"min_score": float("nan")}, "min_score is nan; must be 0 to 1"),
        ({"source": 3}, "request 3 is unknown: append to it, or pass a context"),
    ],
)
def test_a_bad_draft_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GroupTree().draft(**({"source": [1], "max_tokens": 8} | options))


def test_memory_is_reported_and_bounded():
    assert GroupTree().bytes < 512
    tree = GroupTree(max_bytes=100_000)
    tokens = np.random.default_rng(0).integers(0, 1000, 64, dtype=np.int32)
    with pytest.raises(ValueError, match="of at most 100000: drop it, or raise max_bytes"):
        for at in range(0, 10**6, 64):
            tree.append(0, at, (tokens + at) % 2**20)
    assert 100_000 <= tree.bytes < 150_000
    assert tree.length(0) == tree.tokens
    tree.append(0, 0, tokens)  # known: nothing to refuse
    assert len(tree.draft(tokens[:2], 8)) == 8


def test_threads_may_append_and_draft_at_once():
    """Each stream is a count of its own: a draft that mixes two up, or tears, shows."""
    tree, errors = GroupTree(), []
    streams = [np.arange(base, base + 3000, dtype=np.int32) for base in (0, 10_000, 20_000)]

    def write(request):
        for at in range(0, 3000, 10):
            tree.append(request, at, streams[request][at : at + 10])

    def read(request):
        while (tree.length(request) or 0) < 3000:
            at = tree.length(request) or 0
            drafted = tree.draft(streams[request][max(0, at - 100) : max(0, at - 50)], 8, 2).token_ids
            if at > 100 and drafted != list(range(drafted[0], drafted[0] + 8)):
                errors.append((request, at, drafted))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3) for work in (write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert tree.tokens == 9000
