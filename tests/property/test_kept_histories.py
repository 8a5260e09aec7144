"""What a device keeps of token histories is what the host has, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from sampling_rows import pack

from seer.services.engine.vllm.sampling.kept_histories import KeptHistories
from seer.services.engine.vllm.sampling.rows import SamplingTable

VOCAB, MAX_LEN, SLOTS = 50, 300, 8


class Device:
    """Memory that does what a step says, and holds garbage where nothing was written."""

    def __init__(self):
        self.kept = KeptHistories()
        self.tokens = np.empty((0, 0), np.int32)
        self.sent = 0

    def step(self, params):
        starts, runs = self.kept.step(params)
        if self.tokens.shape != self.kept.shape:
            old, self.tokens = self.tokens, np.full(self.kept.shape, -7, np.int32)
            rows, width = map(min, old.shape, self.kept.shape)
            self.tokens[:rows, :width] = old[:rows, :width]
        self.flat = self.tokens.reshape(-1)
        ends = set()
        for begin, to, length in runs.where.tolist():
            assert 0 <= begin <= begin + length <= len(runs.tokens)
            assert 0 <= to <= to + length <= len(self.flat)
            assert not ends & set(range(to, to + length)), "two runs write to one place"
            ends |= set(range(to, to + length))
            self.flat[to : to + length] = runs.tokens[begin : begin + length]
        self.sent = len(runs.tokens)
        return starts

    def check(self, params):
        starts = self.step(params)
        for row, record in enumerate(params.records):
            if not params.penalised[row]:
                assert starts[row] == -1
                continue
            known = int(record["position"] - record["extra_len"])
            held = self.flat[starts[row] : starts[row] + known]
            assert held.tolist() == params.history[record["slot"], :known].tolist()


class Engine:
    """Requests that come, go, wait, move and grow, as in vLLM's batch."""

    def __init__(self, rng):
        self.rng = rng
        self.history = np.full((SLOTS, MAX_LEN), 12345, np.int32)  # what is not known is garbage
        self.live = []
        self.batch = []
        self.table = None

    def arrive(self):
        rng = self.rng
        kinds = ({}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}, {"presence_penalty": -1.0})
        length = int(rng.choice([0, 1, 20, 63, 64, 65, 150]))
        tokens = rng.integers(0, VOCAB, length).tolist()
        self.live.append((pack(VOCAB, key=int(rng.integers(3)), **kinds[rng.integers(4)]), tokens))

    def choose(self):
        """Choose another batch: any requests in any order, one of them perhaps twice, as paths of drafts are."""
        order = self.rng.permutation(len(self.live))[: self.rng.integers(0, SLOTS + 1)]
        self.batch = [self.live[i] for i in order]
        if self.batch and len(self.batch) < SLOTS and self.rng.random() < 0.4:
            self.batch.insert(self.rng.integers(len(self.batch) + 1), self.batch[0])
        self.table = SamplingTable([request for request, _ in self.batch])

    def end(self):
        gone = self.rng.integers(len(self.live))
        self.live.pop(gone)
        self.choose()

    def step(self, device):
        self.history[:] = 12345
        for slot, (_, tokens) in enumerate(self.batch):
            self.history[slot, : len(tokens)] = tokens
        counts = self.rng.integers(0, 4, len(self.batch)) if self.rng.random() < 0.5 else None
        drafts = None if counts is None else self.rng.integers(0, VOCAB, counts.sum()).astype(np.int32)
        positions = [len(tokens) for _, tokens in self.batch]
        device.check(self.table.step(positions, self.history, counts, drafts))
        for tokens in {id(tokens): tokens for _, tokens in self.batch}.values():  # some drafts are accepted
            grown = self.rng.integers(0, 5 if counts is not None else 2)
            tokens.extend(self.rng.integers(0, VOCAB, grown).tolist())
            del tokens[MAX_LEN:]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_the_device_holds_every_history_whatever_the_schedule(seed):
    engine, device = Engine(np.random.default_rng(seed)), Device()
    for _ in range(40):
        event = engine.rng.random()
        if event < 0.2 or not engine.live:
            engine.arrive()
            engine.choose()
        elif event < 0.3:
            engine.choose()
        elif event < 0.35:
            engine.end()
        elif event < 0.37:
            device.kept.forget()
        engine.step(device)


def table_of(requests):
    return SamplingTable([pack(VOCAB, key=key, presence_penalty=1.0) for key in range(requests)])


def test_a_steady_step_sends_new_tokens_alone():
    history = np.arange(2 * MAX_LEN, dtype=np.int32).reshape(2, MAX_LEN)
    table, device = table_of(2), Device()
    sent = []
    for position in (130, 131, 134, 134):
        device.check(table.step([position, position], history))
        sent.append(device.sent)
    assert sent == [260, 2, 6, 0]


def test_a_shorter_history_is_sent_again():
    rng = np.random.default_rng(3)
    table, device = table_of(1), Device()
    for position in (100, 90):
        device.check(table.step([position], rng.integers(0, VOCAB, (1, MAX_LEN)).astype(np.int32)))
        assert device.sent == position


def test_rows_that_move_or_come_back_are_not_sent_again():
    rng = np.random.default_rng(1)
    history = rng.integers(0, VOCAB, (4, MAX_LEN)).astype(np.int32)
    requests = [pack(VOCAB, key=key, presence_penalty=1.0) for key in range(4)]
    device = Device()
    sent = []
    for order in ([0, 1, 2, 3], [3, 1, 0], [2, 3], [0, 1, 2, 3]):
        device.check(SamplingTable([requests[i] for i in order]).step([100] * len(order), history[order]))
        sent.append(device.sent)
    assert sent == [400, 0, 0, 0]


def test_memory_is_bounded_by_requests_at_once_and_their_length():
    rng = np.random.default_rng(2)
    device = Device()
    for _ in range(50):  # 250 requests, 5 at once
        history = rng.integers(0, VOCAB, (5, MAX_LEN)).astype(np.int32)
        device.check(table_of(5).step([130] * 5, history))
        assert device.kept.shape == (8, 256)
        assert len(device.kept._owners) <= 8
    device.check(table_of(2).step([260] * 2, history[:2]))
    assert device.kept.shape == (8, MAX_LEN), "no wider than the longest that can be"


def test_rows_without_penalties_send_nothing():
    table, device = SamplingTable([pack(VOCAB, key=key) for key in range(3)]), Device()
    starts = device.step(table.step([100] * 3))
    assert (starts.tolist(), device.sent, device.kept.shape) == ([-1] * 3, 0, (0, 0))
