"""No preemption by construction: the buffer's books, the engine's line, and what vLLM then allocates.

One instance under any load, with saves that pin blocks for as long as they like and a buffer that hears
of it late: nothing started is ever preempted, and nothing waits for ever.
"""

import pytest
from allocators import VllmAllocator

pytest.importorskip("vllm")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seer.common.errors import EngineError
from seer.common.policy.fleet import Fleet, InstanceView
from seer.common.types import Capacity
from seer.services.engine.chunk_gate import ChunkGate
from seer.services.engine.vllm.kv_account import KvAccount

pytestmark = pytest.mark.vllm

BLOCK = 4
BLOCKS = 10
SEATS = 4
STEPS = 400
"""More steps than all work that a run can leave needs."""


class Engine(RuleBasedStateMachine):
    """A buffer's books of one instance, the engine's line, and vLLM's allocator below."""

    window = 0

    @initialize(drafts=st.sampled_from((0, 3)))
    def start(self, drafts):
        self.capacity = Capacity(
            kv_blocks=BLOCKS, block_size=BLOCK, max_num_seqs=SEATS, max_model_len=40, draft_tokens=drafts
        )
        self.allocator = VllmAllocator(BLOCKS, BLOCK, SEATS, drafts, window=self.window)
        self.fleet = Fleet([InstanceView("e", self.capacity)])
        self.room = ChunkGate()
        self.requests: list[list[int]] = []
        self.placed: dict[str, tuple[list[int], int, int]] = {}
        self.started: list[str] = []
        self.count = 0

    @rule(
        n=st.integers(1, SEATS), prompt=st.integers(0, 2), length=st.integers(1, 12), chunk=st.integers(1, 20)
    )
    def group(self, n, prompt, length, chunk):
        for _ in range(n):
            self.place([prompt] * length, chunk)

    @precondition(lambda self: self.requests)
    @rule(n=st.integers(1, SEATS), chunk=st.integers(1, 20))
    def again(self, n, chunk):
        for _ in range(min(n, len(self.requests))):
            self.place(self.requests.pop(0), chunk)

    def place(self, tokens, chunk):
        if self.fleet.has_room("e", len(tokens), chunk):
            self.count += 1
            blocks = self.capacity.blocks_for(len(tokens), chunk)
            self.fleet.reserve("e", blocks, str(self.count))
            self.placed[str(self.count)] = (tokens, chunk, blocks)
            self.room.enter(str(self.count), blocks)

    @rule(
        steps=st.integers(1, 12),
        drafts=st.integers(0, 3),
        right=st.integers(0, 3),
        saves=st.booleans(),
        reports=st.booleans(),
    )
    def run(self, steps, drafts, right, saves, reports):
        for _ in range(steps):
            self.step(min(drafts, self.capacity.draft_tokens), right, saves)
        if reports:
            self.fleet.pin("e", self.allocator.pinned)

    def step(self, drafts, right, saves):
        for name in self.room.start(self.allocator.free, self.allocator.held):
            self.started.append(name)
            self.allocator.add(name, *self.placed[name][:2])
        for name in self.started if saves else ():
            self.allocator.pin(name)
        for name, tokens in self.allocator.step(drafts, right).items():
            before, chunk, _ = self.placed[name]
            assert len(tokens) == len(before) + chunk
            self.requests.append(tokens)
            self.end(name)
        assert self.allocator.preemptions == 0
        self.started_chunks_have_all_they_may_need()

    def end(self, name):
        self.room.leave(name)
        self.fleet.release("e", self.placed.pop(name)[2], name)
        if name in self.started:
            self.started.remove(name)

    @precondition(lambda self: self.placed)
    @rule(which=st.integers(0, 9))
    def drop(self, which):
        name = list(self.placed)[which % len(self.placed)]
        self.allocator.drop(name)
        self.end(name)

    @precondition(lambda self: self.allocator.pins)
    @rule(left=st.integers(0, 9))
    def saved(self, left):
        while len(self.allocator.pins) > left:
            self.allocator.unpin()

    @invariant()
    def the_books_are_kept(self):
        if hasattr(self, "room"):
            assert self.fleet["e"].reserved_blocks <= BLOCKS
            assert len(self.started) + self.room.waiting == len(self.placed) <= SEATS

    def started_chunks_have_all_they_may_need(self):
        held = {name: self.allocator.held(name) for name in self.started}
        assert all(blocks <= self.placed[name][2] for name, blocks in held.items())
        assert sum(self.placed[name][2] for name in held) - sum(held.values()) <= self.allocator.free

    def teardown(self):
        """Once no save pins blocks any more, every chunk starts and ends, and every block is free."""
        if not hasattr(self, "room"):
            return
        self.saved(0)
        for _ in range(STEPS):
            if self.placed:
                self.step(0, 0, False)
        assert not self.placed
        assert self.room.waiting == 0
        assert self.allocator.free == BLOCKS


class WindowedEngine(Engine):
    """Of a model some of whose layers attend to the last six tokens alone."""

    window = 6


TestVllm = Engine.TestCase
TestVllm.settings = settings(max_examples=80, stateful_step_count=50)

TestWindows = WindowedEngine.TestCase
TestWindows.settings = settings(max_examples=40, stateful_step_count=50)


def run_past_a_stale_report(in_line):
    """Return the preemptions of two chunks that fit the books of a buffer that has not heard of a save."""
    allocator = VllmAllocator(BLOCKS, BLOCK, SEATS, 0)
    capacity = Capacity(kv_blocks=BLOCKS, block_size=BLOCK, max_num_seqs=SEATS, max_model_len=40)
    allocator.add("saved", [0] * 12, 2)
    assert not allocator.step(0, 0)
    allocator.pin("saved")
    assert allocator.step(0, 0)
    room, left = ChunkGate(), ["first", "second"]
    for name in left:
        room.enter(name, capacity.blocks_for(3, 16))
    assert 2 * capacity.blocks_for(3, 16) == BLOCKS
    for _ in range(100):
        for name in room.start(allocator.free if in_line else BLOCKS, allocator.held):
            allocator.add(name, [1] * 3, 16)
        for name in allocator.step(0, 0):
            room.leave(name)
            left.remove(name)
    assert not left
    return allocator.preemptions


def test_without_the_line_a_late_report_costs_a_preemption():
    assert run_past_a_stale_report(in_line=True) == 0
    assert run_past_a_stale_report(in_line=False) > 0


def test_what_cannot_be_counted_is_refused_by_name():
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec

    allocator = VllmAllocator(BLOCKS, BLOCK, SEATS, 0)

    def account(spec):
        group = KVCacheGroupSpec(["layers.0.mixer", "layers.1.mixer", "layers.2.mixer"], spec)
        config = KVCacheConfig(num_blocks=BLOCKS + 1, kv_cache_tensors=[], kv_cache_groups=[group])
        return KvAccount(allocator.manager, config, BLOCK)

    mamba = MambaSpec(block_size=BLOCK, shapes=((2,),), dtypes=(torch.float32,))
    with pytest.raises(
        EngineError, match=r"layers layers\.0\.mixer, layers\.1\.mixer keep \(MambaSpec in vLLM\)"
    ):
        account(mamba)
    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    with pytest.raises(
        EngineError, match=r"shared\.block_size = 4: layer .* has blocks of 2 tokens; set that"
    ):
        account(MLAAttentionSpec(block_size=2, **shape))
    assert account(MLAAttentionSpec(block_size=2 * BLOCK, **shape)).blocks == BLOCKS
