"""Model runner V2's tables on CPUs: our kernels leave all memory as Triton's do, in its interpreter."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="no triton: builds of torch for GPUs bring it, `make kernel-test` too")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("`make kernel-test` runs this in Triton's interpreter", allow_module_level=True)

from triton.backends import backends  # noqa: E402

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # before vllm looks for it
from vllm.v1.worker.gpu import block_table, input_batch  # noqa: E402 - after torch and triton
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as head  # noqa: E402

from seer.services.engine.vllm import cpu_kernels  # noqa: E402

pytestmark = pytest.mark.vllm
STRIDES, SIZES, MODEL_LEN, VOCAB = (20, 12), (8, 16), 64, 200


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32)


class Step:
    """A step of `requests` in tables of `rows`, of the same numbers for each `seed`."""

    def __init__(self, seed: int, rows: int, requests: int, most: int) -> None:
        rng = np.random.default_rng(seed)
        self.slots = torch.tensor(rng.permutation(rows)[:requests])
        self.masked = torch.where(torch.tensor(rng.random(requests) < 0.2), -1, self.slots)
        self.prefill, self.done = int32(rng.integers(1, 30, rows)), int32(rng.integers(0, 30, rows))
        left = (self.prefill - self.done).clamp(min=0)[self.slots].numpy()
        lengths = np.where(
            left, rng.integers(1, np.maximum(left, 1) + 1), rng.integers(1, most + 2, requests)
        )
        logits = np.where(left, np.minimum(lengths, rng.integers(1, most + 2, requests)), lengths)
        self.starts, self.ends = (int32([0, *np.cumsum(each)]) for each in (lengths, logits))
        tokens, drawn = int(self.starts[-1]), int(self.ends[-1])
        self.pos, self.ids, self.lens = (
            torch.full((tokens + 5,), 7),
            int32([3] * (tokens + 5)),
            int32([9] * rows),
        )
        self.last, self.drafts = (
            torch.tensor(rng.integers(0, VOCAB, (rows, 1))),
            torch.tensor(rng.integers(0, VOCAB, (rows, most))),
        )
        self.indices, self.slots_of, self.places = (
            torch.zeros(drawn, dtype=torch.int64),
            torch.zeros(drawn, dtype=torch.int64),
            int32([0] * drawn),
        )
        self.sampled, self.gained = (
            torch.tensor(rng.integers(0, VOCAB, (requests, most + 1))),
            int32(rng.integers(1, logits + 1)),
        )
        self.rejected, self.total = int32([0] * requests), self.done + 3
        self.known, self.counts = int32(np.zeros((rows, MODEL_LEN))), int32(np.zeros((rows, VOCAB)))
        self.blocks = int32(rng.integers(0, 12, (2, rows)))
        self.tables = [int32(rng.integers(0, 99, (rows, stride))) for stride in STRIDES]
        self.copies = [int32(np.zeros((rows, stride))) for stride in STRIDES]
        self.mappings, self.on = (
            torch.zeros((2, tokens + 5), dtype=torch.int64),
            torch.tensor([True, bool(seed % 3)]),
        )

    def run(self, kernels: dict[str, Any]) -> None:
        """Do all of a step, with Triton's kernels or ours."""
        requests, strides = len(self.slots), torch.tensor(STRIDES)
        tables, copies = (
            torch.tensor([each.data_ptr() for each in some], dtype=torch.uint64)
            for some in (self.tables, self.copies)
        )
        most = self.drafts.shape[1]

        def launch(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            kernels[name][grid](*arguments, **constants) if name in kernels else getattr(cpu_kernels, name)(
                *arguments, **constants
            )

        launch("prepare_pos_seq_lens", (requests + 1,), self.pos, self.lens, self.slots, self.starts, self.done,
               len(self.lens), BLOCK_SIZE=1024)  # fmt: skip
        launch("combine_sampled_and_draft_tokens", (requests,), self.ids, self.slots, self.last, self.starts, self.lens,
               self.prefill, self.drafts, self.drafts.stride(0), self.ends, self.indices, NUM_NEW_SAMPLED_TOKENS=1, BLOCK_SIZE=8)  # fmt: skip
        launch("gather_block_tables", (2, requests), self.slots, tables, copies, strides, self.blocks,
               self.blocks.stride(0), requests, BLOCK_SIZE=1024)  # fmt: skip
        launch("compute_slot_mappings", (2, requests + 1), self.mappings.shape[1], self.slots, self.starts, self.pos, tables,
               strides, int32(SIZES), self.on, torch.zeros(2, dtype=torch.bool), self.mappings, self.mappings.stride(0), 0,
               CP_SIZE=1, CP_INTERLEAVE=1, PAD_ID=-1, TRITON_BLOCK_SIZE=1024)  # fmt: skip
        launch(
            "expand_idx_mapping", (requests,), self.slots, self.slots_of, self.places, self.ends, BLOCK_SIZE=8
        )
        launch(
            "get_num_sampled_and_rejected",
            (requests,),
            self.gained,
            self.rejected,
            self.lens,
            self.ends,
            self.slots,
            self.prefill,
        )
        launch("post_update", (requests,), self.masked, self.done, self.last, self.counts, self.counts.stride(0), self.sampled,
               most + 1, self.gained, self.rejected, self.starts, self.known, MODEL_LEN, self.total)  # fmt: skip

    def memory(self) -> dict[str, Any]:
        return {
            name: [each.tolist() for each in value] if isinstance(value, list) else value.tolist()
            for name, value in vars(self).items()
        }


TRITON = {
    "gather_block_tables": block_table._gather_block_tables_kernel,
    "compute_slot_mappings": block_table._compute_slot_mappings_kernel,
    **{
        name: getattr(input_batch, f"_{name}_kernel")
        for name in (
            "prepare_pos_seq_lens", "combine_sampled_and_draft_tokens", "get_num_sampled_and_rejected",
            "post_update", "expand_idx_mapping",
        )
    },
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 3), st.data())
def test_a_step_leaves_all_memory_as_tritons_kernels_do(
    seed: int, rows: int, most: int, data: st.DataObject
) -> None:
    ours = Step(seed, rows, data.draw(st.integers(1, rows)), most)
    theirs = copy.deepcopy(ours)
    ours.run({})
    theirs.run(TRITON)
    assert ours.memory() == theirs.memory()


class HeadStep:
    """What a draft head is given in a step and in `depths` more, of the same numbers for each `seed`."""

    def __init__(self, seed: int, rows: int, requests: int, most: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, most + 2, requests)
        self.slots, self.starts = (
            torch.tensor(rng.permutation(rows)[:requests]),
            int32([0, *np.cumsum(lengths)]),
        )
        self.rejected, self.sampled = int32(rng.integers(0, lengths)), int32(rng.integers(0, 2, requests))
        tokens = int(self.starts[-1])
        self.target_ids, self.target_lens = (
            int32(rng.integers(0, VOCAB, tokens)),
            int32(rng.integers(1, 60, rows)),
        )
        self.target_positions = torch.tensor(rng.integers(0, 60, tokens))
        self.last = torch.tensor(rng.integers(0, VOCAB, (rows, 1)))
        self.next_prefill = int32(rng.integers(0, VOCAB, (1, rows)))
        self.indices, self.keys = torch.full((rows,), 5), torch.tensor(rng.integers(0, 60, rows))
        self.depth, self.ids = torch.tensor(3), int32([3] * (tokens + 5))
        self.positions, self.lens = torch.full((tokens + 5,), 7), int32([9] * rows)
        self.query_starts = int32([1] * (rows + 1))
        self.drafts = torch.tensor(rng.integers(0, VOCAB, (3, requests)))
        self.made, self.hidden = torch.zeros((rows, 3), dtype=torch.int64), torch.zeros((tokens + 5, 4))
        self.outputs = torch.tensor(rng.random((3, requests, 4)), dtype=torch.float32)

    memory = Step.memory

    def run(self, kernels: dict[str, Any], moves: bool) -> None:
        n, rows, how = len(self.slots), len(self.lens), {"BLOCK_SIZE": 8, "ADVANCE_DRAFT_POSITIONS": moves}

        def launch(name: str, grid: int, *arguments: Any, **constants: Any) -> None:
            call = kernels[name][(grid,)] if name in kernels else getattr(cpu_kernels, name)
            call(*arguments, **constants)

        launch("prepare_head", n, self.indices, self.depth, self.ids, self.positions, self.query_starts, self.lens,
               self.target_ids, self.target_positions, self.slots, self.last, self.next_prefill, self.sampled,
               self.rejected, self.starts, self.target_lens, rows, BLOCK_SIZE=8)  # fmt: skip
        launch("prepare_head_decode", n + 1, self.drafts[0], 1, self.target_lens, self.rejected, self.ids,
               self.positions, self.keys, self.query_starts, self.lens, MODEL_LEN, rows, **how)  # fmt: skip
        for depth in (1, 2):
            self.depth.fill_(depth)
            launch("update_head_inputs", n, self.made, self.made.stride(0), self.hidden, self.hidden.stride(0),
                   self.ids, self.positions, self.keys, self.lens, self.drafts[depth], self.depth,
                   self.outputs[depth], 4, 4, MODEL_LEN, 3, **how)  # fmt: skip


HEAD = {
    "prepare_head": head._prepare_prefill_inputs_kernel,
    "prepare_head_decode": head._prepare_decode_inputs_kernel,
    "update_head_inputs": head._update_draft_inputs_kernel,
}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 3), st.booleans(), st.data())
def test_a_head_is_given_what_tritons_kernels_give_it(
    seed: int, rows: int, most: int, moves: bool, data: st.DataObject
) -> None:
    ours = HeadStep(seed, rows, data.draw(st.integers(1, rows)), most)
    theirs = copy.deepcopy(ours)
    ours.run({}, moves)
    theirs.run(HEAD, moves)
    assert ours.memory() == theirs.memory()


def test_a_table_of_another_type_or_with_gaps_is_refused() -> None:
    step = Step(0, 3, 2, 1)
    step.lens = step.lens.long()
    with pytest.raises(TypeError, match="int64"):
        step.run({})
    step = Step(0, 3, 2, 1)
    step.slots = torch.arange(4)[::2]
    with pytest.raises(TypeError, match="without gaps"):
        step.run({})
