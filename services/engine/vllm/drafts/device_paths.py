"""Verifies several draft paths of a request in one step of vLLM's model runner V2. Runs in workers.

To V2, a flat draft is one chain; nothing of what it counts changes. Attention alone sees a row for each path
(`path_layout`): on the request's full blocks, and for a further path on scratch blocks in the place of those
that it writes to. All rows sample the same tokens after the same context, since noise depends on key and
position; the path with the most accepted drafts wins.

Invariants (tests/e2e/test_draft_paths.py and test_draft_paths_ahead.py assert them):
- the rows of a step are never more than vLLM's batch holds, and they have the tokens that were scheduled;
- nothing here waits for the device: where a path begins is known there alone if steps are scheduled ahead;
- when the step ends, the request's own blocks hold the KV of its tokens: a winner's scratch blocks are copied
  back as whole blocks (CPU layouts cannot be addressed by token);
- where paths sample different tokens, because of rounding, the request's first one counts;
- all ranks hold equal logits, rows and scratch blocks, so they choose alike without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from seer.services.engine.vllm.drafts.path_layout import Ints, PathLayout, lay_out, separators
from seer.services.engine.vllm.drafts.path_ops import Blocks, Inputs, Kept, Rows, path_ops

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch

Prepared = tuple[tuple[torch.Tensor, ...], torch.Tensor]
"""V2's tables of blocks, by group of KV caches, and the slots of tokens."""


@dataclass(slots=True)
class _Step:
    """A step with several paths: its batch as it is, as rows of `attention`, and as `paths` with logits."""

    rows: Rows
    batch: InputBatch
    attention: InputBatch
    paths: InputBatch
    blocks: Blocks | None = None  # None: no further path has a row


class DevicePaths:
    """Wraps a runner of V2. `scratch`: KV blocks that the scheduler never gives out, `each` for a path.

    `alone`: slots of the requests that verify one path. `beside`: what is kept of blocks beside their KV,
    [blocks, bytes of a block].
    """

    def __init__(
        self,
        runner: Any,  # noqa: ANN401 - V2's
        scratch: Sequence[int],
        each: int,
        alone: Collection[int],
        beside: torch.Tensor | None = None,
    ) -> None:
        self._runner, self._alone = runner, alone
        whole = scratch[: len(scratch) // each * each]
        self._scratch = torch.tensor(whole, dtype=torch.int32, device=runner.device).view(-1, each)
        count, size = runner.kv_cache_config.num_blocks, runner.block_tables.block_sizes[0]
        kept = runner.kv_caches if beside is None else [*runner.kv_caches, beside]
        self._ops = path_ops(kept, count, size)
        self._layout: PathLayout | None = None
        self._step: _Step | None = None
        self._rows = self._dropped = 0
        # vLLM calls them in this order.
        _wrap(runner, "gather_batch_req_state", self._gather)
        _wrap(runner.cudagraph_manager, "dispatch", self._dispatch)
        _wrap(runner, "prepare_inputs", self._prepare_inputs)
        _wrap(runner, "prepare_attn", self._prepare_attn)
        _wrap(runner.model_state, "prepare_attn", self._attend)

    @property
    def counters(self) -> dict[str, int]:
        """Path `rows` that ran or `won`, paths `dropped`, `conflicts` between them; waits for the device."""
        won, conflicts = self._ops.decided.tolist()
        return {"rows": self._rows, "dropped": self._dropped, "won": won, "conflicts": conflicts}

    # --- before the forward pass ---------------------------------------------------------

    def _gather(
        self, gather: Callable[..., tuple[Any, int | None]], scheduled: SchedulerOutput, dummy_run: bool
    ) -> tuple[Any, int | None]:
        """Lay out the rows of a step whose drafts have several paths."""
        self._layout = self._step = None
        state, uniform = gather(scheduled, dummy_run)
        drafts = scheduled.scheduled_spec_decode_tokens
        places = separators(drafts, state.req_ids) if state is not None and drafts else {}
        if not places:
            return state, uniform
        alone = {request for request in places if int(state.idx_mapping_np[request]) in self._alone}
        room = min(len(self._scratch), self._runner.max_num_reqs - len(state.req_ids))
        logits = (state.num_draft_tokens_np + 1).tolist()
        self._layout = layout = lay_out(state.num_scheduled_tokens.tolist(), logits, places, alone, room)
        extra = len(layout.owners) - len(layout.firsts)
        self._rows, self._dropped = self._rows + extra, self._dropped + layout.dropped
        if extra:
            longest = int(layout.lengths.max())
            alike = state.decode_graph_eligible and bool((layout.lengths == longest).all())
            uniform = longest if alike else None
        return state, uniform

    def _dispatch(
        self,
        dispatch: Callable[..., object],
        num_reqs: int,
        *args: object,
        max_query_len: int | None = None,
        **kwargs: object,
    ) -> object:
        """Choose a graph for all rows."""
        if self._layout is not None:
            num_reqs = len(self._layout.owners)
            if max_query_len is not None:
                max_query_len = int(self._layout.lengths.max())
        return dispatch(num_reqs, *args, max_query_len=max_query_len, **kwargs)

    def _prepare_inputs(
        self, prepare: Callable[..., InputBatch], *args: object, **kwargs: object
    ) -> InputBatch:
        """Have further paths begin where their requests' drafts do."""
        batch, layout = prepare(*args, **kwargs), self._layout
        if layout is None:
            return batch
        rows = self._send(layout, batch)
        # Attention, and graphs of it, read the runner's own memory; the rest of a step reads these copies.
        batch.query_start_loc, batch.seq_lens = batch.query_start_loc.clone(), batch.seq_lens.clone()
        buffers = self._runner.input_buffers
        buffers.query_start_loc.copy_(rows.bounds)
        buffers.seq_lens.zero_()
        inputs = Inputs(batch.positions, batch.expanded_local_pos, batch.input_ids)
        self._ops.begin(rows, inputs, batch.seq_lens, buffers.seq_lens)
        drafts = layout.drafts.astype(np.int32)
        paths = replace(
            batch, num_reqs=len(drafts), num_draft_tokens_per_req=drafts, cu_num_logits=rows.starts,
            cu_num_logits_np=_starts(layout.drafts + 1),
        )  # fmt: skip
        self._step = _Step(rows, batch, self._as_rows(layout, rows, batch), paths)
        return batch

    def _send(self, layout: PathLayout, batch: InputBatch) -> Rows:
        bounds = np.full(self._runner.max_num_reqs + 1, batch.num_tokens, np.int64)
        bounds[: len(layout.owners) + 1] = _starts(layout.lengths)
        parts = (
            layout.owners, layout.paths, layout.shorter, layout.shifts, layout.further, layout.firsts,
            layout.choices, _starts(layout.drafts + 1), bounds,
        )  # fmt: skip
        # Each begins at a multiple of 16 bytes: Triton compiles anew for pointers that are less aligned.
        sizes = [len(part) + len(part) % 2 for part in parts]
        flat = np.zeros(sum(sizes), np.int64)
        for part, at in zip(parts, _starts(np.array(sizes)).tolist(), strict=False):
            flat[at : at + len(part)] = part
        sent = async_tensor_h2d(flat, device=self._runner.device).split(sizes)
        longest = int(layout.lengths[layout.further].max(initial=1))
        return Rows(longest, *(each[: len(part)] for each, part in zip(sent, parts, strict=True)))

    def _as_rows(self, layout: PathLayout, rows: Rows, batch: InputBatch) -> InputBatch:
        """Return a step as attention sees it, in the runner's own memory."""
        buffers, count = self._runner.input_buffers, len(layout.owners)
        padded = max(batch.num_reqs_after_padding, count)
        upper = np.zeros(padded, np.int32)
        upper[:count] = batch.seq_lens_cpu_upper_bound.numpy()[layout.owners] - layout.shorter
        starts = np.full(padded + 1, batch.num_tokens, np.int32)
        starts[: count + 1] = _starts(layout.lengths)
        return replace(
            batch,
            req_ids=[batch.req_ids[owner] for owner in layout.owners],
            num_reqs=count,
            num_reqs_after_padding=padded,
            idx_mapping=batch.idx_mapping[rows.owners],
            idx_mapping_np=batch.idx_mapping_np[layout.owners],
            num_scheduled_tokens=layout.lengths.astype(np.int32),
            query_start_loc=buffers.query_start_loc[: padded + 1],
            query_start_loc_np=starts,
            seq_lens=buffers.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.from_numpy(upper),
            is_prefilling_np=batch.is_prefilling_np[layout.owners],
        )

    def _prepare_attn(self, prepare: Callable[..., Prepared], batch: InputBatch) -> Prepared:
        """Put scratch blocks into the rows of further paths, and have their tokens' KV written there."""
        step = self._step
        if step is None or step.batch is not batch:
            return prepare(batch)
        tables, slots = prepare(step.attention)
        further = len(step.rows.further)
        if further:
            (table,) = tables
            scratch = self._scratch[:further]
            step.blocks = self._ops.attend(step.rows, batch.positions, table, slots[0], scratch)
            self._ops.copy_before(step.rows, step.blocks)
        return tables, slots

    def _attend(
        self, prepare: Callable[..., object], batch: InputBatch, *args: object, **kwargs: object
    ) -> object:
        step = self._step
        seen = step.attention if step is not None and step.batch is batch else batch
        return prepare(seen, *args, **kwargs)

    # --- after sampling ------------------------------------------------------------------

    def paths(self, batch: InputBatch) -> InputBatch | None:
        """Return the paths of a step's drafts as if each were a request; None if none has several."""
        step = self._step
        return step.paths if step is not None and step.batch is batch else None

    def keep_winners(self, sampled: torch.Tensor, logprobs: torch.Tensor, gained: torch.Tensor) -> Kept:
        """Keep of what the `paths` of a step sampled each request's best, and its KV."""
        step = self._step
        assert step is not None  # noqa: S101 - `paths` has it
        winners, kept = self._ops.choose(step.rows, sampled, logprobs, gained)
        if step.blocks is not None:
            self._ops.copy_after(step.rows, step.blocks, winners, gained)
        return kept


def _wrap(owner: object, name: str, ours: Callable[..., object]) -> None:
    """Have calls of a method come to `ours`, which gets the method first."""
    theirs = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: ours(theirs, *args, **kwargs))


def _starts(sizes: Ints) -> Ints:
    """Return where parts of these sizes begin, and where the last one ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
