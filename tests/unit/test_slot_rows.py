"""Model runner V2's rows: what the host would make of the same requests, positions, histories and drafts."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sampling_rows import check_slots, pack  # noqa: E402 - after torch

from seer.services.engine.vllm.sampling.slot_rows import SlotRows, SlotTable, slot_rows  # noqa: E402

pytestmark = pytest.mark.vllm


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_rows_and_accepted_drafts_are_the_hosts(seed):
    check_slots(seed, SlotRows)


def test_cpus_have_native_rows():
    assert type(slot_rows(torch.device("cpu"), torch.zeros(2, 3, dtype=torch.int32))) is SlotRows


def extra(fault_position=None, **fields):
    return SimpleNamespace(sampling=pack(50, **fields), fault_position=fault_position)


def test_lists_are_of_the_requests_that_are_there():
    table = SlotTable(3)
    table.set(2, extra(stop_ids=(7, 8), min_tokens=3, logit_bias={4: 0.5}))
    table.set(0, extra(stop_ids=(9,), min_tokens=3))
    stop_ids, bias_ids, bias_values = table.lists()
    assert (stop_ids.tolist(), bias_ids.tolist(), bias_values.tolist()) == ([9, 7, 8], [4], [0.5])
    assert table.records["stop_start"].tolist() == [0, 1, 1]
    table.set(2, extra(fault_position=5))
    assert [each.tolist() for each in table.lists()] == [[9], [], []]
    assert (table.version, table.faults.tolist()) == (3, [-1, -1, 5])


def test_a_request_has_at_least_a_token_more_after_each_step():
    table = SlotTable(2)
    at = lambda computed, scheduled: SimpleNamespace(  # noqa: E731 - reads best here
        idx_mapping_np=np.array([1]), prefill_len_np=np.array([10]), num_scheduled_tokens=np.array([scheduled]),
        num_computed_prefill_tokens_np=np.array([min(computed, 10)]),
    )  # fmt: skip
    table.set(1, extra())
    assert [table.known(at(*step)).tolist() for step in ((0, 6), (6, 4), (14, 5), (30, 5))] == [
        [6], [10], [11], [12],
    ]  # fmt: skip
    table.set(1, extra())
    assert table.known(at(0, 10)).tolist() == [10]
