"""Any interleaving of events, under each policy: invariants hold, every token is kept once, every group ends
once, and a second machine that is told the same decides the same."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from invariants import check

from seer.common.policy.length import Estimate
from seer.common.policy.schedule import POLICIES
from seer.common.types import Capacity
from seer.services.buffer import events as e
from seer.services.buffer.machine import Machine

NAMES = ("a", "b", "c")


def mirrored(event: e.Event) -> e.Event:
    """Return the same news, told in the opposite order."""
    if isinstance(event, e.EstimatesChanged):
        return replace(event, estimates=dict(reversed(event.estimates.items())))
    return event


class BufferModel(RuleBasedStateMachine):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    @initialize(chunk=st.integers(1, 40))
    def start(self, chunk):
        limits = e.Limits(chunk_size=chunk, max_attempts=3)
        self.machine, self.twin = (Machine(self.policy, limits) for _ in range(2))
        self.now = 0.0
        self.prompts = 0
        self.running: dict[tuple[str, int], e.Dispatch] = {}
        self.stale: list[e.Dispatch] = []
        self.kept: Counter[str] = Counter()
        self.ending: tuple[str, int] | None = None
        self.outcome: Counter[str] = Counter()
        self.accepted: set[str] = set()

    def send(self, event):
        self.now += 0.01
        instructions = self.machine.handle(event, self.now)
        assert instructions == self.twin.handle(mirrored(event), self.now)
        for item in instructions:
            match item:
                case e.Dispatch():
                    assert (item.request_id, item.attempt) not in self.running
                    assert item.instance in self.machine.instances
                    self.running[item.request_id, item.attempt] = item
                case e.Drop():
                    self.stale.append(self.running.pop((item.request_id, item.attempt)))
                case e.Keep():
                    assert self.ending is not None
                    assert self.ending[0] == item.request_id
                    self.kept[item.request_id] += self.ending[1]
                case e.Accept():
                    self.accepted |= {f"{item.rollout_id}/{p}" for p in item.prompt_ids}
                case e.Deliver():
                    self.outcome[item.group_id] += 1
                    group = self.machine.groups[item.group_id]
                    for request in group.results:
                        assert self.kept[request.view.request_id] == request.view.generated
                        assert request.finish
                case e.Refuse():
                    for prompt in item.prompt_ids:
                        self.outcome[f"{item.rollout_id}/{prompt}"] += 1

    @rule(name=st.sampled_from(NAMES), blocks=st.integers(6, 30))
    def join(self, name, blocks):
        for key in [key for key, d in self.running.items() if d.instance == name]:
            self.stale.append(self.running.pop(key))
        self.send(
            e.EngineJoined(name, Capacity(kv_blocks=blocks, block_size=8, max_num_seqs=4, max_model_len=200))
        )

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name):
        for key in [key for key, d in self.running.items() if d.instance == name]:
            self.stale.append(self.running.pop(key))
        self.send(e.EngineLeft(name))

    @rule(
        n=st.integers(1, 5),
        prompt_len=st.integers(1, 60),
        max_tokens=st.integers(1, 90),
        count=st.integers(1, 3),
    )
    def submit(self, n, prompt_len, max_tokens, count):
        specs = [e.GroupSpec(str(self.prompts + i), prompt_len) for i in range(count)]
        self.prompts += count
        self.send(e.GroupsSubmitted("t", "r", n, max_tokens, specs))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), finish=st.booleans())
    def end(self, data, finish):
        key = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.running.pop(key)
        count = data.draw(st.integers(1, dispatch.max_new_tokens)) if finish else dispatch.max_new_tokens
        self.ending = (dispatch.request_id, count)
        self.send(e.ChunkEnded(dispatch.instance, *key, count, "stop" if finish else ""))
        self.ending = None

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def late(self, data):
        dispatch = data.draw(st.sampled_from(self.stale))
        before = dict(self.kept)
        self.send(e.ChunkEnded(dispatch.instance, dispatch.request_id, dispatch.attempt, 1))
        assert self.kept == before

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fatal=st.booleans())
    def reject(self, data, fatal):
        key = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.running.pop(key)
        self.send(e.ChunkRejected(dispatch.instance, *key, fatal, "no"))

    @rule(data=st.data())
    def acknowledge(self, data):
        done = [g.prompt_id for g in self.machine.groups.values() if g.done]
        if done:
            self.send(e.GroupsAcknowledged("r", [data.draw(st.sampled_from(sorted(done)))]))

    @rule(data=st.data())
    def cancel(self, data):
        live = [g.prompt_id for g in self.machine.groups.values() if not g.done]
        if live:
            self.send(e.RolloutCancelled("t", "r", [data.draw(st.sampled_from(sorted(live)))]))

    @rule(pinned=st.integers(0, 6), name=st.sampled_from(NAMES))
    def report(self, pinned, name):
        self.send(e.EngineReported(name, pinned))

    @rule(tokens=st.lists(st.floats(1, 90), min_size=1, max_size=5), spread=st.sampled_from((0.0, 0.5)))
    def estimate(self, tokens, spread):
        groups = zip(self.machine.groups, tokens, strict=False)
        self.send(e.EstimatesChanged({group: Estimate(number, spread) for group, number in groups}))

    @invariant()
    def invariants(self):
        if hasattr(self, "machine"):
            check(self.machine)
            assert all(count == 1 for count in self.outcome.values())
            live = {g.group_id for g in self.machine.groups.values() if not g.done}
            assert self.accepted - set(self.outcome) == live

    def teardown(self):
        """With a big engine and no more faults, everything accepted ends."""
        if not hasattr(self, "machine"):
            return
        for name in NAMES:
            self.leave(name)
        self.send(
            e.EngineJoined("z", Capacity(kv_blocks=500, block_size=8, max_num_seqs=64, max_model_len=4096))
        )
        for _ in range(10_000):
            if not self.running:
                break
            key = next(iter(self.running))
            dispatch = self.running.pop(key)
            self.ending = (dispatch.request_id, dispatch.max_new_tokens)
            self.send(e.ChunkEnded(dispatch.instance, *key, dispatch.max_new_tokens))
        assert self.accepted <= set(self.outcome)
        assert not self.machine.requests


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_whatever_happens(policy):
    run_state_machine_as_test(
        lambda: BufferModel(policy), settings=settings(max_examples=15, stateful_step_count=60)
    )
