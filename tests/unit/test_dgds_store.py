"""The dgds store, case by case; tests/property/test_dgds_store.py covers the interleavings."""

import numpy as np
import pytest

from seer.services.dgds.packing import pack, unpack
from seer.services.dgds.past_groups import OVERHEAD_TOKENS
from seer.services.dgds.store import MAX_CUTS, Store

NOW = 100.0
GROUP = 7


@pytest.fixture
def store():
    return Store(max_tokens=1_000_000, ttl_seconds=60.0)


def append(store, tokens, previous=0, attempt=1, index=0, group=GROUP, now=NOW):
    packed = pack(np.array(tokens, dtype=np.int32)).data
    return store.append(group, index, attempt, previous, packed, now)


class Reader:
    def __init__(self):
        self.have, self.streams = {}, {}

    def fetch(self, store, most=10**6, group=GROUP):
        found = store.deltas(group, self.have, most, NOW)
        assert found is not None
        assert sum(delta.count for delta in found.deltas) <= most
        for delta in found.deltas:
            stream = self.streams.setdefault(delta.index, [])
            assert delta.previous <= len(stream)
            stream[delta.previous :] = unpack(delta.tokens).tolist()
            self.have[delta.index] = (delta.revision, len(stream))
        return found.complete


def test_appends_are_kept_by_response_and_repeats_change_nothing(store):
    assert append(store, [1, 2, 3]) is None
    assert append(store, [3, 4], previous=2) is None
    assert append(store, [1, 2]) is None
    assert append(store, [9], index=1) is None
    assert (store.tokens(GROUP, 0), store.tokens(GROUP, 1)) == ([1, 2, 3, 4], [9])
    assert store.held == 5 + 3 * OVERHEAD_TOKENS


def test_a_hole_is_refused_with_the_length_to_resume_from(store):
    assert append(store, [5], previous=4) == 0
    append(store, [1, 2])
    assert append(store, [5], previous=4) == 2
    assert append(store, [5], previous=4, attempt=2) == 2
    assert store.tokens(GROUP, 0) == [1, 2]
    assert store.counters["gaps"] == 3


def test_older_attempts_are_ignored(store):
    append(store, [1, 2], attempt=3)
    assert append(store, [7, 7, 7], attempt=2) is None
    assert store.tokens(GROUP, 0) == [1, 2]
    assert store.counters["stale"] == 1


def test_a_newer_attempt_keeps_what_agrees_and_cuts_what_does_not(store):
    append(store, [1, 2, 3, 4, 5])
    append(store, [3, 4], previous=2, attempt=2)
    assert store.tokens(GROUP, 0) == [1, 2, 3, 4, 5]
    append(store, [6], previous=4, attempt=2)
    assert store.tokens(GROUP, 0) == [1, 2, 3, 4, 6]
    assert store.counters["cuts"] == 1


def test_a_newer_attempt_cannot_build_on_what_it_did_not_confirm(store):
    append(store, [1, 2, 3, 4, 5])
    append(store, [1], attempt=2)
    for previous in (4, 5):
        assert append(store, [6], previous=previous, attempt=2) == 1
    assert append(store, [2, 8], previous=1, attempt=2) is None
    assert store.tokens(GROUP, 0) == [1, 2, 8]


def test_readers_get_deltas_and_nothing_twice(store):
    reader = Reader()
    append(store, [1, 2])
    append(store, [5], index=3)
    reader.fetch(store)
    assert reader.streams == {0: [1, 2], 3: [5]}
    assert store.deltas(GROUP, reader.have, 10, NOW) == ([], True, 3)
    append(store, [3], previous=2)
    (delta,), _, _ = store.deltas(GROUP, reader.have, 10, NOW)
    assert (delta.index, delta.previous, unpack(delta.tokens).tolist()) == (0, 2, [3])


def test_a_reader_is_told_of_cuts_even_while_the_stream_is_shorter(store):
    reader, late = Reader(), Reader()
    append(store, [1, 2, 3, 4, 5])
    reader.fetch(store)
    append(store, [1, 7], attempt=2)
    reader.fetch(store)
    late.fetch(store)
    assert reader.streams == late.streams == {0: [1, 7]}


def test_cuts_remembered_are_bounded_and_readers_of_any_age_catch_up(store):
    readers = []
    for attempt in range(1, 4 * MAX_CUTS):
        append(store, [*range(attempt), 1000 + attempt], attempt=attempt)
        readers.append(Reader())
        for reader in readers[:: max(1, len(readers) // 3)]:
            reader.fetch(store)
    for reader in readers:
        reader.fetch(store)
        assert reader.streams[0] == store.tokens(GROUP, 0)


def test_a_reader_that_missed_two_cuts_is_taken_back_to_the_earlier_position(store):
    old, new = Reader(), Reader()
    append(store, range(10))
    old.fetch(store)
    append(store, [5, 6, 70], previous=5, attempt=2)
    new.fetch(store)
    append(store, [2, 30, 4, 5, 6, 70, 8, 9], previous=2, attempt=3)
    for reader in (old, new):
        reader.fetch(store)
        assert reader.streams == {0: [0, 1, 2, 30, 4, 5, 6, 70, 8, 9]}


def test_a_writer_that_contradicts_itself_leaves_no_hole(store):
    append(store, range(10))
    append(store, [2, 99], previous=2)
    assert store.tokens(GROUP, 0) == [0, 1, 2, 99]
    assert append(store, [10], previous=10) == 4


def test_answers_are_bounded_and_go_on_where_they_stopped(store):
    for index in range(3):
        append(store, range(10), index=index)
    reader, rounds = Reader(), 1
    while not reader.fetch(store, most=4):
        rounds += 1
    assert rounds == 8
    assert all(reader.streams[index] == list(range(10)) for index in range(3))


def test_unknown_groups_are_said_to_be_unknown(store):
    assert store.deltas(GROUP, {}, 10, NOW) is None
    store.register(GROUP, 5.0, NOW)
    assert store.deltas(GROUP, {}, 10, NOW) == ([], True, 1)


def test_groups_expire_after_their_own_time_to_live_untouched(store):
    append(store, [1], group=1)
    store.register(1, 10.0, NOW)
    append(store, [1], group=2)
    store.expire(NOW + 10.0)
    assert len(store) == 2
    store.deltas(1, {}, 1, NOW + 9.0)
    store.expire(NOW + 18.0)
    assert len(store) == 2
    store.expire(NOW + 20.0)
    assert (len(store), store.tokens(1, 0)) == (1, None)
    store.expire(NOW + 61.0)
    assert (len(store), store.held, store.counters["expired"]) == (0, 0, 2)


def test_memory_is_bounded_and_the_least_recently_touched_goes_first():
    store = Store(max_tokens=3 * (2 * OVERHEAD_TOKENS + 100), ttl_seconds=60.0)
    for name in range(3):
        append(store, range(100), group=name)
    append(store, [0], group=0)
    append(store, range(50), group=3)
    assert [name for name in range(4) if store.tokens(name, 0)] == [0, 2, 3]
    append(store, range(10_000), group=4)
    assert (len(store), store.held) == (0, 0)


def test_a_reader_of_an_evicted_stream_starts_over(store):
    reader = Reader()
    append(store, [1, 2, 3])
    reader.fetch(store)
    store.expire(NOW + 1000)
    append(store, [1, 9], now=NOW + 1000)
    reader.fetch(store)
    assert reader.streams == {0: [1, 9]}


def test_it_is_said_once_that_groups_in_use_had_no_room():
    store = Store(max_tokens=10_000, ttl_seconds=60.0)
    append(store, [1] * 4_000, group=1)
    assert store.crowded(NOW) == ""
    append(store, [1] * 7_000, group=2, now=NOW + 20)
    assert store.counters["evicted"] == 1
    assert store.crowded(NOW + 20) == "", "nobody had used it for a while"
    append(store, [1] * 4_000, group=3, now=NOW + 21)
    said = store.crowded(NOW + 22)
    assert said.startswith(
        "dgds.max_tokens = 10000 leaves 10000 tokens to each of 1 responses in use: 1 groups"
    )
    assert store.crowded(NOW + 22) == ""
