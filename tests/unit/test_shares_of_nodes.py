"""Which slices of a stream each node needs, by what its ranks have read."""

import pytest

np = pytest.importorskip("numpy")

from safetensors.numpy import save_file  # noqa: E402

from seer.common.slices import MAX_SLICES  # noqa: E402
from seer.common.weights.safetensors import header  # noqa: E402
from seer.services.engine.nodes import shares as module  # noqa: E402
from seer.services.engine.nodes.shares import RankReads, layout_of, shares  # noqa: E402

TENSORS = {
    "a": np.zeros((4, 6), np.float16),
    "b": np.zeros(10, np.float16),
    "c": np.zeros(0, np.float16),
    "d": np.zeros(2),
}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def of(file, *ranks):
    length, tensors = header(file)
    starts = {each.name: each.start for each in tensors}
    layout = layout_of(tensors)
    return 8 + length, starts, [RankReads(node, layout, slices) for node, slices in ranks]


def test_a_share_has_the_header_and_what_any_rank_of_the_node_reads(file):
    rows, columns, other = (12, 12, 0, 1), (0, 4, 12, 4), (4, 4, 12, 4)
    head, at, reads = of(
        file, (0, {"a": [other]}), (1, {"a": [rows], "b": [(0, 20, 0, 1)]}), (1, {"a": [rows, columns]})
    )
    found = shares([reads], file, [1, 2])
    expected = {(0, head, 0, 1), (at["a"] + 12, 12, 0, 1), (at["a"], 4, 12, 4), (at["b"], 20, 0, 1)}
    assert set(found[1].slices) == expected
    assert found[1].whole == file.stat().st_size
    assert found[2].slices == [(0, head, 0, 1)]  # a node of which no rank read anything


def test_of_a_tensor_whose_slices_have_as_much_as_it_all_is_read(file):
    halves = [(0, 6, 12, 4), (6, 6, 12, 4)]
    head, at, reads = of(file, (1, {"a": halves[:1]}), (1, {"a": halves[1:]}))
    assert shares([reads], file, [1])[1].slices == [(0, head, 0, 1), (at["a"], 48, 0, 1)]


def test_a_tensor_of_many_short_runs_is_read_whole(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((2000, 512), np.float16)}, file)
    for size, rows, expected in ((128, 2000, None), (512, 2000, 512), (128, 1000, 128)):
        part = (0, size, 1024, rows)
        head, at, reads = of(file, (1, {"a": [part]}))
        there = (at["a"], 2_048_000, 0, 1) if expected is None else (at["a"], *part[1:])
        assert shares([reads], file, [1])[1].slices == [(0, head, 0, 1), there]


def test_reads_of_other_tensors_or_that_differ_are_of_no_use(file):
    _, _, reads = of(file, (0, {}), (1, {}))
    assert shares([], file, [1]) is None
    assert shares([[reads[0], RankReads(1, "x", {})]], file, [1]) is None
    for changed in (
        TENSORS | {"e": TENSORS["d"]}, TENSORS | {"a": TENSORS["a"].T.copy()}, TENSORS | {"b": TENSORS["b"].astype("i2")},
        {name: TENSORS[name] for name in "abc"},
    ):  # fmt: skip
        save_file(changed, file)
        assert shares([reads], file, [1]) is None
    save_file(dict(reversed(TENSORS.items())), file, {"step": "2"})
    for proofs in ([reads], [[RankReads(1, "of a head, too", {})], reads]):
        assert set(shares(proofs, file, [1])) == {1}


def test_their_number_is_bounded(file, monkeypatch):
    monkeypatch.setattr(module, "MAX_SLICES", 2)
    _, _, reads = of(file, (1, {"a": [(0, 2, 0, 1)]}), (2, {"a": [(0, 2, 0, 1), (4, 2, 0, 1)]}))
    assert set(shares([reads], file, [1, 2])) == {1}  # the other one reads all
    assert 37 * MAX_SLICES <= 64 * 2**20  # a frame


def test_ranks_of_a_node_that_read_side_by_side_take_as_many_slices_as_one(file, monkeypatch):
    monkeypatch.setattr(module, "MAX_SLICES", 3)
    ranks = [(1, {"a": [(2 * rank, 2, 12, 4)], "b": [(2 * rank, 2, 0, 1)]}) for rank in range(5)]
    head, at, reads = of(file, *ranks)
    expected = {(0, head, 0, 1), (at["a"], 10, 12, 4), (at["b"], 10, 0, 1)}
    assert set(shares([reads], file, [1])[1].slices) == expected
