"""Seer's scheduler beside vLLM's own: the same steps, results and blocks, whatever happens between them.

Two real schedulers get the same requests, tokens, drafts, aborts, preemptions and loads of KV; after each call
all of their outputs and all of their state are compared. Steps and results that can go the short way must.
"""

import importlib.util

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

from scheduler_cells import Cell
from scheduler_pair import Pair

pytestmark = pytest.mark.vllm

CELLS = [
    Cell(),
    Cell(blocks=60, budget=64),
    Cell(caching=False),
    Cell(priority=True),
    Cell(window=6, blocks=40),
    Cell(chunked=8, blocks=40),
    Cell(images=True, blocks=30),
    Cell(connector=True, blocks=20),
    Cell(drafts=3),
    Cell(drafts=3, blocks=60, budget=64),
    Cell(drafts=6, blocks=24),
    Cell(drafts=4, blocks=40, budget=9),
    Cell(drafts=3, dynamic=True, blocks=20),
    Cell(drafts=2, priority=True),
    Cell(drafts=2, window=6, blocks=40),
    Cell(drafts=2, images=True, blocks=30),
    Cell(drafts=2, connector=True, blocks=20),
    Cell(ahead=True),
    Cell(ahead=True, blocks=60, budget=64),
    Cell(ahead=True, priority=True),
    Cell(ahead=True, window=6, blocks=40),
    Cell(ahead=True, images=True, blocks=30),
    Cell(ahead=True, connector=True, blocks=20),
    Cell(ahead=True, drafts=8, dynamic=True),
    Cell(ahead=True, drafts=8, dynamic=True, blocks=60, budget=64),
    Cell(ahead=True, drafts=8, dynamic=True, blocks=30, budget=9),
    Cell(ahead=True, drafts=4, dynamic=True, blocks=20, caching=False),
    Cell(ahead=True, drafts=4, dynamic=True),
    Cell(ahead=True, drafts=4, dynamic=True, priority=True, budget=30),
    Cell(ahead=True, drafts=8, dynamic=True, window=6, blocks=40, budget=30),
    Cell(ahead=True, drafts=8, dynamic=True, chunked=8, blocks=40, budget=30),
    Cell(ahead=True, drafts=4, dynamic=True, images=True, blocks=30),
    Cell(ahead=True, drafts=4, dynamic=True, connector=True, blocks=20),
    Cell(drafts=3, lookahead=3, dynamic=True, blocks=30, throttled=True),
    Cell(ahead=True, drafts=4, lookahead=4, dynamic=True, blocks=30, budget=30),
    Cell(grammars=True, throttled=True),
    Cell(drafts=4, grammars=True, blocks=30, budget=64),
    Cell(ahead=True, drafts=4, dynamic=True, grammars=True, blocks=30, budget=64),
    Cell(
        ahead=True,
        drafts=4,
        dynamic=True,
        grammars=True,
        connector=True,
        priority=True,
        images=True,
        blocks=30,
    ),
]

SAMPLING = [{}] * 8 + [{"min_tokens": 1}, {"stop_token_ids": []}, {"repetition_detection": (1, 3)}]

add = st.tuples(
    st.just("add"), st.integers(1, 3), st.integers(0, 2), st.integers(1, 30), st.integers(1, 30),
    st.sampled_from(SAMPLING),
)  # fmt: skip
run = st.tuples(st.just("run"), st.integers(1, 15))
other = st.one_of(
    st.tuples(st.just("end"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("end_in_a_step"), st.integers(0, 9)),
    st.tuples(st.just("reset"), st.booleans()),
    st.tuples(st.just("forget"), st.floats(0, 1)),
    st.tuples(st.just("pause"), st.sampled_from(["PAUSED_NEW", "PAUSED_ALL"])),
)


def name_of(cell):
    default = Cell()
    given_ = {k: v for k, v in vars(cell).items() if v != getattr(default, k)}
    return (
        ", ".join(name if value is True else f"{name} {value}" for name, value in given_.items()) or "usual"
    )


class Calls:
    """What a test's list may order."""

    def __init__(self, cell, seed):
        self.pair = Pair(cell, seed)

    def add(self, many, kind, prompt, length, sampling):
        from vllm.sampling_params import RepetitionDetectionParams

        if "repetition_detection" in sampling:
            size, times = sampling["repetition_detection"]
            detection = RepetitionDetectionParams(max_pattern_size=size, min_count=times)
            sampling = {"repetition_detection": detection}
        for _ in range(many):
            self.pair.add([kind] * prompt, length, **sampling)

    def run(self, steps):
        for _ in range(steps):
            self.pair.step()

    def end(self, which, aborted):
        if names := list(self.pair.ours.requests):
            self.pair.end(names[which % len(names)], aborted)

    def end_in_a_step(self, which):
        names = list(self.pair.ours.requests)
        self.pair.step(names[which % len(names)] if names else None)

    def reset(self, running):
        self.pair.reset(running and not self.pair.cell.connector)  # vLLM cannot while KV is loaded

    def forget(self, share):
        self.pair.forget(share)

    def pause(self, state):
        from vllm.v1.core.sched.interface import PauseState

        self.pair.pause(PauseState[state])
        self.pair.step()
        self.pair.pause(PauseState.UNPAUSED)


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
@settings(max_examples=25, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # what fails is long anyway
@given(seed=st.integers(0, 2**32), calls=st.lists(st.one_of(add, run, run, other), min_size=15, max_size=45))
def test_all_is_as_vllm_does_it(cell, seed, calls):
    both = Calls(cell, seed)
    for name, *arguments in calls:
        getattr(both, name)(*arguments)
    both.pair.drain()


@pytest.mark.parametrize(
    "cell",
    [
        Cell(blocks=60),
        Cell(drafts=2, blocks=60),
        Cell(ahead=True, blocks=60),
        Cell(ahead=True, drafts=8, dynamic=True, blocks=60, budget=64),
    ],
    ids=name_of,
)
def test_all_that_decode_go_the_short_way_also_as_others_join_and_end(cell):
    pair = Pair(cell, 1)
    for length in (25, 20, 30, 10):
        pair.add([0] * 6, length, stop_token_ids=[])
        for _ in range(4):
            pair.step()
    pair.drain()
    # One schedules the first request alone, and with steps ahead, one or two ends are due and nobody is left.
    assert pair.ours.short_schedules >= pair.steps - 4
    assert pair.ours.short_updates >= pair.steps - 4
    assert (pair.drafted > 0) == (pair.cell.drafts > 0)


@pytest.mark.parametrize("others", [0, 1])
def test_kv_that_is_computed_again_piece_by_piece_is_a_prompt_to_its_last_token(others):
    pair = Pair(Cell(connector=True, blocks=40, budget=6), 2)
    pair.random.random, pair.token = lambda: 0.5, lambda: 1  # nothing happens by chance
    names = [pair.add([each] * 2, 40, stop_token_ids=[]) for each in range(1 + others)]
    request, known = pair.ours.requests[names[-1]], 2 * (6 - others) + 1
    while request.num_tokens < known:
        pair.step()
    pair.failed = set(pair.ours.kv_cache_manager.get_block_ids(names[-1])[0][:1])
    pair.step()
    assert (request.num_tokens, request.num_computed_tokens) == (known, 0)
    pair.step()
    pair.step()
    assert (request.num_tokens, request.num_computed_tokens) == (known, known - 1)
    assert request.is_prefill_chunk
    pair.drain()


KNOWN = ("lora_config", "ec_connector", "aux_output_connector", "log_stats", "is_encoder_decoder",
         "is_mm_encoder_only", "use_pp", "has_mamba_layers", "prefix_replay_tokens", "num_prefill_lookahead",
         "return_sampling_mask", "finished_req_ids_dict")  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_not_known_here_is_left_to_vllm(name):
    from seer.services.engine.vllm.decode_rows import fits

    scheduler = Pair(Cell(), 0).ours
    assert fits(scheduler)
    setattr(scheduler, name, {1: 1})
    assert not fits(scheduler)


def test_managers_of_blocks_that_are_not_known_are_left_to_vllm():
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    from seer.services.engine.vllm.decode_rows import fits

    class Other(FullAttentionManager):
        pass

    scheduler = Pair(Cell(), 0).ours
    scheduler.kv_cache_manager.coordinator.single_type_managers[0].__class__ = Other
    assert not fits(scheduler)


def test_counts_of_nan_are_left_to_vllm():
    pair = Pair(Cell(), 0)
    name = pair.add([0] * 5, 20, stop_token_ids=[])
    pair.step()
    pair.step()
    assert pair.ours.short_updates == 2
    pair.nan = {name: 3}
    pair.step()
    pair.nan = None
    pair.step()
    assert pair.ours.requests[name].num_nans_in_logits == 3
    assert pair.ours.short_updates == 2
