"""CUDA graphs of V2: vLLM's own manager of them, and its metadata of attention, on a machine without a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.config.compilation import CompilationConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from seer.common.policy.graph_times import Graphs
from seer.services.engine.vllm import decode_graphs
from seer.services.engine.vllm.decode_graphs import capture_sizes, captured, lengths, row_counts, spread

pytestmark = pytest.mark.vllm

SEQS, DRAFT = 256, 8
SHAPES = [(256, 8), (1024, 8), (455, 8), (100, 8), (64, 4), (5, 3), (1, 8), (1, 0), (256, 0), (1024, 0)]
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes a manager as V2 does, which says that it has captured its graphs."""
    monkeypatch.setattr(
        cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=1, is_last_rank=1)
    )
    monkeypatch.setattr(
        cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None)
    )

    def manager(mixed_lengths, seqs=SEQS, draft=DRAFT, mode=CUDAGraphMode.FULL_AND_PIECEWISE, ours=True):
        sizes = capture_sizes(seqs, draft, 16_384)
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=seqs),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
            speculative_config=SimpleNamespace(
                uses_dynamic_speculative_decoding=lambda: True,
                num_speculative_tokens_per_batch_size=[[1, seqs, draft]] if ours else [
                    [place, place, each - 1] for place, each in enumerate(lengths(draft), start=1)
                ],
            ),
            num_speculative_tokens=draft,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        )  # fmt: skip
        made = cudagraph_utils.ModelCudaGraphManager(config, torch.device("cpu"), mode, 1 + draft)
        if ours:
            spread(made, mixed_lengths)
        made._graphs_captured = True
        return made

    return manager


def step(manager, counts):
    """Dispatch a decode step of requests with so many tokens each, as `execute_model` does."""
    longest, tokens = max(counts), sum(counts)
    uniform = longest if longest * len(counts) == tokens else None
    return manager.dispatch(len(counts), tokens, uniform, 0, max_query_len=longest)


def mixes(rows, rng):
    """Yield steps of so many requests: alike, all but one alike, and whatever there is."""
    for each in range(1, DRAFT + 2):
        yield [each] * rows
        yield [each] * (rows - 1) + [1]
    for _ in range(4):
        yield rng.integers(1, DRAFT + 2, rows).tolist()


@pytest.mark.parametrize(("seqs", "draft"), SHAPES)
def test_sizes_are_few_and_pad_little(seqs, draft):
    sizes = capture_sizes(seqs, draft, 16_384)
    most = min(seqs * (1 + draft), decode_graphs.MOST_TOKENS)
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 64
    assert {most, min(seqs, most)} <= set(sizes)
    for tokens in range(1, most + 1):
        padding = next(size for size in sizes if size >= tokens) - tokens
        assert padding < max(8, tokens / 8)
    assert capture_sizes(seqs, draft, None) == sizes
    assert capture_sizes(seqs, draft, 48)[-1] == min(sizes[-1], 48)


@pytest.mark.parametrize("seqs", [1, 5, 100, 256, 1024])
def test_equal_requests_are_padded_by_a_quarter_at_most(seqs):
    counts = row_counts(seqs)
    for rows in range(1, seqs + 1):
        assert next(each for each in counts if each >= rows) - rows <= max(1, rows / 4)
    assert lengths(8) == (1, 2, 3, 5, 9)
    assert lengths(5) == (1, 2, 3, 5, 6)
    assert (lengths(1), lengths(0)) == ((1, 2), (1,))


def test_vllm_takes_the_sizes_as_they_are():
    sizes = capture_sizes(SEQS, DRAFT, 8192)
    config = SimpleNamespace(
        compilation_config=CompilationConfig(
            cudagraph_capture_sizes=sizes, cudagraph_mode="FULL_AND_PIECEWISE"
        ),
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=SEQS),
        uniform_decode_query_len=1 + DRAFT,
        speculative_config=None,
    )
    VllmConfig._set_cudagraph_sizes(config)
    compilation = config.compilation_config
    compilation.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.ALWAYS, None, 1 + DRAFT, use_v2_model_runner=True
    )
    assert compilation.max_cudagraph_capture_size == sizes[-1] == SEQS * (1 + DRAFT)
    assert compilation.cudagraph_capture_sizes == sizes


def test_every_decode_step_has_a_full_graph_where_attention_takes_mixed_lengths(make):
    manager, rng = make(True), np.random.default_rng(0)
    sizes = capture_sizes(SEQS, DRAFT, 16_384)
    for rows in range(1, SEQS + 1):
        for counts in mixes(rows, rng):
            graph = step(manager, counts)
            assert graph.cg_mode == FULL
            assert graph.num_tokens == next(size for size in sizes if size >= sum(counts))
            assert rows <= graph.num_reqs <= graph.num_tokens
    assert manager.dispatch(8, 40, None, 0).cg_mode == PIECEWISE, "a prefill is among them"
    assert step(manager, [DRAFT + 2, 1]).cg_mode == PIECEWISE


def test_beyond_the_largest_graph_there_is_none(make):
    for mixed_lengths in (True, False):
        manager = make(mixed_lengths, seqs=1024)
        for each in lengths(DRAFT):
            rows = min(1024, decode_graphs.MOST_TOKENS // each)
            assert step(manager, [each] * rows).cg_mode == FULL
            assert rows == 1024 or step(manager, [each] * (rows + 1)).cg_mode == NONE


def test_steps_of_equal_requests_have_full_graphs_where_attention_takes_no_others(make):
    manager, theirs, missed = make(False), make(False, ours=False), 0
    for rows in range(1, SEQS + 1):
        for each in lengths(DRAFT):
            graph = step(manager, [each] * rows)
            assert graph.cg_mode == FULL
            assert graph.num_tokens == graph.num_reqs * each
            assert graph.num_reqs - rows <= max(1, rows / 4)
            missed += step(theirs, [each] * rows).cg_mode != FULL
        assert step(manager, [4] * rows).cg_mode == PIECEWISE
    assert step(manager, [9, 9, 1]).cg_mode == PIECEWISE
    assert manager.dispatch(2, 40, None, 0).cg_mode == PIECEWISE
    assert missed > SEQS, "vLLM's own table"


def test_all_dispatched_graphs_are_captured_the_largest_first(make):
    for mixed_lengths in (True, False):
        manager = make(mixed_lengths)
        for mode, descs in manager._capture_descs.items():
            assert [desc.num_tokens for desc in descs] == sorted((d.num_tokens for d in descs), reverse=True)
            assert all(desc.cg_mode == mode for desc in descs)
            assert len(set(descs)) == len(descs)
        known = {desc for descs in manager._capture_descs.values() for desc in descs}
        assert {desc for descs in manager._candidates.values() for desc in descs} == known


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_other_modes_stay_as_they_are(make, mode):
    for mixed_lengths in (True, False):
        manager, theirs = make(mixed_lengths, mode=mode), make(None, mode=mode, ours=False)
        assert manager._candidates == theirs._candidates
        assert not manager.varlen_decode


def test_the_report_says_which_steps_have_which_graph(make):
    mixed, alike = captured(make(True)), captured(make(False))
    sizes = tuple(capture_sizes(SEQS, DRAFT, 16_384))
    assert str(mixed) == (
        "full for any mix of 1 to 9 tokens a request up to 2304 tokens (55), else piecewise up to 2304 tokens"
    )
    assert str(alike) == (
        "full for 1, 2, 3, 5, 9 tokens for each request alike up to 2304 tokens (140), "
        "else piecewise up to 2304 tokens"
    )
    assert (mixed.drafts(), alike.drafts()) == (tuple(range(9)), (0, 1, 2, 4, 8))
    assert mixed.for_profile() == Graphs(mixed=sizes)
    assert alike.for_profile().mixed == sizes
    assert {rows * 9 for rows in row_counts(SEQS)} <= set(alike.for_profile().full)
    every = captured(make(True, mode=CUDAGraphMode.FULL))
    assert str(every) == "full for any step up to 2304 tokens (55)"
    assert str(captured(make(True, mode=PIECEWISE))) == "piecewise up to 2304 tokens"
    assert str(captured(make(True, mode=NONE))) == str(captured(None)) == "none"
    assert captured(None).drafts() == ()


class Attention:
    """An attention group, its backend and its builder."""

    supports_update_block_table = False

    def __init__(self, support, bound=None, splits=32):
        self.backend, self.kv_cache_spec, self.layer_names = Attention, None, ["layer"]
        self.max_num_splits = splits
        self._support, self._bound = support, bound
        self.seen = []

    def get_metadata_builder(self, _):
        return self

    def get_cudagraph_support(self, *_):
        return self._support

    def get_varlen_cudagraph_max_query_len(self, *_):
        return self._bound

    def build_metadata(self, common, *_):
        self.seen.append(
            (common.max_query_len, common.num_reqs, common.num_actual_tokens, self.max_num_splits)
        )

    build_metadata_for_cudagraph_capture = build_metadata


class Runner:
    """What `install` uses of V2's runner; attention's metadata is V2's own."""

    def __init__(self, make, attention, **manager):
        self.attn_groups = [[attention]]
        self.vllm_config = SimpleNamespace(
            attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32)
        )
        self.model_state = state = object.__new__(DefaultModelState)
        state.supports_mm_inputs, state.model_config = False, SimpleNamespace(max_model_len=1000)
        self.buffers = InputBuffers(SEQS, 4096, torch.device("cpu"))
        self.kv = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])])
        self._make = lambda: make(None, ours=False, **manager)

    def initialize_kv_cache(self, *_):
        self.cudagraph_manager = self._make()

    def capture_model(self, *, profile_only=False):
        """Make the metadata of each full graph's capture, as the manager does."""
        tables = SimpleNamespace(
            cp_size=1, get_dummy_block_tables=lambda rows: [None],
            get_dummy_slot_mappings=lambda tokens: torch.zeros(1, tokens),
        )  # fmt: skip
        for desc in self.cudagraph_manager._capture_descs.get(FULL, []):
            cudagraph_utils.prepare_inputs_to_capture(
                desc.num_reqs, desc.num_tokens, self.model_state, self.buffers, tables, self.attn_groups,
                self.kv, True, max_query_len=desc.max_query_len or desc.uniform_token_count,
            )  # fmt: skip
        return 3 << 20

    def replay(self, counts):
        """Make the metadata of a step, as `execute_model` does after `prepare_inputs`."""
        desc = step(self.cudagraph_manager, counts)
        batch = InputBatch.make_dummy(len(counts), sum(counts), self.buffers)
        batch.num_scheduled_tokens = np.array(counts, np.int32)
        batch.num_reqs_after_padding = desc.num_reqs or len(counts)
        batch.num_tokens_after_padding = desc.num_tokens
        batch.query_start_loc_np = np.full(SEQS + 1, sum(counts), np.int32)
        batch.query_start_loc_np[: len(counts) + 1] = [0, *np.cumsum(counts)]
        batch.query_start_loc = torch.from_numpy(batch.query_start_loc_np)
        batch.is_prefilling_np = np.zeros(SEQS, bool)
        self.model_state.prepare_attn(
            batch, desc.cg_mode, [None], torch.zeros(1, desc.num_tokens), self.attn_groups, self.kv
        )
        return desc


@pytest.mark.parametrize(
    ("attention", "mode", "mixed"),
    [
        (Attention(AttentionCGSupport.ALWAYS), CUDAGraphMode.FULL_AND_PIECEWISE, True),
        (Attention(AttentionCGSupport.ALWAYS), CUDAGraphMode.FULL, False),
        (Attention(AttentionCGSupport.UNIFORM_BATCH, 9), CUDAGraphMode.FULL_DECODE_ONLY, True),
        (Attention(AttentionCGSupport.UNIFORM_BATCH, 8), CUDAGraphMode.FULL_AND_PIECEWISE, False),
        (Attention(AttentionCGSupport.UNIFORM_BATCH), CUDAGraphMode.FULL_AND_PIECEWISE, False),
    ],
)
def test_a_step_has_the_metadata_that_its_graph_was_captured_with(make, attention, mode, mixed):
    runner, rng = Runner(make, attention, mode=mode), np.random.default_rng(1)
    decode_graphs.install(runner)
    for _ in range(2):  # vLLM profiles memory with graphs of its own first
        runner.initialize_kv_cache(None)
    attention.seen.clear()
    assert runner.capture_model() == 3 << 20
    assert runner.cudagraph_manager.varlen_decode is mixed
    descs = runner.cudagraph_manager._capture_descs[FULL]
    at_capture = dict(zip(descs, attention.seen, strict=True))
    for rows in (1, 2, 7, 64, 100, 256):
        for counts in mixes(rows, rng):
            desc = runner.replay(counts)
            if desc.cg_mode == FULL:
                assert attention.seen[-1] == at_capture[desc]
            else:
                assert attention.seen[-1][:3] == (max(counts), rows, sum(counts))


def test_the_sums_of_split_attention_stay_as_many_as_in_vllms_own_largest_graph(make):
    attention = Attention(AttentionCGSupport.ALWAYS)
    runner = Runner(make, attention)
    decode_graphs.install(runner)
    runner.initialize_kv_cache(None)
    attention.seen.clear()
    runner.capture_model(profile_only=True)
    for _, _, tokens, splits in attention.seen:
        assert splits == 32 if tokens <= 512 else 1 <= splits <= 32 * 512 / tokens
    free = Attention(AttentionCGSupport.ALWAYS, splits=0)
    decode_graphs._bound_splits([[free]], 32, 4096)
    assert free.max_num_splits == 0


def test_groups_that_the_model_makes_itself_must_take_mixed_lengths_too(make):
    runner = Runner(make, Attention(AttentionCGSupport.ALWAYS))
    runner.initialize_kv_cache()
    assert decode_graphs.takes_mixed_lengths(runner)
    runner.model_state.get_additional_cg_support = lambda: (AttentionCGSupport.UNIFORM_BATCH, "encoder")
    assert not decode_graphs.takes_mixed_lengths(runner)
