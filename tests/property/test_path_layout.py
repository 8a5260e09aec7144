"""Rows of attention for any drafts of several paths: what is promised in `path_layout`."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.policy.draft_paths import SEPARATOR, Entries, join, paths_in, placeholders, split
from seer.services.engine.vllm.drafts.path_layout import lay_out, separators

DRAFT = st.lists(st.sampled_from([1, 2, 3, SEPARATOR]), max_size=12)
"""Cut anywhere: with separators at the ends, or next to each other, too."""


@st.composite
def steps(draw):
    """Requests: tokens before those with logits, and a draft."""
    requests = draw(st.lists(st.tuples(st.integers(0, 3), DRAFT), min_size=1, max_size=6))
    alone = draw(st.sets(st.integers(0, 5)))
    return requests, alone, draw(st.integers(0, 8))


@given(steps())
def test_rows_are_those_of_each_path_alone(step):
    requests, alone, room = step
    drafts = {f"r{i}": draft for i, (_, draft) in enumerate(requests)}
    places = separators(drafts, list(drafts))
    assert set(places) == {i for i, (_, draft) in enumerate(requests) if SEPARATOR in draft}
    logits = [1 + len(draft) for _, draft in requests]
    lengths = [begun + rows for (begun, _), rows in zip(requests, logits, strict=True)]
    found = lay_out(lengths, logits, places, alone, room)
    assert len(found.further) <= room
    assert found.lengths.sum() == sum(lengths)
    assert found.owners.tolist() == sorted(found.owners.tolist())
    row = dropped = 0
    for request, (begun, draft) in enumerate(requests):
        paths = [[]]
        for entry in draft:
            paths.append([]) if entry == SEPARATOR else paths[-1].append(entry)
        first, mine = found.firsts[request], int((found.owners == request).sum())
        assert found.drafts[first : first + len(paths)].tolist() == list(map(len, paths))
        assert found.choices[request] == mine
        assert mine in (1, len(paths))
        if mine == 1:
            dropped += len(paths) - 1
            assert (found.lengths[row], found.shorter[row]) == (lengths[request], 0)
            assert (found.paths[row], found.shifts[row]) == (first, 0)
        else:
            assert request not in alone
            at = 0
            for place, path in enumerate(paths):
                before = begun if place == 0 else 0
                assert found.lengths[row + place] == before + 1 + len(path)
                # A row's context ends where that of its path alone would.
                assert begun + logits[request] - found.shorter[row + place] == begun + 1 + len(path)
                assert at - found.shifts[row + place] == (begun if place else 0)
                assert found.paths[row + place] == first + place
                assert (row + place in found.further) == (place > 0)
                at += before + 1 + len(path)
        row += mine
    assert found.dropped == dropped


@given(st.integers(1, 5), st.integers(1, 6))
def test_entries_have_room_for_equal_paths(paths, each):
    shape = Entries(paths * each + paths - 1, paths)
    assert paths_in(shape) == paths
    assert placeholders(shape) == join([[-1] * each] * paths)
    assert list(map(len, split(placeholders(shape)))) == [each] * paths


def test_a_number_alone_is_one_path():
    assert placeholders(0) == placeholders(Entries(0, 3)) == []
    assert placeholders(4) == [-1] * 4
    with pytest.raises(ValueError, match="6 entries are no 2 equal paths"):
        Entries(6, 2)
    with pytest.raises(ValueError, match="1 entries are no 2 equal paths"):
        Entries(1, 2)


def test_entries_reach_other_processes():
    again = pickle.loads(pickle.dumps(Entries(5, 2)))
    assert (again, again.paths) == (5, 2)
