"""Flat drafts of several paths: what is joined is split again, wherever vLLM's scheduler cuts it."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.draft_paths import (
    CHEAP_SHARE,
    SEPARATOR,
    Fork,
    extra_paths,
    join,
    most_paths,
    paths_of,
    split,
)

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


@st.composite
def trees(draw):
    """Parents of a drafted tree: each is an earlier token, or the root."""
    return [draw(st.integers(-1, index - 1)) for index in range(draw(st.integers(0, 12)))]


@given(trees())
def test_paths_lead_from_the_root_to_every_leaf_once(parents):
    paths = paths_of(parents)
    assert sorted(path[-1] for path in paths) == [i for i in range(len(parents)) if i not in parents]
    for path in paths:
        assert parents[path[0]] == -1
        assert all(parents[below] == above for above, below in pairwise(path))
    for above, below in pairwise([-1, *paths[0]] if paths else []):
        assert below == parents.index(above), "the first path goes by best children"


@st.composite
def forks(draw):
    parents = draw(trees())
    chances = []
    for parent in parents:
        share = draw(st.floats(0.0, 1.0))
        chances.append(share * (chances[parent] if parent >= 0 else 1.0))
    paths = paths_of(parents)
    keep = draw(st.integers(0, len(paths[0]))) if paths else 0
    return Fork(
        paths, chances, keep, draw(st.integers(0, 16)) if keep else 0, draw(st.sampled_from([1.0, 2.0]))
    )


@given(
    st.lists(forks(), min_size=1, max_size=6), st.floats(0.001, 1.0), st.floats(0.0, 1.0), st.integers(0, 8)
)
@example([Fork([[0, 1], [0, 2], [0, 3], [0, 4]], [1.0, 1.0, 0.0, 0.0, 0.0], 1, 3)], 0.125, 0.0, 1)
def test_chosen_siblings_fit_and_raise_tokens_per_second(given_forks, slope, extra, most):
    seconds = [1.0 + slope * rows for rows in range(sum(fork.keep + fork.room for fork in given_forks) + 1)]
    others = float(len(given_forks))
    chosen = extra_paths(given_forks, seconds, extra, others, most)
    count = sum(map(len, chosen))
    assert count <= most
    rows = kept = sum(fork.keep for fork in given_forks)
    before = after = others
    for fork, paths in zip(given_forks, chosen, strict=True):
        first = fork.paths[0][: fork.keep] if fork.paths else []
        entries = sum(1 + len(path) for path in paths)
        rows += entries
        assert entries <= fork.room
        for path in paths:
            assert any(path == list(whole[: len(path)]) for whole in fork.paths[1:])
        before += fork.weight * sum(fork.chances[i] for i in first)
        after += fork.weight * sum(fork.chances[i] for i in {*first, *(i for path in paths for i in path)})
    if count:
        assert after / (seconds[rows] + extra * count) > before / seconds[kept]


@given(st.lists(forks(), min_size=1, max_size=4))
def test_rows_that_cost_nothing_leave_no_path_with_a_chance_out(given_forks):
    given_forks = [Fork(fork.paths, fork.chances, fork.keep, 200 if fork.keep else 0) for fork in given_forks]
    chosen = extra_paths(given_forks, [1.0] * 1_000, 0.0, len(given_forks), 100)
    for fork, paths in zip(given_forks, chosen, strict=True):
        if fork.keep:
            held = {*fork.paths[0][: fork.keep], *(i for path in paths for i in path)}
            missing = {i for path in fork.paths[1:] for i in path} - held
            assert all(fork.chances[i] == 0.0 for i in missing)


def test_the_likelier_fork_is_taken_where_one_fits():
    likely, unlikely = (Fork([[0, 2], [1]], [0.4, chance, 0.2], 2, 2) for chance in (0.5, 0.3))
    assert extra_paths([unlikely, likely], [1.0] * 20, 0.0, 2.0, 1) == [[], [[1]]]


@given(st.floats(0.0, 2.0), st.sampled_from([None, 1, 2, 5]))
def test_by_default_several_paths_are_for_engines_on_which_they_are_cheap(sibling, told):
    costs = StepCosts(batches=(1,), drafts=(0, 8), grid=((1.0, 2.0),), sibling=sibling)
    assert most_paths(costs, told) == told or (
        told is None and (most_paths(costs, None) > 1) == (sibling <= CHEAP_SHARE)
    )
