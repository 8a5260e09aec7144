"""SentWeights between streams of weights: the result is the new stream, byte for byte, or the delta is refused."""

import json
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.client.sent_weights import SentWeights
from seer.client.tensor_stream import TensorStream
from seer.common.weights import delta as deltas
from seer.common.weights.delta import BASE, Changes, apply, changed, changes

WIDTHS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
TYPES = ["float64", "float32", "float16", "int64", "int16", "int8", "uint8", "bool"]


def stored(stream, file):
    file.write_bytes(b"".join(bytes(stream.read(at, 1000)) for at in range(0, stream.size, 1000)))
    return file


def delta_of(old, new, forced=True):
    """Return the plan for `new` of a client that sent `old`."""
    client = SentWeights()
    first = client.plan(TensorStream(old), None)
    client.live(first, "v1-a", 1, whole=True)
    return client, client.plan(TensorStream(new), 1 if forced else None)


def applied(folder, old, delta):
    base, result = stored(TensorStream(old), folder / "base"), folder / "result"
    result.write_bytes(b"")
    apply(base, stored(delta, folder / "delta"), result, "v1-a")
    return result.read_bytes()


@st.composite
def pairs(draw):
    """Return two versions of tensors, any bits of any type, with few, many or all elements changed."""
    old, new = {}, {}
    for number in range(draw(st.integers(1, 4))):
        dtype = np.dtype(draw(st.sampled_from(TYPES)))
        count = draw(st.sampled_from([0, 1, 3, 7, 8, 9, 300, 5000]))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]))
        before = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
        after = before.copy().view(WIDTHS[dtype.itemsize])
        at = rng.random(count) < share
        if draw(st.booleans()):  # changes lie together
            at = np.arange(count) < share * count
        after[at] = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(after.dtype)[at]
        old[f"t{number}"] = before.view(dtype)
        new[f"t{number}"] = after.view(np.uint8).view(dtype)
    return old, new


@given(pairs())
def test_a_base_with_its_delta_is_the_new_stream(pair):
    old, new = pair
    client, plan = delta_of(old, new)
    whole = TensorStream(new)
    with tempfile.TemporaryDirectory() as folder:
        assert applied(Path(folder), old, plan.delta) == bytes(whole.read(0, whole.size))
        base, names = changed(Path(folder) / "delta")
    assert base == "v1-a"
    assert names >= {name for name in old if old[name].tobytes() != new[name].tobytes()}
    assert plan.digest == whole.digest()
    client.live(plan, "v2-a", 2, whole=False)  # what is kept is what the engines have now
    assert {name: bytes(data) for name, data in client._sent.data.items()} == {
        name: each.tobytes() for name, each in new.items()
    }
    assert client.plan(TensorStream(new), 2).found == {}


@given(
    st.sampled_from(sorted(WIDTHS)), st.lists(st.integers(0, 300_000), max_size=20), st.integers(0, 2**32 - 1)
)
def test_positions_far_apart_and_close_together(width, places, seed):
    old = np.random.default_rng(seed).integers(0, 256, 300_001 * width, np.uint8)
    new = old.copy()
    new.view(f"<u{width}")[places] ^= 1
    found = changes(old, new, width)
    assert found.size < 0.05 * len(new)
    found.apply(old)
    assert np.array_equal(old, new)


@pytest.mark.parametrize(
    ("before", "after"),
    [(0.0, -0.0), (np.nan, -np.nan), (np.inf, np.nan), (1.0, np.nextafter(np.float32(1), np.float32(2)))],
)
def test_bits_count_and_not_values(before, after, tmp_path):
    old = {"w": np.full(1000, before, np.float32)}
    new = {"w": old["w"].copy()}
    new["w"][500] = after
    new["w"].view("<u4")[501] ^= 1  # a payload, if this is NaN
    assert applied(tmp_path, old, delta_of(old, new)[1].delta)[-4000:] == new["w"].tobytes()


def test_torch_types_that_numpy_lacks(tmp_path):
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        old = {"w": torch.randn(1000).to(dtype)}
        new = {"w": old["w"].clone()}
        new["w"].view(torch.uint8)[77] ^= 1
        plan = delta_of(old, new)[1]
        assert plan.delta.size < 400
        whole = TensorStream(new)
        assert applied(tmp_path, old, plan.delta) == bytes(whole.read(0, whole.size))


def test_parts_smaller_than_a_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(deltas, "_COPY_BYTES", 64)
    monkeypatch.setattr(deltas, "_ELEMENTS", 5)
    rng = np.random.default_rng(0)
    for share in (0.001, 0.02, 0.3):
        old = {name: rng.integers(0, 99, 3001).astype(name) for name in ("int8", "int16", "int32", "int64")}
        new = {
            name: np.where(rng.random(3001) < share, each + 1, each).astype(name)
            for name, each in old.items()
        }
        whole = TensorStream(new)
        assert applied(tmp_path, old, delta_of(old, new)[1].delta) == bytes(whole.read(0, whole.size))


def test_few_changes_take_few_bytes():
    old = {"w": np.random.default_rng(0).integers(0, 2**16, 2**20, np.uint16)}
    for share, most in ((0.01, 0.02), (0.1, 0.16)):
        new = {"w": old["w"].copy()}
        new["w"][np.random.default_rng(1).random(2**20) < share] ^= 1
        plan = delta_of(old, new, forced=False)[1]
        assert plan.delta.size < most * plan.stream.size
    plan = delta_of(old, {"w": old["w"] ^ 1}, forced=False)[1]
    assert plan.delta is None
    assert "does not pay" in plan.why


U1 = np.array([1, 1], np.uint8)
HOSTILE = {
    "beyond the end": {"gaps:w": np.array([200], np.uint8), "values:w": np.zeros(1, "<u2")},
    "beyond it by a sum": {"gaps:w": np.array([60, 60], np.uint8), "values:w": np.zeros(2, "<u2")},
    "beyond it by an overflow": {
        "gaps:w": np.full(3, 2**32 - 1, np.uint32), "values:w": np.zeros(3, "<u2"),
    },
    "the same element twice": {"gaps:w": np.array([3, 0], np.uint8), "values:w": np.zeros(2, "<u2")},
    "before the first": {"gaps:w": np.array([0], np.uint8), "values:w": np.zeros(1, "<u2")},
    "signed gaps": {"gaps:w": np.array([-1], np.int8), "values:w": np.zeros(1, "<u2")},
    "fewer values": {"gaps:w": U1, "values:w": np.zeros(1, "<u2")},
    "wider values": {"gaps:w": U1, "values:w": np.zeros(2, "<u4")},
    "values alone": {"values:w": np.zeros(1, "<u2")},
    "gaps alone": {"gaps:w": U1},
    "another shape of gaps": {"gaps:w": U1.reshape(1, 2), "values:w": np.zeros((1, 2), "<u2")},
    "both": {"gaps:w": U1, "values:w": np.zeros(2, "<u2"), "whole:w": np.zeros(100, np.int16)},
    "another type": {"whole:w": np.zeros(100, np.float16)},
    "another shape": {"whole:w": np.zeros((10, 10), np.int16)},
    "another tensor": {"whole:x": np.zeros(100, np.int16)},
    "another part": {"w": np.zeros(100, np.int16)},
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_delta_that_does_not_fit_is_refused(what, tmp_path):
    old = {"w": np.arange(100, dtype=np.int16)}
    with pytest.raises(ValueError, match="the delta"):
        applied(tmp_path, old, TensorStream(HOSTILE[what], {BASE: "v1-a"}))
    assert (tmp_path / "result").stat().st_size <= TensorStream(old).size


@given(st.binary(max_size=200).filter(lambda text: b"{" not in text), st.booleans())
def test_files_that_are_no_delta_are_refused(text, framed):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = stored(TensorStream({"w": np.arange(100, dtype=np.int16)}), folder / "base")
        (folder / "delta").write_bytes(struct.pack("<Q", len(text)) + text if framed else text)
        (folder / "result").touch()
        for work in (
            lambda: apply(base, folder / "delta", folder / "result", "v1-a"),
            lambda: changed(folder / "delta"),
        ):
            with pytest.raises(ValueError, match=r".+"):
                work()


def test_a_delta_without_parts_changes_nothing(tmp_path):
    old = {"w": np.arange(100, dtype=np.int16)}
    text = json.dumps({"__metadata__": {BASE: "v1-a"}}).encode()
    (tmp_path / "delta").write_bytes(struct.pack("<Q", len(text)) + text)
    base, result = stored(TensorStream(old), tmp_path / "base"), tmp_path / "result"
    result.write_bytes(b"")
    with pytest.raises(ValueError, match="to 'v1-a', not to v1-b"):
        apply(base, tmp_path / "delta", result, "v1-b")
    apply(base, tmp_path / "delta", result, "v1-a")
    assert result.read_bytes() == base.read_bytes()


def test_a_stop_ends_it(tmp_path):
    old = {"w": np.arange(100, dtype=np.int16)}
    delta = delta_of(old, {"w": old["w"] ^ 1})[1].delta
    base, result = stored(TensorStream(old), tmp_path / "base"), tmp_path / "result"
    result.write_bytes(b"")
    with pytest.raises(ValueError, match="cancelled"):
        apply(base, stored(delta, tmp_path / "delta"), result, "v1-a", lambda: True)


def test_changes_say_their_size():
    assert Changes(np.zeros(3, "u1"), np.zeros(3, "<u2")).size == 9
