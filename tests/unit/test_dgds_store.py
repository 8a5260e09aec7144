"""The dgds store, case by case; tests/property/test_dgds_store.py covers the interleavings."""

import numpy as np
import pytest

from seer.services.dgds.group_store import MAX_CUTS, Store
from seer.services.dgds.packing import pack, unpack
from seer.services.dgds.past_groups import OVERHEAD_TOKENS

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


def test_gaps_cuts_and_what_is_stale_are_counted(store):
    append(store, [1, 2, 3, 4, 5], attempt=2)
    assert append(store, [7], previous=9, attempt=2) == 5
    assert append(store, [7, 7], attempt=1) is None
    append(store, [3, 9], previous=2, attempt=3)
    assert store.tokens(GROUP, 0) == [1, 2, 3, 9]
    assert [store.counters[name] for name in ("gaps", "stale", "cuts")] == [1, 1, 1]


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
