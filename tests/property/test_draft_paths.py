"""Flat drafts of several paths: what is joined is split again, wherever vLLM's scheduler cuts it."""

from hypothesis import given
from hypothesis import strategies as st

from seer.common.policy.draft_paths import SEPARATOR, join, split

paths = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5)


@given(paths)
def test_split_undoes_join(given_paths):
    assert split(join(given_paths)) == [path for path in given_paths if path]


@given(paths)
def test_a_flat_draft_pays_for_every_row_of_its_paths(given_paths):
    flat = join(given_paths)
    rows = sum(1 + len(path) for path in split(flat)) or 1
    assert 1 + len(flat) == rows


@given(paths, st.data())
def test_a_cut_shortens_the_last_path_alone(given_paths, data):
    flat = join(given_paths)
    cut = split(flat[: data.draw(st.integers(0, len(flat)))])
    whole = split(flat)
    assert cut[:-1] == whole[: max(0, len(cut) - 1)]
    if cut:
        last = whole[len(cut) - 1]
        assert cut[-1] == last[: len(cut[-1])]
        assert SEPARATOR not in cut[-1]
