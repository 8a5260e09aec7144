"""Verifies several draft paths of a request in one step of vLLM's model runner V2. Runs in workers.

To V2, a flat draft is one chain; nothing of what it counts changes. Attention alone sees a row for each path
(`path_layout`): on the request's full blocks, and for a further path on scratch blocks in the place of those that
it writes to. All rows sample the same tokens after the same context, since noise depends on key and position; the
path with the most accepted drafts wins.

Invariants (tests/e2e/test_draft_paths.py asserts them):
- the rows of a step are never more than vLLM's batch holds, and they have the tokens that were scheduled;
- nothing here waits for the device: where a path begins is known there alone if steps are scheduled ahead;
- when the step ends, the request's own blocks hold the KV of its tokens: a winner's scratch blocks are copied back
  as whole blocks (CPU layouts cannot be addressed by token);
- where paths sample different tokens, because of rounding, the request's first one counts;
- all ranks hold equal logits, rows and scratch blocks, so they choose alike without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from seer.services.engine.vllm.drafts.path_layout import PathLayout, lay_out, separators

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch

Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens and logprobs [requests, most drafts of a path + 1], and how many of them count [requests]."""


@dataclass(slots=True)
class _Sent:
    """What of a layout is on the device."""

    owners: torch.Tensor
    shorter: torch.Tensor
    shift: torch.Tensor
    further: torch.Tensor
    firsts: torch.Tensor
    choices: torch.Tensor
    starts: torch.Tensor
    tokens: torch.Tensor
    path_of: torch.Tensor
    bounds: torch.Tensor


@dataclass(slots=True)
class _Step:
    """A step with several paths: `rows` is its batch as attention sees it, `paths` as rows of logits.

    `begins` [further paths]: positions at which they begin; `own` [further paths, blocks]: the request's blocks that
    scratch blocks stand for.
    """

    layout: PathLayout
    sent: _Sent
    batch: InputBatch
    rows: InputBatch
    paths: InputBatch
    begins: torch.Tensor
    own: torch.Tensor


class DevicePaths:
    """Wraps a runner of V2. `scratch`: KV blocks that the scheduler never gives out, for paths of `max_draft` tokens.

    `captures`: slots of the requests that verify one path.
    """

    def __init__(self, runner: Any, scratch: Sequence[int], each: int, captures: Collection[int]) -> None:  # noqa: ANN401 - V2's runner
        """`each`: scratch blocks of a path."""
        self._runner = runner
        most = len(scratch) // each
        self._scratch = torch.tensor(scratch[: most * each], dtype=torch.int32, device=runner.device).view(most, each)
        self._captures = captures
        self._block_size: int = runner.block_tables.block_sizes[0]
        self._layout: PathLayout | None = None
        self._step: _Step | None = None
        self._rows = self._dropped = 0
        self._decided = torch.zeros(2, dtype=torch.int64, device=runner.device)  # won, and conflicts
        self._wrap(runner, "gather_batch_req_state", self._gather)
        self._wrap(runner, "prepare_inputs", self._prepare_inputs)
        self._wrap(runner, "prepare_attn", self._prepare_attn)
        self._wrap(runner.model_state, "prepare_attn", self._attend)
        self._wrap(runner.cudagraph_manager, "dispatch", self._dispatch)

    @staticmethod
    def _wrap(owner: object, name: str, ours: Callable[..., object]) -> None:
        theirs = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: ours(theirs, *args, **kwargs))

    @property
    def counters(self) -> dict[str, int]:
        """Path `rows` that ran or `won`, paths `dropped` without one, `conflicts`; this waits for the device."""
        won, conflicts = self._decided.tolist()
        return {"rows": self._rows, "dropped": self._dropped, "won": won, "conflicts": conflicts}

    # --- before the forward pass ---------------------------------------------------------

    def _gather(
        self, gather: Callable[..., tuple[Any, int | None]], scheduled: SchedulerOutput, dummy_run: bool
    ) -> tuple[Any, int | None]:
        """Lay out the rows of a step whose drafts have several paths."""
        self._layout = self._step = None
        state, uniform = gather(scheduled, dummy_run)
        drafts = scheduled.scheduled_spec_decode_tokens
        if state is None or not drafts:
            return state, uniform
        places = separators(drafts, state.req_ids)
        if not places:
            return state, uniform
        alone = {i for i in places if int(state.idx_mapping_np[i]) in self._captures}
        room = min(len(self._scratch), self._runner.max_num_reqs - len(state.req_ids))
        logits = (state.num_draft_tokens_np + 1).tolist()
        layout = lay_out(state.num_scheduled_tokens.tolist(), logits, places, alone, room)
        self._layout, self._dropped = layout, self._dropped + layout.dropped
        self._rows += len(layout.further)
        if len(layout.further):
            longest = int(layout.lengths.max())
            alike = state.decode_graph_eligible and bool((layout.lengths == longest).all())
            uniform = longest if alike else None
        return state, uniform

    def _dispatch(
        self, dispatch: Callable[..., object], num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any
    ) -> object:
        """Choose a graph for all rows."""
        if self._layout is not None:
            num_reqs = len(self._layout.owners)
            if kwargs.get("max_query_len") is not None:
                kwargs["max_query_len"] = int(self._layout.lengths.max())
        return dispatch(num_reqs, num_tokens, *args, **kwargs)

    def _prepare_inputs(self, prepare: Callable[..., InputBatch], *args: object, **kwargs: object) -> InputBatch:
        """Have further paths begin where their requests' drafts do."""
        batch = prepare(*args, **kwargs)
        layout = self._layout
        if layout is None:
            return batch
        sent = self._send(layout, batch)
        # Attention, and graphs of it, read the runner's own memory; the rest of a step reads these copies.
        batch.query_start_loc, batch.seq_lens = batch.query_start_loc.clone(), batch.seq_lens.clone()
        batch.positions[: batch.num_tokens] -= sent.shift
        if len(layout.further):
            first = batch.logits_indices[batch.cu_num_logits[sent.owners[sent.further]].long()]
            batch.input_ids[sent.bounds[sent.further]] = batch.input_ids[first]
        batch.expanded_local_pos = batch.expanded_local_pos - sent.shift[batch.logits_indices].to(torch.int32)
        rows = self._rows_of(layout, sent, batch)
        counts = layout.drafts.astype(np.int32)
        paths = replace(
            batch, num_reqs=len(counts), num_draft_tokens_per_req=counts, cu_num_logits=sent.starts.to(torch.int32),
            cu_num_logits_np=_starts(layout.drafts + 1).astype(np.int32),
        )  # fmt: skip
        begins = batch.positions[rows.query_start_loc.long()[sent.further]]
        self._step = _Step(layout, sent, batch, rows, paths, begins, begins)
        return batch

    def _send(self, layout: PathLayout, batch: InputBatch) -> _Sent:
        bounds = np.full(self._runner.max_num_reqs + 1, batch.num_tokens, np.int64)
        bounds[: len(layout.owners) + 1] = _starts(layout.lengths)
        lengths = layout.lengths[layout.further]
        begins = bounds[layout.further]
        tokens = np.repeat(begins - _starts(lengths)[:-1], lengths) + np.arange(lengths.sum())
        parts = (
            layout.owners, layout.shorter, layout.shift, layout.further, layout.firsts, layout.choices,
            _starts(layout.drafts + 1), tokens, np.repeat(np.arange(len(lengths)), lengths), bounds,
        )  # fmt: skip
        sent = async_tensor_h2d(np.concatenate(parts), device=self._runner.device)
        return _Sent(*sent.split([len(part) for part in parts]))

    def _rows_of(self, layout: PathLayout, sent: _Sent, batch: InputBatch) -> InputBatch:
        """Return a step as attention sees it, in the runner's own memory."""
        buffers, count = self._runner.input_buffers, len(layout.owners)
        padded = max(batch.num_reqs_after_padding, count)
        buffers.query_start_loc.copy_(sent.bounds)
        buffers.seq_lens.zero_()
        buffers.seq_lens[:count] = batch.seq_lens[sent.owners] - sent.shorter
        upper = np.zeros(padded, np.int32)
        upper[:count] = batch.seq_lens_cpu_upper_bound.numpy()[layout.owners] - layout.shorter
        starts = np.full(padded + 1, batch.num_tokens, np.int32)
        starts[: count + 1] = _starts(layout.lengths)
        return replace(
            batch,
            req_ids=[batch.req_ids[owner] for owner in layout.owners],
            num_reqs=count,
            num_reqs_after_padding=padded,
            idx_mapping=batch.idx_mapping[sent.owners],
            idx_mapping_np=batch.idx_mapping_np[layout.owners],
            num_scheduled_tokens=layout.lengths.astype(np.int32),
            query_start_loc=buffers.query_start_loc[: padded + 1],
            query_start_loc_np=starts,
            seq_lens=buffers.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.from_numpy(upper),
            is_prefilling_np=batch.is_prefilling_np[layout.owners],
        )

    def _prepare_attn(
        self, prepare: Callable[..., tuple[tuple[torch.Tensor, ...], torch.Tensor]], batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Put scratch blocks into the rows of further paths, and have their tokens' KV written there."""
        step = self._step
        if step is None or step.batch is not batch:
            return prepare(batch)
        tables, slots = prepare(step.rows)
        if not len(step.layout.further):
            return tables, slots
        (table,), size, sent = tables, self._block_size, step.sent
        scratch = self._scratch[: len(step.layout.further)]
        first, width = step.begins // size, scratch.shape[1]
        rows = table[sent.further]
        last = rows.shape[1] - 1
        blocks = first[:, None] + torch.arange(width, device=first.device)
        step.own = rows.gather(1, blocks.clamp(max=last)).long()
        place = torch.arange(last + 1, device=first.device) - first[:, None]
        replaced = scratch.gather(1, place.clamp(0, width - 1))
        table[sent.further] = torch.where((place >= 0) & (place < width), replaced, rows)
        at = step.batch.positions[sent.tokens]
        written = scratch[sent.path_of, at // size - first[sent.path_of]].long()
        slots[0, sent.tokens] = written * size + at % size
        self._copy_before(step.own[:, 0], scratch[:, 0].long(), step.begins % size > 0)
        return tables, slots

    def _attend(self, prepare: Callable[..., object], batch: InputBatch, *args: object, **kwargs: object) -> object:
        step = self._step
        return prepare(step.rows if step is not None and step.batch is batch else batch, *args, **kwargs)

    # --- after sampling ------------------------------------------------------------------

    def paths(self, batch: InputBatch) -> InputBatch | None:
        """Return the paths of a step's drafts as requests with rows of logits; None if there is one of each."""
        step = self._step
        return step.paths if step is not None and step.batch is batch else None

    def keep_winners(self, sampled: torch.Tensor, logprobs: torch.Tensor, gained: torch.Tensor) -> Kept:
        """Keep of what the `paths` of a step sampled each request's best, and its KV."""
        step = self._step
        assert step is not None  # noqa: S101 - `paths` has it
        sent = step.sent
        best, torn = winners(sampled, gained, sent.firsts, sent.choices, int(step.layout.choices.max()))
        if len(step.layout.further):
            self._decided += torch.stack(((best != sent.firsts).sum(), torn.sum()))
            # The path that a further row has: those of a request follow its first one.
            owners = sent.owners[sent.further]
            firsts_of_rows = torch.searchsorted(sent.owners, owners)
            path = sent.firsts[owners] + sent.further - firsts_of_rows
            scratch = self._scratch[: len(path)].long()
            # The last token has no KV yet.
            last = (step.begins + gained[path] - 1) // self._block_size - step.begins // self._block_size
            there = torch.arange(scratch.shape[1], device=last.device) <= last[:, None]
            won = (best[owners] == path)[:, None] & there
            self._copy_after(scratch.reshape(-1), step.own.reshape(-1), won.reshape(-1))
        return sampled[best], logprobs[best], gained[best]

    def _copy_before(self, *blocks: torch.Tensor) -> None:
        """Have scratch blocks begin with what their requests' partly filled ones have."""
        self._copy(*blocks)

    def _copy_after(self, *blocks: torch.Tensor) -> None:
        """Move winners' KV."""
        self._copy(*blocks)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor) -> None:
        """Copy those blocks of KV that are `wanted`, in all layers."""
        runner = self._runner
        if source.device.type == "cpu":
            source, target = source[wanted], target[wanted]
            if not len(source):
                return
        else:
            target = torch.where(wanted, target, source)  # the device alone knows which: others stay
        copy_blocks(runner.kv_caches, runner.kv_cache_config.num_blocks, source, target)


def copy_blocks(caches: Sequence[torch.Tensor], count: int, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy blocks of KV in all layers, each of `count` blocks."""
    seen = set()
    for cache in caches:
        if cache.data_ptr() not in seen:  # layers may share one
            seen.add(cache.data_ptr())
            blocks = cache.unflatten(0, (count, len(cache) // count))
            blocks[target] = blocks[source]


def winners(
    sampled: torch.Tensor, gained: torch.Tensor, firsts: torch.Tensor, choices: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each request's best path [requests], and whether paths contradict each other.

    Request i has the `choices[i]` paths from `firsts[i]` on, `most` at most; `sampled` [paths, width] and `gained`
    [paths] are what each path draws. The first of equally long ones wins, and the first of all if they disagree.
    """
    best, torn = firsts, torch.zeros_like(firsts, dtype=torch.bool)
    places = torch.arange(sampled.shape[1], device=sampled.device)
    for place in range(1, most):
        path = firsts + (choices - 1).clamp(max=place)
        shared = torch.minimum(gained[path], gained[best])
        differ = ((sampled[path] != sampled[best]) & (places < shared[:, None])).any(dim=1)
        torn = torn | differ
        best = torch.where(~differ & (gained[path] > gained[best]), path, best)
    return torch.where(torn, firsts, best), torn


def _starts(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where parts of these sizes begin, and where the last one ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
