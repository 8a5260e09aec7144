"""Tensors that ranks send side by side: one stream, one digest, and each byte from one rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_ranks import MadeUpRanks, on_each
from safetensors.numpy import load

from seer.client import InvalidField, ShardedTensors
from seer.client.sharded_tensors import shared_out
from seer.client.tensor_stream import TensorStream

TYPES = ("float64", "float32", "float16", "uint8")


def stream_of(shards):
    """Return the stream's bytes, each range from the rank that sends it."""
    data = np.zeros(shards[0].stream.size, np.uint8)
    end = 0
    for rank, start, stop in shards[0].stream.ranges():
        assert start == end < stop
        data[start:stop] = shards[rank].stream.read(start, stop - start)
        end = stop
    assert end == shards[0].stream.size
    return data.tobytes()


def sharded(tensors, size):
    return on_each(MadeUpRanks.all_of(size), lambda rank: ShardedTensors(tensors, rank))


@given(
    st.lists(
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=8
    ),
    st.integers(1, 5),
)
def test_ranks_send_what_one_would(described, size):
    rng = np.random.default_rng(0)
    tensors = {
        f"t{number}": rng.integers(0, 100, shape).astype(dtype)
        for number, (dtype, shape) in enumerate(described)
    }
    tensors["tied"] = tensors["t0"]
    shards = sharded(tensors, size)
    plain = TensorStream(tensors)
    assert {each.digest for each in shards} == {plain.digest()}
    assert {each.token for each in shards} == {shards[0].token}
    assert all(each.stream.ranges() == shards[0].stream.ranges() for each in shards)
    found = load(stream_of(shards))
    assert found.keys() == {each.name for each in plain.entries}
    assert all(np.array_equal(found[name], tensors[name]) for name in found)
    assert [entry.tensor.dtype.itemsize for entry in shards[0].stream.entries] == sorted(
        (each.dtype.itemsize for each in found.values()), reverse=True
    ), "tensors are aligned"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 6))
def test_ranks_send_about_as_much(sizes, ranks):
    owners = shared_out({str(number): size for number, size in enumerate(sizes)}, ranks)
    loads = [
        sum(sizes[int(name)] for name, owner in owners.items() if owner == rank) for rank in range(ranks)
    ]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)
    assert loads[0] > 0 or not sum(sizes)


WRONG = {
    "another name": {"w": np.zeros(3, "f4"), "y": np.zeros(3, "f4")},
    "another shape": {"w": np.zeros(3, "f4"), "x": np.zeros(4, "f4")},
    "another type": {"w": np.zeros(3, "f4"), "x": np.zeros(3, "f2")},
    "another order": {"x": np.zeros(3, "f4"), "w": np.zeros(3, "f4")},
    "no tensor": {"w": np.zeros(3, "f4"), "x": "text"},
    "none": {},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_if_a_rank_has_other_tensors_all_ranks_say_so(wrong):
    right = {"w": np.zeros(3, "f4"), "x": np.zeros(3, "f4")}
    found = on_each(
        MadeUpRanks.all_of(3), lambda rank: ShardedTensors(WRONG[wrong] if rank.rank == 1 else right, rank)
    )
    assert all(isinstance(each, InvalidField) for each in found), found
    assert all("rank 1" in str(each) for each in found)


def test_if_a_rank_cannot_read_its_tensors_all_ranks_say_so(monkeypatch):
    def failing(entry, data):
        if entry.name == "x":
            raise MemoryError
        return b""

    monkeypatch.setattr("seer.client.sharded_tensors.hash_of", failing)
    found = sharded({"w": np.zeros(3, "f4"), "x": np.zeros(2, "f4")}, 3)
    assert all(isinstance(each, InvalidField) and "rank 1" in str(each) for each in found), found


def test_a_rank_s_own_tensors_are_copied_once_and_not_for_each_part_of_them():
    for rank in sharded({"w": np.zeros((4, 6), "f4").T, "x": np.zeros((3, 5), "f2")[:, ::2]}, 2):
        for entry in rank.stream.entries:
            assert not isinstance(entry.tensor, np.ndarray) or entry.tensor.flags.c_contiguous
