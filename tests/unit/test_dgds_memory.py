"""The dgds's memory of earlier groups, the file that keeps it, and how tokens are packed."""

from pathlib import Path

import numpy as np
import pytest

from seer.common.errors import ConfigError
from seer.common.wire import MAX_GROUP_SIZE
from seer.services.dgds import past_groups_file
from seer.services.dgds.group_store import Store
from seer.services.dgds.packing import group_digest, pack, prompt_digest, unpack, unpackable
from seer.services.dgds.past_groups import OVERHEAD_TOKENS, PastGroups

PROMPT, EARLIER, LATER = 70, 1, 2
NOW = 100.0


def packed(*tokens):
    return bytes(pack(np.array(tokens, dtype=np.int32)))


@pytest.fixture
def memory():
    return PastGroups(max_tokens=4 * OVERHEAD_TOKENS + 20)


@pytest.fixture
def store(memory):
    return Store(max_tokens=1_000_000, ttl_seconds=60.0, past=memory)


def read(store, group=LATER, have=None, most=1000):
    """Fetch until nothing is missing; `have` is updated. Returns the streams by index."""
    have = {} if have is None else have
    streams = {}
    whole = False
    while not whole:
        deltas, whole, _ = store.deltas(group, have, most, NOW)
        assert sum(delta.count for delta in deltas) <= most
        for delta in deltas:
            stream = streams.setdefault(delta.index, [])
            stream[delta.previous :] = unpack(delta.tokens).tolist()
            have[delta.index] = (delta.revision, delta.previous + delta.count)
    return streams


def say(store, group, *tokens, index=0, prompt=PROMPT):
    store.register(group, 0.0, NOW, prompt)
    assert store.append(group, index, 1, 0, packed(*tokens), NOW) is None


# --- packing -----------------------------------------------------------------------------


def test_packing_keeps_every_id_in_range_and_names_what_is_not():
    tokens = np.array([0, 1, 255, 256, 65_535, 65_536, 151_935, 2**24 - 1], dtype=np.int32)
    assert unpack(pack(tokens)).tolist() == tokens.tolist()
    assert unpack(pack(tokens[::3])).tolist() == tokens[::3].tolist()
    assert pack(tokens).nbytes == 3 * len(tokens)
    assert unpack(b"").tolist() == []
    for good in (tokens, tokens.tolist(), [], tokens[:0]):
        assert unpackable(good) is None
    for bad in (-1, 2**24, 2**31 - 1):
        assert unpackable([5, bad, 6]) == unpackable(np.array([5, bad, 6], dtype=np.int32)) == bad
    assert unpackable([5, 2**70]) == 2**70


def test_digests_are_the_same_everywhere_and_fit_63_bits():
    assert group_digest("r/a") == 8846305515534854503
    assert prompt_digest(np.array([1, 2, 3], dtype=np.int32)) == prompt_digest(np.array([1, 2, 3]))
    digests = {group_digest(f"r/{number}") for number in range(1000)}
    assert len(digests) == 1000
    assert all(0 <= digest < 2**63 for digest in digests)


# --- memory ------------------------------------------------------------------------------


def test_what_is_remembered_comes_in_parts_once_and_again_when_it_changed(store):
    say(store, EARLIER, *range(10))
    say(store, LATER, 9)
    have = {}
    assert read(store, have=have, most=3) == {0: [9], MAX_GROUP_SIZE: list(range(10))}
    assert read(store, have=have) == {}
    store.expire(NOW)  # nothing is over
    assert store.append(LATER, 0, 1, 1, packed(*range(5)), NOW) is None
    store.remember_all()  # the later group's streams are now those of the prompt
    assert read(store, have=have)[MAX_GROUP_SIZE] == [9, *range(5)]


def test_a_group_that_was_cut_short_stands_before_the_last_whole_one(memory):
    whole, short, shorter = packed(*range(10)), packed(7, 8), packed(9)
    for revision, (streams, kept) in enumerate([
        ([whole], (whole,)), ([short, shorter], (short, shorter, whole)), ([shorter], (shorter, whole)),
        ([shorter], (shorter, whole)), ([packed(*range(5))], (packed(*range(5)),)), ([short], (short, packed(*range(5)))),
    ]):  # fmt: skip
        memory.put(PROMPT, streams, revision)
        assert memory.get(PROMPT).streams == kept
        assert memory.held == memory.get(PROMPT).size
    assert memory.get(PROMPT).revision == 5
    memory.put(PROMPT, [packed(1)] * MAX_GROUP_SIZE, 6)
    assert memory.get(PROMPT).revision == 5, "it has no room"
    large = PastGroups(max_tokens=10**7)
    large.put(PROMPT, [packed(*range(10_000))], 1)
    large.put(PROMPT, [packed(1)] * MAX_GROUP_SIZE, 2)
    assert len(large.get(PROMPT).streams) == MAX_GROUP_SIZE, "readers count no further"


def test_remembering_the_same_again_changes_nothing_for_readers(store, memory):
    say(store, EARLIER, 1, 2)
    say(store, LATER, 9)
    have, changes = {}, memory.changes
    read(store, have=have)
    store.register(3, 0.0, NOW, PROMPT)
    store._groups[LATER].streams.clear()
    store.expire(NOW + 59)
    assert memory.changes == changes + 1  # the later group's, when the third was registered
    memory.put(PROMPT, [packed(9)], 10**6)
    assert memory.changes == changes + 1


def test_groups_without_a_prompt_and_stores_without_a_memory_leave_nothing(store, memory):
    say(store, EARLIER, 1, prompt=0)
    forgetful = Store(max_tokens=1_000_000, ttl_seconds=60.0)
    for each in (store, forgetful):
        each.expire(NOW + 61)
        each.remember_all()
    say(forgetful, EARLIER, 1)
    say(forgetful, LATER, 9)
    assert read(forgetful) == {0: [9]}
    assert len(memory) == 0


def test_memory_is_bounded_and_the_least_recently_used_prompt_goes_first(memory):
    for prompt in (1, 2):
        memory.put(prompt, [packed(*range(10))], prompt)
    assert memory.held == 4 * OVERHEAD_TOKENS + 20
    assert memory.get(1) is not None
    memory.put(3, [packed(7)], 3)
    assert [prompt for prompt, _ in memory.items()] == [1, 3]
    memory.put(4, [packed(*range(3 * OVERHEAD_TOKENS))], 4)
    assert [prompt for prompt, _ in memory.items()] == [1, 3]
    assert memory.held == 4 * OVERHEAD_TOKENS + 11
    assert memory.counters == {"forgotten": 1, "too_large": 1}


# --- the file ----------------------------------------------------------------------------

ENTRIES = [(5, (packed(1, 2), packed(3))), (2**63 - 1, (packed(4),))]


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "memory"
    assert past_groups_file.load(path, "model") == []
    for entries in (ENTRIES, ENTRIES[:1], []):
        past_groups_file.save(path, "model", entries)
        assert past_groups_file.load(path, "model") == entries
    assert [file.name for file in tmp_path.iterdir()] == ["memory"]
    assert path.stat().st_mode & 0o777 == 0o600, "it has responses"


@pytest.mark.parametrize("place", [0, 25, -1, None])
def test_a_damaged_file_is_refused_and_replaced(tmp_path, place):
    path = tmp_path / "memory"
    past_groups_file.save(path, "model", ENTRIES)
    data = bytearray(path.read_bytes())
    if place is None:
        del data[len(data) // 2 :]
    else:
        data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"dgds\.remember_path = .*(damaged|not a file of Seer's)"):
        past_groups_file.load(path, "model")
    if place != 0:
        past_groups_file.save(path, "model", ENTRIES)
        assert past_groups_file.load(path, "model") == ENTRIES


def test_another_models_memory_is_refused(tmp_path):
    past_groups_file.save(tmp_path / "memory", "model", ENTRIES)
    with pytest.raises(ConfigError, match="another model"):
        past_groups_file.load(tmp_path / "memory", "other")


def test_another_programs_file_is_neither_read_nor_overwritten(tmp_path):
    path = tmp_path / "thesis.tex"
    path.write_bytes(b"years of work")
    for use in (
        lambda: past_groups_file.load(path, "model"),
        lambda: past_groups_file.save(path, "model", ENTRIES),
    ):
        with pytest.raises(ConfigError, match="not a file of Seer's"):
            use()
    assert path.read_bytes() == b"years of work"
    for no_file in (tmp_path / "none" / "memory", Path("/"), Path()):
        with pytest.raises(ConfigError, match="name a file"):
            past_groups_file.save(no_file, "model", ENTRIES)
    with pytest.raises(ConfigError, match="name a file"):
        past_groups_file.load(tmp_path, "model")
