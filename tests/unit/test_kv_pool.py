"""The guarded store over a pool that fails in every way: what its docstrings promise."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

from fake_mooncake import LIES, Engine, FakePool  # noqa: E402 - after torch, which may be missing
from living import wait_for  # noqa: E402

from seer.common.errors import EngineError  # noqa: E402
from seer.services.engine.vllm.kv_pool import guarded_store as store_module  # noqa: E402
from seer.services.engine.vllm.kv_pool.guarded_store import PATIENCE_SECONDS  # noqa: E402

pytestmark = pytest.mark.vllm

SHORT = 0.1
"""A deadline for calls that hang; what must work is retried, or has a long one."""

MISS = -704
NO_ROOM = -200


@pytest.fixture
def pool():
    pool = FakePool()
    yield pool
    for event in pool.hang.values():
        event.set()
    assert pool.outside == [], "the pool was given memory other than staging memory"


@pytest.fixture
def timers(monkeypatch):
    """Timers that a test fires: (seconds, what they call)."""
    made = []

    class Timer:
        def __init__(self, seconds, function, args):
            self.start = lambda: made.append((seconds, lambda: function(*args)))

    monkeypatch.setattr(store_module.threading, "Timer", Timer)
    return made


def saved(engine, *keys):
    """Put blocks 0, 1, ... with bytes of their own; return those."""
    for block in range(len(keys)):
        engine.fill(block, 1000 + block)
    assert engine.put(keys, range(len(keys))) == [0] * len(keys)
    engine.settle()
    return [engine.bytes_of(block) for block in range(len(keys))]


# --- what is kept


def test_what_was_put_is_got_by_another_engine_into_other_blocks(pool):
    keys = [f"k{i}" for i in range(20)]  # eight slots: several parts
    one, two = Engine(pool), Engine(pool)
    values = saved(one, *keys)
    assert two.has([*keys, "other"]) == [1] * 20 + [0]
    before = two.bytes_of(0)
    assert min(two.get(keys, range(21, 1, -1))) >= 0
    assert [two.bytes_of(block) for block in range(21, 1, -1)] == values
    assert {two.bytes_of(block) for block in (0, 1, 22, 23)} == {before}
    assert one.counts() == {"saved_blocks": 20, "dropped_blocks": 0, "failures": 0, "corrupt": 0, "away": 0}
    assert (one.free_slots, two.free_slots) == (8, 8)


def test_only_what_is_missing_is_a_miss(pool):
    engine = Engine(pool)
    (value,) = saved(engine, "a")
    first, second = engine.get(["x", "a"], [4, 5])
    assert (first, second >= 0) == (MISS, True)
    assert engine.bytes_of(5) == value
    assert set(engine.bytes_of(4)) == {0}
    assert engine.counts()["failures"] == 0


def test_a_put_returns_before_the_pool_has_it_and_its_block_may_be_overwritten(pool):
    engine = Engine(pool)
    release = pool.hold("put")
    engine.fill(0, 1)
    value = engine.bytes_of(0)
    assert engine.put(["a"], [0]) == [0]
    engine.fill(0, 2)
    assert pool.values == {}
    release()
    engine.settle()
    assert engine.get(["a"], [1])[0] >= 0
    assert engine.bytes_of(1) == value


def test_regions_refuse_addresses_that_are_no_blocks_and_no_slot_is_lost(pool):
    engine = Engine(pool)
    bad = [[9_000_001, 10_000], [9_000_000 + 24 * 3 * 2**14, 10_000], [5, 10_000]]
    for block in bad:
        with pytest.raises(ValueError, match="not blocks of one KV region"):
            engine.store.batch_put_from_multi_buffers(["a"], [block], None, None)
    assert engine.free_slots == 8


# --- namespaces


def test_nothing_is_found_under_another_namespace_or_without_one(pool, timers):
    one, two = Engine(pool, "a"), Engine(pool, "b")
    saved(one, "k")
    assert set(pool.values) == {"a/k"}
    assert (two.has(["k"]), two.get(["k"], [0])) == ([0], [MISS])
    two.store.use_namespace("a")
    assert (two.has(["k"]), two.get(["k"], [0])[0] >= 0) == ([1], True)
    asked = list(pool.asked)
    two.store.use_namespace("")
    assert (two.has(["k"]), two.get(["k"], [0]), two.put(["k"], [0])) == ([0], [MISS], [NO_ROOM])
    two.store.remove(["k"])
    two.settle()
    assert pool.asked == asked
    assert two.counts() == {"saved_blocks": 0, "dropped_blocks": 1, "failures": 0, "corrupt": 0, "away": 0}


def test_an_old_namespace_is_removed_after_the_lease_and_nothing_else(pool, timers):
    engine = Engine(pool, "v.1")
    saved(engine, "k")
    others = {"vx1/k": b"", "x/v.1/k": b"", "v.1": b"", "v.12/k": b""}
    pool.values |= others
    engine.store.use_namespace("v.1")
    assert timers == []
    engine.store.use_namespace("v.2")
    ((seconds, fire),) = timers
    engine.settle()
    assert (seconds, set(pool.values)) == (5.0, {"v.1/k", *others})
    fire()
    engine.settle()
    assert (pool.calls("remove_by_regex"), pool.values) == ([r"^v\.1/"], others)


def test_a_namespace_in_use_again_is_not_removed(pool, timers):
    engine = Engine(pool, "a")
    saved(engine, "k")
    engine.store.use_namespace("")
    engine.store.use_namespace("a")
    timers[0][1]()
    engine.settle()
    assert engine.has(["k"]) == [1]


def test_forgotten_blocks_are_removed_and_no_others(pool):
    engine = Engine(pool, "a")
    engine.store.key_prefixes = ("model@tp_rank:0", "model@tp_rank:0@group:1")
    saved(
        engine, "model@tp_rank:0@00ff", "model@tp_rank:0@00fe", "model@tp_rank:1@00ff",
        "model@tp_rank:0@group:1@00ff",
    )  # fmt: skip
    pool.values["b/model@tp_rank:0@00ff"] = b""
    engine.store.remove(["00ff", "abcd"])
    engine.settle()
    left = {"a/model@tp_rank:0@00fe", "a/model@tp_rank:1@00ff", "b/model@tp_rank:0@00ff"}
    assert set(pool.values) == left


def test_a_shared_pool_is_never_emptied(pool):
    engine = Engine(pool)
    saved(engine, "k")
    with pytest.raises(EngineError, match="never emptied"):
        engine.store.remove_all(force=True)
    engine.settle()
    assert engine.has(["k"]) == [1]


# --- a pool that hangs


@pytest.mark.parametrize("method", ["exists", "get"])
def test_who_waits_for_a_call_that_hangs_has_a_miss_and_others_do_not_wait(pool, method):
    saved(Engine(pool), *[f"k{i}" for i in range(6)])
    engine = Engine(pool, call_seconds=SHORT)
    engine.never_pause()
    release = pool.hold(method)
    keys = [f"k{i}" for i in range(6)]
    # Without a deadline these would wait for `release`, which comes after them.
    if method == "exists":
        assert engine.has(keys) == [0] * 6
    assert engine.get(keys, range(6)) == [MISS] * 6
    wait_for(lambda: engine.counts()["away"])
    asked, failures = list(pool.asked), engine.counts()["failures"]
    assert (len(pool.calls(method)), failures > 0) == (1, True)
    assert (engine.has(keys), engine.get(keys, range(6)), engine.put(["n"], [0])) == (
        [0] * 6, [MISS] * 6, [NO_ROOM],
    )  # fmt: skip
    assert (pool.asked, engine.counts()["failures"]) == (asked, failures)
    release()
    wait_for(lambda: engine.free_slots == 8 and engine.has(keys) == [1] * 6)
    wait_for(lambda: min(engine.get(keys, range(6))) >= 0)


def test_a_get_that_ends_after_its_deadline_touches_no_kv(pool):
    saved(Engine(pool), "a", "b")
    engine = Engine(pool, call_seconds=SHORT)
    release = pool.hold("get")
    assert engine.get(["a", "b"], [0, 1]) == [MISS] * 2
    for block in range(Engine.BLOCKS):  # another request's now
        engine.fill(block, block)
    before = engine.whole()
    assert engine.free_slots == 6  # the call may still write to two
    release()
    wait_for(lambda: engine.free_slots == 8)
    assert all(torch.equal(old, new) for old, new in zip(before, engine.kv.values(), strict=True))


def test_while_a_put_hangs_puts_are_dropped_and_reads_refused(pool):
    saved(Engine(pool), "old")
    engine = Engine(pool, call_seconds=1.0)
    engine.never_pause()
    release = pool.hold("put")
    keys = [f"k{i}" for i in range(10)]
    # Half of eight slots are for puts, in parts of two.
    assert engine.put(keys, range(10)) == [0] * 4 + [NO_ROOM] * 6
    wait_for(lambda: engine.counts()["away"])
    asked = list(pool.asked)
    assert (engine.put(["x"], [0]), engine.has(["old"]), engine.get(["old"], [0])) == ([NO_ROOM], [0], [MISS])
    assert pool.asked == asked
    assert engine.counts()["dropped_blocks"] == 7
    release()
    wait_for(lambda: engine.free_slots == 8 and engine.has(["old"]) == [1])
    assert (engine.counts()["saved_blocks"], engine.counts()["dropped_blocks"]) == (4, 7)


def test_when_puts_find_no_room_in_time_the_pool_is_left_alone(pool):
    engine = Engine(pool, call_seconds=1.0)
    release = pool.hold("put")
    assert engine.put([f"k{i}" for i in range(6)], range(6)) == [0] * 4 + [NO_ROOM] * 2
    assert engine.counts()["failures"] == 1
    assert not engine.calls._breaker.allows(store_module.time.monotonic())
    release()
    wait_for(lambda: engine.free_slots == 8)


def test_puts_that_wait_behind_a_failing_one_are_dropped_unasked(pool):
    engine = Engine(pool)
    release = pool.hold("put")
    pool.fail["put"] = -900
    assert engine.put(["a", "b", "c", "d"], range(4)) == [0] * 4
    wait_for(lambda: pool.calls("put"))
    release()
    engine.settle()
    assert pool.calls("put") == [["ns/a", "ns/b"]]
    counts = engine.counts()
    assert (counts["saved_blocks"], counts["dropped_blocks"], counts["failures"]) == (0, 4, 1)
    assert engine.free_slots == 8


def test_saves_that_are_dropped_for_long_are_said_once_and_their_return_too(pool, monkeypatch):
    said, now = [], 1000.0
    monkeypatch.setattr(store_module, "_log", SimpleNamespace(info=lambda what, **_: said.append(what),
                                                              warning=lambda what, **_: said.append(what)))  # fmt: skip
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: now))
    engine = Engine(pool)
    pool.fail["put"] = NO_ROOM  # what a master says whose owner is gone, too
    said.clear()
    for i in range(30):
        now += 1.0
        engine.put([f"k{i}"], [0])
        engine.settle()
        assert (said == []) == (i < PATIENCE_SECONDS)
    pool.fail.clear()
    for _ in range(3):
        now += 1.0
        engine.put(["last"], [0])
        engine.settle()
    assert said == ["the KV pool takes no blocks: all saves are dropped",
                    "blocks are saved in the KV pool again"]  # fmt: skip


# --- a pool that lies


@pytest.mark.parametrize("lie", [*LIES, "another's"])
def test_a_wrong_value_is_a_miss_counted_and_removed(pool, lie):
    engine = Engine(pool)
    _, other = saved(engine, "a", "b")
    for _ in range(8):  # every slot has held bytes that are right, or right for another key
        assert engine.get(["a" if lie == "nothing" else "b"], [2])[0] >= 0
    wrong = LIES.get(lie, lambda key, value: (len(value), pool.values["ns/b"]))
    pool.lie = lambda key, value: wrong(key, value) if key == "ns/a" else (len(value), value)
    before = engine.bytes_of(5)
    codes = engine.get(["b", "a"], [4, 5])
    assert (codes[0] >= 0, codes[1]) == (True, MISS)
    assert (engine.bytes_of(4), engine.bytes_of(5)) == (other, before)
    engine.settle()
    assert (pool.calls("remove"), engine.counts()["corrupt"]) == ([["ns/a"]], 1)
    assert engine.counts()["failures"] == 0
    assert engine.has(["a", "b"]) == [0, 1]


# --- a pool that fails


@pytest.mark.parametrize(
    ("method", "failure", "failures"),
    [
        ("get", -704, 0),
        ("get", -800, 1),
        ("get", -900, 1),
        ("get", RuntimeError("native"), 1),
        ("get", TimeoutError(), 1),
        ("get", [], 1),
        ("exists", -900, 1),
        ("exists", RuntimeError("native"), 1),
        ("exists", [1], 1),
        ("put", -200, 0),
        ("put", -900, 1),
        ("put", RuntimeError("native"), 1),
    ],
)
def test_a_call_that_fails_is_a_miss_counted_as_what_it_is(pool, method, failure, failures):
    engine = Engine(pool)
    saved(engine, "a", "b")
    pool.fail[method] = failure
    if method == "get":
        assert engine.get(["a", "b"], [4, 5]) == [failure if isinstance(failure, int) else MISS] * 2
    elif method == "exists":
        assert engine.has(["a", "b"]) == [0, 0]
    else:
        assert engine.put(["c", "d"], [0, 1]) == [0, 0]
        engine.settle()
    counts = engine.counts()
    assert (counts["failures"], counts["away"], counts["corrupt"]) == (failures, failures, 0)
    assert (counts["saved_blocks"], counts["dropped_blocks"]) == (2, 2 * (method == "put"))
    asked = list(pool.asked)
    assert engine.has(["a"]) == [int(not failures)]  # left alone after a failure
    assert len(pool.asked) - len(asked) == (not failures)
    assert engine.free_slots == 8


def test_a_full_pool_is_spared_puts_for_a_while_and_read_meanwhile(pool, monkeypatch):
    monkeypatch.setattr(store_module, "FULL_SECONDS", 3600.0)
    engine = Engine(pool)
    saved(engine, "a")
    pool.fail["put"] = NO_ROOM
    engine.put(["b"], [1])
    engine.settle()
    assert engine.put(["c"], [2]) == [NO_ROOM]
    assert pool.calls("put") == [["ns/a"], ["ns/b"]]
    assert (engine.counts()["dropped_blocks"], engine.counts()["failures"]) == (2, 0)
    assert engine.get(["a"], [3])[0] >= 0


def test_a_pool_that_is_full_takes_puts_again(pool, monkeypatch):
    monkeypatch.setattr(store_module, "FULL_SECONDS", 0.0)
    engine = Engine(pool)
    pool.fail["put"] = NO_ROOM
    engine.put(["b"], [1])
    engine.settle()
    del pool.fail["put"]
    saved(engine, "a")


# --- a pool that comes late, or goes


def test_a_pool_that_cannot_be_reached_at_first_is_found_later(pool):
    pool.refuse = 3
    engine = Engine(pool)
    wait_for(lambda: engine.counts()["failures"] == 1)
    assert (engine.counts()["away"], engine.has(["a"]), engine.get(["a"], [0])) == (1, [0], [MISS])
    engine.never_pause()
    assert engine.counts()["away"] == 1
    for left in (2, 1, 0):
        assert engine.put(["a"], [0]) == [0]
        engine.settle()
        assert (engine.counts()["away"], pool.calls("put")) == (int(left > 0), [["ns/a"]] * (left == 0))
        engine.never_pause()
    assert (engine.has(["a"]), engine.counts()["saved_blocks"], engine.counts()["dropped_blocks"]) == (
        [1],
        1,
        2,
    )


def test_memory_that_mooncake_does_not_register_is_never_used(pool):
    pool.fail["register"], pool.refuse = -600, 0
    engine = Engine(pool, attach=False)
    engine.store.attach(store_module.KvRegions(engine.kv.items()), sum(Engine.STARTS.values()))
    wait_for(lambda: engine.counts()["failures"] == 1)
    assert (engine.has(["a"]), engine.counts()["away"]) == ([0], 1)
    assert pool.calls("exists") == []


def test_close_lets_go_after_puts_and_nothing_is_asked_any_more(pool, timers):
    engine = Engine(pool)
    engine.fill(0, 1)
    engine.put(["a"], [0])
    engine.store.use_namespace("b")
    engine.store.close()
    engine.store.close()
    assert [name for name, _ in pool.asked] == ["register", "put", "close"]
    timers[0][1]()
    engine.settle()
    assert (engine.has(["a"]), engine.put(["a"], [0])) == ([0], [NO_ROOM])
    assert len(pool.asked) == 3


def test_close_does_not_wait_for_a_call_that_hangs_and_connects_to_nothing(pool):
    engine = Engine(pool, call_seconds=SHORT)
    release = pool.hold("put")
    engine.put(["a"], [0])
    engine.store.close()
    assert pool.calls("close") == []
    release()
    wait_for(lambda: pool.calls("close"))

    never = Engine(pool, attach=False)
    connections = pool.connections
    never.store.close()
    assert pool.connections == connections


def test_too_little_staging_memory_and_use_before_it_is_there_are_refused(pool):
    engine = Engine(pool, attach=False)
    with pytest.raises(EngineError, match=r"staging_mib = 1: one KV block has 0\.3 MiB; .* four"):
        engine.store.attach(store_module.KvRegions([]), 2**18 + 1)
    with pytest.raises(EngineError, match="used before `attach`"):
        engine.put(["a"], [0])
