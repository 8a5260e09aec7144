"""Any interleaving of writers, repeats, losses, attempts, readers, evictions and prompts ends right."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from seer.common.wire import MAX_GROUP_SIZE
from seer.services.dgds.group_store import Store
from seer.services.dgds.packing import pack, unpack
from seer.services.dgds.past_groups import OVERHEAD_TOKENS, PastGroups

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


PROMPTS = [7, 8]
MEMORY_TOKENS = 4 * OVERHEAD_TOKENS + 8
"""Two prompts with one short stream each; a group of two streams alone."""


class NaiveMemory:
    """Prompts in the order of their last use, with the streams of the group that was remembered last.

    Behind those of a group that was cut short are those of the last one that was not, which is `whole`.
    """

    def __init__(self):
        self.prompts, self.whole = {}, {}

    def get(self, prompt):
        if prompt not in self.prompts:
            return []
        self.prompts[prompt] = self.prompts.pop(prompt)
        return self.prompts[prompt]

    def put(self, prompt, streams):
        whole = self.whole.get(prompt, []) if prompt in self.prompts else []
        short = 2 * sum(map(len, streams)) < sum(map(len, whole))
        both = streams + whole if short else streams
        if not streams or self.prompts.get(prompt) == both or charge(both) > MEMORY_TOKENS:
            return
        self.prompts.pop(prompt, None)
        self.prompts[prompt], self.whole[prompt] = both, whole if short else streams
        while sum(map(charge, self.prompts.values())) > MEMORY_TOKENS:
            del self.prompts[next(iter(self.prompts))]


def charge(streams):
    return sum(len(stream) + OVERHEAD_TOKENS for stream in streams) + OVERHEAD_TOKENS


class DgdsMemory(RuleBasedStateMachine):
    """Groups come and go, one writer each; readers see their prompts' past."""

    def __init__(self):
        super().__init__()
        self.memory = PastGroups(MEMORY_TOKENS)
        self.store = Store(max_tokens=10**6, ttl_seconds=50.0, past=self.memory)
        self.naive = NaiveMemory()
        self.now = 0.0
        self.live = {}  # group -> [prompt, streams, last touch], in the order of the last touch
        self.newest = {}  # prompt -> group
        self.readers = {}  # group -> ({index: (revision, length)}, {index: stream})
        self.next = 0

    def touch(self, group):
        entry = self.live.pop(group)
        entry[2] = self.now
        self.live[group] = entry

    def remember(self, group):
        prompt, streams, _ = self.live[group]
        self.naive.put(prompt, [list(stream) for stream in streams.values()])

    @rule(prompt=st.sampled_from(PROMPTS))
    def register(self, prompt):
        group, self.next = self.next, self.next + 1
        self.store.register(group, 0.0, self.now, prompt)
        if prompt in self.newest:
            self.remember(self.newest[prompt])
        self.live[group], self.newest[prompt] = [prompt, {}, self.now], group
        self.readers[group] = ({}, {})

    @rule(
        data=st.data(),
        index=st.sampled_from(INDICES),
        tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    )
    def append(self, data, index, tokens):
        if self.live:
            group = data.draw(st.sampled_from(sorted(self.live)))
            stream = self.live[group][1].setdefault(index, [])
            packed = pack(np.array(tokens, dtype=np.int32)).data
            assert self.store.append(group, index, 1, len(stream), packed, self.now) is None
            stream += tokens
            self.touch(group)

    @rule(data=st.data(), most=st.integers(1, 8), until_whole=st.booleans())
    def fetch(self, data, most, until_whole):
        if not self.live:
            return
        group = data.draw(st.sampled_from(sorted(self.live)))
        have, streams = self.readers[group]
        self.touch(group)
        whole = False
        while not whole:
            deltas, whole, _ = self.store.deltas(group, have, most, self.now)
            assert sum(delta.count for delta in deltas) <= most
            for delta in deltas:
                stream = streams.setdefault(delta.index, [])
                assert delta.previous <= len(stream)
                stream[delta.previous :] = unpack(delta.tokens).tolist()
                have[delta.index] = (delta.revision, len(stream))
            if not until_whole:
                break
        prompt, own, _ = self.live[group]
        if whole:
            past = self.naive.get(prompt)
            for index, stream in [*own.items(), *enumerate(past, MAX_GROUP_SIZE)]:
                assert streams[index] == stream
        elif self.memory.get(prompt) is not None:  # used now, however far the parts came
            self.naive.get(prompt)

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds):
        self.now += seconds
        self.store.expire(self.now)
        for group in [g for g, (_, _, touched) in self.live.items() if self.now - touched > 50.0]:
            self.remember(group)
            prompt = self.live.pop(group)[0]
            if self.newest.get(prompt) == group:
                del self.newest[prompt]

    @invariant()
    def the_memory_is_the_models_and_bounded(self):
        unpacked = [
            (prompt, [unpack(s).tolist() for s in streams]) for prompt, streams in self.memory.items()
        ]
        assert unpacked == list(self.naive.prompts.items())
        assert self.memory.held == sum(map(charge, self.naive.prompts.values())) <= MEMORY_TOKENS
        assert len(self.store) == len(self.live)


DgdsStore.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestDgdsStore = DgdsStore.TestCase
DgdsMemory.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestDgdsMemory = DgdsMemory.TestCase
