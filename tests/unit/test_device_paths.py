"""What V2 is told of a step with several paths before it prepares it: above all, which CUDA graph it takes."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from seer.common.policy.draft_paths import SEPARATOR  # noqa: E402 - after torch
from seer.services.engine.vllm.drafts.device_paths import DevicePaths  # noqa: E402
from seer.services.engine.vllm.drafts.path_layout import lay_out  # noqa: E402

pytestmark = pytest.mark.vllm

TWO = [5, 6, SEPARATOR, 7, 8]


def dispatched(drafts, scratch=8, alone=(), eligible=True, dummy=False):
    """What a graph is looked for by: rows, tokens of each if they are alike, and of the longest."""
    names = list(drafts)
    tokens = np.array([1 + len(draft) for draft in drafts.values()], np.int32)
    state = SimpleNamespace(
        req_ids=names, idx_mapping_np=np.arange(len(names)), num_draft_tokens_np=tokens - 1,
        num_scheduled_tokens=tokens, decode_graph_eligible=eligible,
    )  # fmt: skip
    longest = int(tokens.max())
    uniform = longest if (tokens == longest).all() and eligible else None
    cache = torch.zeros(scratch + 1, 2)
    runner = SimpleNamespace(
        device=torch.device("cpu"), max_num_reqs=8, kv_caches=[cache], block_tables=SimpleNamespace(block_sizes=[4]),
        kv_cache_config=SimpleNamespace(num_blocks=len(cache)), model_state=SimpleNamespace(prepare_attn=None),
        prepare_inputs=None, prepare_attn=None,
        gather_batch_req_state=lambda scheduled, dummy_run: (None if dummy_run else state, uniform),
        cudagraph_manager=SimpleNamespace(dispatch=lambda rows, tokens, alike, **more: (rows, alike, more["max_query_len"])),
    )  # fmt: skip
    paths = DevicePaths(runner, list(range(1, 1 + scratch)), 2, alone)
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={n: draft for n, draft in drafts.items() if draft}
    )
    _, found = runner.gather_batch_req_state(scheduled, dummy)
    most = None if not eligible else longest
    result = runner.cudagraph_manager.dispatch(len(names), int(tokens.sum()), found, max_query_len=most)
    return result, paths.counters["rows"], paths.counters["dropped"]


def test_equal_paths_are_a_step_of_equal_rows():
    assert dispatched({"a": TWO, "b": TWO}) == ((4, 3, 3), 2, 0)


def test_unequal_rows_are_said_to_be_so():
    assert dispatched({"a": TWO, "b": TWO[:-1]}) == ((4, None, 3), 2, 0)
    assert dispatched({"a": TWO, "b": []}) == ((3, None, 3), 1, 0)


def test_a_step_with_a_prefill_keeps_out_of_graphs_of_decodes():
    assert dispatched({"a": TWO, "b": TWO}, eligible=False) == ((4, None, None), 2, 0)


def test_other_steps_stay_as_they_are():
    assert dispatched({"a": [1, 2], "b": [3, 4]}) == ((2, 3, 3), 0, 0)
    assert dispatched({"a": TWO}, dummy=True) == ((1, 6, 6), 0, 0)


def test_without_room_a_request_has_one_row():
    assert dispatched({"a": TWO, "b": TWO}, scratch=2) == ((3, None, 6), 1, 1)
    assert dispatched({"a": TWO}, alone=[0]) == ((1, 6, 6), 0, 1)
    many = {str(i): TWO for i in range(7)}
    assert dispatched(many, scratch=20)[1:] == (1, 6)


@pytest.mark.parametrize("lengths", [(1,), (6,), (6, 1), (6, 6, 1), (6, 3, 6, 1)])
def test_kernels_read_a_layout_where_triton_need_not_compile_anew(lengths):
    layout = lay_out(lengths, lengths, {row: [2] for row, size in enumerate(lengths) if size == 6}, (), 8)
    paths = DevicePaths.__new__(DevicePaths)
    paths._runner = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=8)
    rows = paths._send(layout, SimpleNamespace(num_tokens=sum(lengths)))
    names = ("owners", "paths", "shorter", "shifts", "further", "firsts", "choices")
    assert [getattr(rows, name).tolist() for name in names] == [
        getattr(layout, name).tolist() for name in names
    ]
    assert [rows.starts.tolist()[-1], len(rows.starts)] == [sum(layout.drafts + 1), len(layout.drafts) + 1]
    assert rows.bounds.tolist()[len(layout.owners) :] == [sum(lengths)] * (9 - len(layout.owners))
    assert {getattr(rows, name).data_ptr() % 16 for name in (*names, "starts", "bounds")} == {0}
