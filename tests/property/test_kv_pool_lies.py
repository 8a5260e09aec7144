"""The guarded store over a pool that hangs, lies and fails at random: a miss, or what was put."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("xxhash")

from fake_mooncake import LIES, Engine, FakePool
from living import wait_for

pytestmark = pytest.mark.vllm

KEYS = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["put", "get", "forget"]), KEYS),
    st.tuples(st.just("use"), st.integers(0, 2)),
    st.tuples(st.just("lie"), st.sampled_from([*LIES, ""])),
    st.tuples(
        st.just("fail"), st.sampled_from([("get", -800), ("put", -200), ("put", -900), ("exists", -900)])
    ),
    st.tuples(st.just("hang"), st.sampled_from(["get", "put", "exists"])),
    st.tuples(st.just("heal"), st.none()),
)


class Play:
    """Steps against a model: what may be found is what was put, by key and namespace."""

    def __init__(self):
        self.pool = FakePool()
        self.engine = Engine(self.pool, "0", call_seconds=0.02)
        self.engine.store.key_prefixes = ("",)
        self.namespace, self.known = 0, set()

    def fill(self, block, key):
        self.engine.fill(block, 100 * self.namespace + key)

    def put(self, keys):
        for block, key in enumerate(keys):
            self.fill(block, key)
        self.known |= {(self.namespace, key) for key in keys}
        return self.engine.put([f"@{key}" for key in keys], range(len(keys)))

    def get(self, keys):
        for block in range(10, 16):
            self.engine.fill(block, 9999)
        before = self.engine.bytes_of(10)
        codes = self.engine.get([f"@{key}" for key in keys], range(10, 10 + len(keys)))
        for block, (key, code) in enumerate(zip(keys, codes, strict=True), start=10):
            self.fill(0, key)
            assert self.engine.bytes_of(block) == (before if code < 0 else self.engine.bytes_of(0))
            assert code < 0 or (self.namespace, key) in self.known
        return codes

    def forget(self, keys):
        self.engine.store.remove([str(key) for key in keys])

    def use(self, namespace):
        self.namespace = namespace
        self.engine.store.use_namespace(str(namespace))

    def lie(self, how):
        some = list(self.pool.values.values())
        self.pool.lie = LIES.get(how, lambda key, value: (len(value), some[0] if some else b""))

    def fail(self, what):
        method, code = what
        self.pool.fail[method] = code

    def hang(self, method):
        self.pool.hang.setdefault(method, threading.Event())

    def heal(self, _):
        for method in list(self.pool.hang):
            self.pool.hang.pop(method).set()
        self.pool.fail, self.pool.lie = {}, lambda key, value: (len(value), value)

    def works(self):
        self.engine.never_pause()
        return self.put([7]) == [0] and self.get([7])[0] >= 0


@given(st.lists(STEPS, max_size=25))
@settings(max_examples=40)
def test_a_get_is_a_miss_or_what_was_put_under_that_key_and_namespace(steps):
    play = Play()
    for step, what in steps:
        play.engine.never_pause()
        getattr(play, step)(what)
    play.heal(None)
    wait_for(play.works)
    wait_for(lambda: play.engine.free_slots == 8)
    assert play.pool.outside == []
