"""Parts of files: where their bytes are, and blobs of them, from a leader's whole file to one with holes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common import wire
from seer.common.blobs import Blob
from seer.common.slices import Slices, merged, slice_of

BYTES = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8)


@st.composite
def some(draw):
    size = draw(st.integers(1, 40))
    stride, count = size + draw(st.integers(0, 30)), draw(st.integers(1, 20))
    return draw(st.integers(0, 8000)), size, stride, count


def bytes_of(slices):
    return np.concatenate(
        [BYTES[at + n * far : at + n * far + size] for at, size, far, count in slices for n in range(count)]
    )


@given(st.lists(some(), min_size=1, max_size=5), st.data())
def test_any_cut_of_a_part_maps_to_its_bytes_in_the_file(slices, data):
    part = Slices(slices, len(BYTES))
    assert part.size == len(bytes_of(slices))
    first = data.draw(st.integers(0, part.size - 1))
    length = data.draw(st.integers(1, part.size - first))
    runs = part.runs(first, length)
    found = np.concatenate([BYTES[at : at + size] for at, size in runs])
    assert np.array_equal(found, bytes_of(slices)[first : first + length])


@pytest.mark.parametrize(
    "slices",
    [
        [(0, 0, 1, 1)],
        [(0, 1, 1, 0)],
        [(-1, 2, 0, 1)],
        [(0, 3, 2, 2)],
        [(9_999, 2, 0, 1)],
        [(0, 1, 5_000, 3)],
        [(0, 2**62, 2**62, 4)],
    ],
)
def test_slices_that_cannot_be_are_refused(slices):
    with pytest.raises(ValueError, match="has "):
        Slices(slices, len(BYTES))


@given(st.data())
def test_a_view_that_is_a_slice_has_exactly_its_bytes(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    cut = [slice(a := data.draw(st.integers(0, n - 1)), data.draw(st.integers(a + 1, n))) for n in shape]
    view = whole[tuple(cut)].transpose(data.draw(st.permutations(range(len(shape)))))
    offset = 4 * int(view.min())
    found = slice_of(offset, view.shape, [each // 4 for each in view.strides], 4)
    gaps = sum(n not in (1, each.stop - each.start) for n, each in zip(shape[1:], cut[1:], strict=True))
    if found is None:
        assert gaps > 1 or (gaps and len(shape) > 2)
        return
    start, size, stride, count = found
    rows = [np.arange(start + row * stride, start + row * stride + size) for row in range(count)]
    assert sorted(np.concatenate(rows)[::4] // 4) == sorted(view.ravel())


def places(slices):
    return {
        at + n * far + each for at, size, far, count in slices for n in range(count) for each in range(size)
    }


@st.composite
def side_by_side(draw):
    """Slices of a matrix, of which most touch or overlap others."""
    width, rows = draw(st.integers(2, 8)), draw(st.integers(1, 4))
    cuts = (
        st.tuples(st.integers(0, width - 1), st.integers(1, width))
        .map(sorted)
        .filter(lambda cut: cut[0] < cut[1])
    )
    columns = [(at, end - at, width if rows > 1 else 0, rows) for at, end in draw(st.lists(cuts, max_size=5))]
    return columns + [
        (at, size, 0, 1)
        for at, size in draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=3))
    ]


@given(side_by_side())
def test_merged_slices_have_the_same_bytes_in_no_more_slices(slices):
    found = merged(slices)
    assert places(found) == places(slices)
    assert len(found) <= len(slices)
    assert not found or Slices(found, 1000).size >= len(places(slices))


def test_what_ranks_read_side_by_side_is_one_slice():
    rows = [(48 * rank, 48, 0, 1) for rank in range(16)]
    assert merged(rows[8:]) == [(384, 384, 0, 1)]
    columns = [(6 * rank, 6, 96, 50) for rank in range(16)]
    assert merged(columns[8:]) == [(48, 48, 96, 50)]
    assert merged(columns) == [(0, 4800, 0, 1)]
    assert merged(columns[:2] + columns[3:5]) == [(0, 12, 96, 50), (18, 12, 96, 50)]
    assert merged([(0, 6, 96, 50), (6, 6, 96, 49), (12, 6, 90, 50)]) == [
        (6, 6, 96, 49),
        (12, 6, 90, 50),
        (0, 6, 96, 50),
    ]


def test_rows_columns_and_repeated_views_are_one_slice_each():
    assert slice_of(0, (2, 6), (6, 1), 2) == (0, 24, 0, 1)
    assert slice_of(24, (2, 6), (6, 1), 2) == (24, 24, 0, 1)
    assert slice_of(6, (4, 3), (6, 1), 2) == slice_of(6, (3, 4), (1, 6), 2) == (6, 6, 12, 4)
    assert slice_of(6, (8, 4, 3), (24, 6, 1), 2) == (6, 6, 12, 32)  # of experts
    assert slice_of(8, (9, 1), (0, 1), 2) == slice_of(8, (), (), 2) == (8, 2, 0, 1)
    assert slice_of(0, (3, 2), (1, 1), 2) is None  # views that overlap
    assert slice_of(0, (8, 2, 3), (24, 6, 1), 2) is None
    assert slice_of(0, (8, 2, 6), (24, 6, 1), 2) == (0, 24, 48, 8)


def made(folder):
    folder.mkdir()
    return folder


async def test_a_part_goes_from_a_whole_file_to_one_with_holes(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "SPOOL_BYTES", 777)
    slices = [(0, 100, 0, 1), (150, 7, 20, 300), (9_000, 1_000, 0, 1)]
    part = Slices(slices, len(BYTES))
    theirs, ours = (
        Blob("part", part.size, made(tmp_path / name), slices=part) for name in ("theirs", "ours")
    )
    theirs.file.write_bytes(BYTES.tobytes())
    ours.begin("")
    for offset in range(0, part.size, 777):
        assert await ours.write(theirs.read(offset, theirs.length(offset)))
    assert ours.have == ours.size == part.size
    expected, kept = np.zeros_like(BYTES), ours.file.read_bytes()
    for at, size in part.runs(0, part.size):
        expected[at : at + size] = BYTES[at : at + size]
    assert kept == expected.tobytes()
    for at in range(0, part.size, 777):
        assert (ours.read(at, theirs.length(at)).data == theirs.read(at, theirs.length(at)).data).all()
