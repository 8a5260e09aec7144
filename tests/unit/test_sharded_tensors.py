"""Tensors that ranks send side by side: one stream, one digest, and each byte from one rank; so with deltas."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_ranks import MadeUpRanks, on_each
from safetensors.numpy import load

from seer.client import InvalidField, SentWeights, ShardedTensors, sent_weights
from seer.client.sharded_tensors import shared_out
from seer.client.tensor_stream import TensorStream
from seer.common.weights.delta import apply

TYPES = ("float64", "float32", "float16", "uint8")


def stream_of(streams):
    """Return a stream's bytes, each range from the rank that sends it."""
    data = np.zeros(streams[0].size, np.uint8)
    end = 0
    for rank, start, stop in streams[0].ranges():
        assert start == end < stop
        data[start:stop] = streams[rank].read(start, stop - start)
        end = stop
    assert end == streams[0].size
    assert all(each.ranges() == streams[0].ranges() for each in streams)
    return data.tobytes()


def sharded(tensors, size):
    return on_each(MadeUpRanks.all_of(size), lambda rank: ShardedTensors(tensors, rank))


def plans(tensors, kept, base=None):
    """Return each rank's plan to send tensors, `kept` by rank."""
    shards = sharded(tensors, len(kept))
    return on_each(shards, lambda each: kept[each.rank].plan(each.stream, base, each))


def send(tensors, kept, version=1):
    """Make tensors what the ranks sent last."""
    for each, plan in zip(kept, plans(tensors, kept, version - 1), strict=True):
        each.live(plan, f"v{version}", version, whole=False)


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
    assert {each.digest for each in plans(tensors, [SentWeights() for _ in shards])} == {plain.digest()}
    found = load(stream_of([each.stream for each in shards]))
    assert found.keys() == {each.name for each in plain.entries}
    assert all(np.array_equal(found[name], tensors[name]) for name in found)
    assert [entry.tensor.dtype.itemsize for entry in shards[0].stream.entries] == sorted(
        (each.dtype.itemsize for each in found.values()), reverse=True
    ), "tensors are aligned"


@given(st.lists(st.sampled_from(["0", "1", "2", "01", "012", ""]), min_size=1, max_size=8), st.integers(0, 9))
def test_ranks_that_have_some_tensors_each_send_those_and_each_tensor_once(places, seed):
    """Rank 1 of three may have none; what several have is equal, or the first one's counts."""
    rng = np.random.default_rng(seed)
    own = [{}, {}, {}]
    for number, ranks in enumerate(places):
        for rank in map(int, ranks):
            own[rank][f"t{number}"] = rng.integers(0, 100, 3).astype(TYPES[number % 4])
    whole = own[2] | own[1] | own[0]
    shards = on_each(MadeUpRanks.all_of(3), lambda rank: ShardedTensors(own[rank.rank], rank, divided=True))
    if not whole:
        assert all(isinstance(each, InvalidField) for each in shards), shards
        return
    found = load(stream_of([each.stream for each in shards]))
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], whole[name]) for name in found)
    planned = on_each(shards, lambda each: SentWeights().plan(each.stream, None, each).digest)
    assert set(planned) == {TensorStream(whole).digest()}


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
    if wrong == "no tensor":
        found = on_each(
            MadeUpRanks.all_of(2),
            lambda rank: ShardedTensors(WRONG[wrong] if rank.rank == 1 else right, rank, divided=True),
        )
        assert all(isinstance(each, InvalidField) and "rank 1" in str(each) for each in found), found


class Damaged:
    """A sharded tensor that is put together wrongly."""

    dtype, shape, nbytes = np.dtype("f4"), (3,), 12

    def detach(self):
        return self

    def to_local(self):
        return np.zeros(3, "f4")

    def full_tensor(self):
        return np.zeros(2, "f4")


def test_if_a_rank_cannot_put_its_tensors_together_all_ranks_say_so():
    found = sharded({"w": np.zeros(9, "f4"), "x": Damaged()}, 3)
    assert all(
        isinstance(each, InvalidField) and "rank 1': x has shape (2,)" in str(each) for each in found
    ), found


def test_if_a_rank_cannot_read_its_tensors_all_ranks_say_so(monkeypatch):
    def failing(entry, data, tag):
        if entry.name == "x":
            raise MemoryError
        return b""

    monkeypatch.setattr("seer.client.sent_weights.hash_of", failing)
    found = plans({"w": np.zeros(3, "f4"), "x": np.zeros(2, "f4")}, [SentWeights() for _ in range(3)])
    assert all(isinstance(each, InvalidField) and "rank 1" in str(each) for each in found), found


def test_a_rank_s_own_tensors_are_copied_once_and_not_for_each_part_of_them():
    for rank in sharded({"w": np.zeros((4, 6), "f4").T, "x": np.zeros((3, 5), "f2")[:, ::2]}, 2):
        for entry in rank.stream.entries:
            assert not isinstance(entry.tensor, np.ndarray) or entry.tensor.flags.c_contiguous


@st.composite
def versions(draw):
    """Return two versions of tensors, of which none, few, many or all elements differ."""
    old, new, rng = {}, {}, np.random.default_rng(draw(st.integers(0, 99)))
    for number in range(draw(st.integers(1, 6))):
        before = rng.integers(0, 100, draw(st.sampled_from([0, 1, 9, 3000]))).astype(
            draw(st.sampled_from(TYPES))
        )
        at = rng.random(len(before)) < draw(st.sampled_from([0.0, 0.01, 1.0]))
        old[f"t{number}"], new[f"t{number}"] = before, np.where(at, before + 1, before).astype(before.dtype)
    return old, new


@given(versions(), st.integers(1, 4))
def test_ranks_send_what_differs(pair, size):
    old, new = pair
    kept, alone, plain = [SentWeights() for _ in range(size)], SentWeights(), TensorStream(new)
    send(old, kept)
    alone.live(alone.plan(TensorStream(old), None), "v1", 1, whole=True)
    found, expected = plans(new, kept, 1), alone.plan(plain, 1)
    assert {each.digest for each in found} == {plain.digest()}
    assert abs(found[0].delta.size - expected.delta.size) < 200, "but for the header, which has another order"
    with tempfile.TemporaryDirectory() as folder:
        base, delta, result = (Path(folder) / name for name in ("base", "delta", "result"))
        base.write_bytes(stream_of([each.stream for each in sharded(old, size)]))
        delta.write_bytes(stream_of([each.delta for each in found]))
        result.touch()
        apply(base, delta, result, "v1")
        assert result.read_bytes() == stream_of([each.stream for each in sharded(new, size)])
    for each, plan in zip(kept, found, strict=True):
        each.live(plan, "v2", 2, whole=False)
    assert len({each.last for each in kept}) == 1
    again = plans(new, kept, 2)
    assert ({each.digest for each in again}, [each.found for each in again]) == (
        {plain.digest()},
        [{}] * size,
    )
    pays = {(each.delta is None, each.why) for each in plans(old, kept)}
    assert len(pays) == 1, "or ranks would not send one stream"


GIVEN = {name: np.zeros(1000, "f4") for name in "abc"}


def forget(kept):
    kept[1].forget()


def send_alone(kept):
    alone = [SentWeights()]
    send(GIVEN, alone)
    kept[1]._sent = alone[0]._sent


def send_another(kept):
    send({name: each[1:] for name, each in GIVEN.items()}, kept)


def switch_off(kept):
    kept[1]._enabled = False


def rest(kept):
    kept[1]._sent, kept[1]._rest = None, 3


def lag(kept):
    kept[1]._sent.name = "v0"


@pytest.mark.parametrize(
    ("on_one", "why"),
    [
        (forget, "no earlier tensors"), (send_another, "shapes or ranks of tensors changed"),
        (send_alone, "shapes or ranks of tensors changed"), (lag, "not all ranks sent"),
        (switch_off, "switched off"), (rest, "did not pay"),
    ],
)  # fmt: skip
def test_if_one_rank_cannot_compare_all_ranks_send_all(on_one, why):
    kept = [SentWeights() for _ in range(3)]
    send(GIVEN, kept)
    on_one(kept)
    found = plans(GIVEN, kept)
    assert all(why in each.why and each.delta is None for each in found), found
    assert {each.keep for each in found} == {on_one not in (switch_off, rest)}
    assert len({each.why for each in found}) == 1


def test_a_machine_without_room_for_the_copies_of_all_its_ranks_has_none(monkeypatch):
    for free, keep in ((2 * 12000, True), (2 * 12000 - 1, False)):
        monkeypatch.setattr(sent_weights, "free_bytes", lambda free=free: free)
        found = plans(GIVEN, [SentWeights() for _ in range(3)])
        assert [(each.keep, each.kept is not None) for each in found] == [(keep, keep)] * 3
        assert all(("too little memory" in each.why) is not keep for each in found)


def test_what_fails_midway_is_not_kept(monkeypatch):
    kept = [SentWeights()]
    send(GIVEN, kept)
    [plan] = plans({name: each + 1 for name, each in GIVEN.items()}, kept, 1)
    monkeypatch.setattr(sent_weights, "_renew", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kept[0].live(plan, "v2", 2, whole=False)
    assert "no earlier" in plans(GIVEN, kept, 1)[0].why
