"""Any interleaving of writers, repeats, losses, attempts, readers and evictions ends right."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from seer.services.dgds.memory import OVERHEAD_TOKENS
from seer.services.dgds.packing import pack, unpack
from seer.services.dgds.store import Store

GROUPS = [1, 2]
INDICES = [0, 1]
LONGEST = 12
MAX_TOKENS = 5 * OVERHEAD_TOKENS + 20  # both groups only fit with one response each


class NaiveStream:
    """The store's rule, token by token: the newest attempt wins, older ones only where they agree."""

    def __init__(self, attempt):
        self.attempt, self.written, self.tokens = attempt, 0, []

    def append(self, attempt, previous, tokens):
        if attempt < self.attempt:
            return None
        usable = self.written if attempt == self.attempt else len(self.tokens)
        if previous > usable:
            return usable
        if attempt > self.attempt:
            self.attempt, self.written = attempt, previous
        for position, token in enumerate(tokens, previous):
            if self.tokens[position : position + 1] not in ([], [token]):
                del self.tokens[position:]
                self.written = min(self.written, position)
            if position == len(self.tokens):
                self.tokens.append(token)
        self.written = max(self.written, previous + len(tokens))
        return None


class DgdsStore(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.store = Store(max_tokens=MAX_TOKENS, ttl_seconds=50.0)
        self.now = 0.0
        self.model = {}
        self.truths = {(group, index): [[0] * LONGEST] for group in GROUPS for index in INDICES}
        self.readers = [({}, {}) for _ in range(3)]

    @rule(
        group=st.sampled_from(GROUPS),
        index=st.sampled_from(INDICES),
        keep=st.integers(0, LONGEST),
        tail=st.lists(st.integers(0, 2), min_size=LONGEST, max_size=LONGEST),
    )
    def begin_attempt(self, group, index, keep, tail):
        attempts = self.truths[group, index]
        attempts.append(attempts[-1][:keep] + tail[keep:])

    @rule(
        group=st.sampled_from(GROUPS),
        index=st.sampled_from(INDICES),
        back=st.integers(0, 2),
        start=st.integers(0, LONGEST),
        count=st.integers(0, LONGEST),
    )
    def append(self, group, index, back, start, count):
        attempts = self.truths[group, index]
        attempt = max(0, len(attempts) - 1 - back)
        self._append(group, index, attempt, start, attempts[attempt][start : start + count])

    @rule(group=st.sampled_from(GROUPS), index=st.sampled_from(INDICES))
    def newest_attempt_sends_all(self, group, index):
        attempts = self.truths[group, index]
        self._append(group, index, len(attempts) - 1, 0, attempts[-1])
        held = self.store.tokens(group, index)
        assert held == attempts[-1]

    def _append(self, group, index, attempt, start, tokens):
        packed = pack(np.array(tokens, dtype=np.int32)).data
        had = self._survivors()
        got = self.store.append(group, index, attempt, start, packed, self.now)
        stream = had.get((group, index))
        if stream is None and start == 0:
            stream = had[group, index] = NaiveStream(attempt)
        assert got == (0 if stream is None else stream.append(attempt, start, tokens))
        self.model = had

    def _survivors(self):
        """The model without what the store evicted; that this is bounded is another invariant."""
        return {key: stream for key, stream in self.model.items() if self.store.tokens(*key) is not None}

    @rule(
        number=st.integers(0, 2),
        group=st.sampled_from(GROUPS),
        most=st.integers(1, 2 * LONGEST),
        until_whole=st.booleans(),
    )
    def fetch(self, number, group, most, until_whole):
        streams, have = self.readers[number]
        known = have.setdefault(group, {})
        whole = False
        while not whole:
            found = self.store.deltas(group, known, most, self.now)
            if found is None:
                return
            deltas, whole, _ = found
            assert sum(delta.count for delta in deltas) <= most
            for delta in deltas:
                stream = streams.setdefault((group, delta.index), [])
                assert delta.previous <= len(stream)
                stream[delta.previous :] = unpack(delta.tokens).tolist()
                known[delta.index] = (delta.revision, len(stream))
            if not until_whole:
                break
        if whole:
            for index in INDICES:
                held = self.store.tokens(group, index)
                assert held is None or streams.get((group, index), []) == held

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds):
        self.now += seconds
        self.store.expire(self.now)

    @invariant()
    def streams_are_the_models(self):
        for key, stream in self._survivors().items():
            assert self.store.tokens(*key) == stream.tokens

    @invariant()
    def memory_is_bounded_and_accounted_for(self):
        streams = [self.store.tokens(group, index) for group in GROUPS for index in INDICES]
        held = sum(len(stream) + OVERHEAD_TOKENS for stream in streams if stream is not None)
        assert self.store.held == held + len(self.store) * OVERHEAD_TOKENS <= MAX_TOKENS


DgdsStore.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestDgdsStore = DgdsStore.TestCase
