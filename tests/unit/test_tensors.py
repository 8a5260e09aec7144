"""Tensors as a stream: the very bytes of a safetensors file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.client.tensor_stream import TensorStream
from seer.common.errors import InvalidField
from seer.services.engine.weights.manifest import Tensor, read_manifest

ARRAYS = {
    "b.half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "a.odd": np.arange(7, dtype=np.uint8),
    "scalar": np.array(3.5, dtype=np.float32),
    "empty": np.empty((0, 4), dtype=np.float32),
    "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "flags": np.array([True, False]),
    "wide": np.arange(5, dtype=np.int64),
}


def whole(stream):
    return stream.read(0, stream.size).tobytes()


def test_a_file_of_these_bytes_holds_the_tensors(tmp_path):
    stream = TensorStream(ARRAYS)
    (tmp_path / "model.safetensors").write_bytes(whole(stream))
    found = read_manifest(tmp_path)
    assert found.digest == stream.digest()
    assert found.tensors["b.half"] == Tensor("F16", (2, 3))
    assert found.tensors["scalar"] == Tensor("F32", ())
    assert found.tensors.keys() == ARRAYS.keys()
    load_file = pytest.importorskip("safetensors.numpy").load_file
    for name, array in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(array, ARRAYS[name])


@given(st.integers(0, 2000), st.integers(1, 2000))
def test_any_part_can_be_read(offset, length):
    stream = TensorStream(ARRAYS)
    part = stream.read(min(offset, stream.size - 1), length)
    offset = min(offset, stream.size - 1)
    assert part.tobytes() == whole(stream)[offset : offset + length]


def test_parts_within_a_tensor_are_not_copied():
    array = np.arange(1000, dtype=np.uint8)
    stream = TensorStream({"only": array})
    assert np.shares_memory(stream.read(stream.size - 10, 10), array)


def test_every_change_is_another_digest():
    digests = set()
    for change in (
        {"x": np.zeros(4, np.float32)},
        {"y": np.zeros(4, np.float32)},
        {"x": np.zeros((2, 2), np.float32)},
        {"x": np.zeros(4, np.int32)},
        {"x": np.ones(4, np.float32)},
    ):
        digests.add(TensorStream(change).digest())
    assert len(digests) == 5


def test_torch_tensors_and_tied_ones(tmp_path):
    torch = pytest.importorskip("torch")
    embedding = torch.arange(8, dtype=torch.float32).reshape(4, 2)
    tensors = {
        "embed": embedding,
        "head": embedding,  # tied: a checkpoint holds it once
        "copy": embedding.clone(),
        "brain": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "transposed": embedding.T,
    }
    stream = TensorStream(tensors)
    (tmp_path / "model.safetensors").write_bytes(whole(stream))
    loaded = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == {"embed", "copy", "brain", "transposed"}
    assert all(torch.equal(loaded[name], tensors[name]) for name in loaded)
    assert read_manifest(tmp_path).digest == stream.digest()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "give at least one tensor"),
        ({"w": [1.0, 2.0]}, r"source\['w'\] = 'list '.*numpy arrays or torch tensors"),
        ({"w": np.zeros(2, dtype=np.complex64)}, r"source\['w'\] = 'ndarray complex64'"),
        ({7: np.zeros(2)}, "name every tensor by a string"),
    ],
)
def test_what_is_no_tensor_is_named(tensors, said):
    with pytest.raises(InvalidField, match=said):
        TensorStream(tensors)


def test_torch_tensors_without_bytes_of_their_own_are_named():
    torch = pytest.importorskip("torch")

    class OneRank(torch.Tensor):
        """As a `DTensor`, which is made within a process group alone."""

        full_tensor = None

    for tensor, said in (
        (torch.zeros(2, device="meta"), "device meta, and has no values"),
        (torch.eye(2).to_sparse(), r"layout torch.sparse_coo: give its to_dense\(\)"),
        (torch.zeros(2).as_subclass(OneRank), r"one rank's part of a tensor: give its full_tensor\(\)"),
    ):
        with pytest.raises(InvalidField, match=rf"source\['w'\] = .*{said}"):
            TensorStream({"w": tensor})
