"""Verifies several draft paths of a request in one step: each has a row of vLLM's batch. Runs in workers.

A flat draft (`common/policy/draft_paths.py`) is split before vLLM sees it: the request's own row keeps the
first path; every other path becomes a row of its own, a path row, which exists for this step only. It reads
the request's KV blocks and writes into scratch blocks. All rows sample the same tokens after the same
context, since noise depends on key and position; the row with the most accepted drafts wins.

Invariants (tests/e2e/test_draft_paths.py asserts them):
- path rows are visible only to `execute_model` and sampling, not to the scheduler, the proposer or the pool;
- the rows of a step are never more than vLLM's batch holds, nor their tokens more than were scheduled;
- when the step ends, the request's own blocks hold the KV of its tokens: a winner's scratch blocks are
  copied back as whole blocks (CPU layouts cannot be addressed by token);
- where rows sample different tokens, because of rounding, the request's own row counts;
- all ranks hold equal logits, rows and scratch blocks, so they choose alike without communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from seer.common.policy.draft_paths import split
from seer.services.engine.vllm.requests import EXTRA

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@dataclass(frozen=True, slots=True)
class PathRow:
    """The row of one path of `request`; `blocks` replace the request's own from block `first` on."""

    name: str
    request: str
    path: list[int]
    computed: int
    first: int
    blocks: list[int]


class PathRows:
    """Wraps a model runner. `scratch`: KV blocks that the scheduler never gives out.

    `counters`: path `rows` that ran or `won`, paths `dropped` without one, `conflicts` between rows.
    """

    def __init__(self, runner: GPUModelRunner, scratch: list[int]) -> None:
        self.counters: Counter[str] = Counter()
        self._runner = runner
        self._scratch = scratch
        self._block_size: int = runner.cache_config.block_size
        self._path_rows: list[PathRow] = []
        self._execute_model, runner.execute_model = runner.execute_model, self._execute
        self._update_states, runner._update_states = runner._update_states, self._update

    # --- before the forward pass ---------------------------------------------------------

    def _execute(self, scheduled: SchedulerOutput, *args: object, **kwargs: object) -> object:
        drafts = scheduled.scheduled_spec_decode_tokens
        flat = {request: paths for request in drafts if len(paths := split(drafts[request])) > 1}
        return self._execute_model(self._split(scheduled, flat) if flat else scheduled, *args, **kwargs)

    def _split(self, scheduled: SchedulerOutput, flat: dict[str, list[list[int]]]) -> SchedulerOutput:
        """Return a copy with a request for each path; the scheduler's own object stays as it is."""
        tokens = dict(scheduled.num_scheduled_tokens)
        drafts = dict(scheduled.scheduled_spec_decode_tokens)
        copies = list(scheduled.kv_cache_block_copies or ())
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scratch, rows = iter(self._scratch), iter(range(self._runner.max_num_reqs - len(tokens)))
        for request, (first, *others) in flat.items():
            drafts[request], tokens[request] = first, 1 + len(first)
            for place, path in enumerate(others):
                path_row = self._path_row(
                    f"{request}/{place}", request, path, computed[request], scratch, rows
                )
                if path_row is None:
                    self.counters["dropped"] += 1
                    continue
                self._path_rows.append(path_row)
                drafts[path_row.name], tokens[path_row.name] = path, 1 + len(path)
                if path_row.computed % self._block_size:
                    copies.append(KVCacheBlockCopy(self._blocks(request)[path_row.first], path_row.blocks[0]))
        extra = len(self._path_rows)
        self.counters["rows"] += extra
        return replace(
            scheduled,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts,
            kv_cache_block_copies=copies,
            scheduled_cached_reqs=replace(
                cached,
                req_ids=cached.req_ids + [path_row.name for path_row in self._path_rows],
                new_block_ids=cached.new_block_ids + [None] * extra,
                num_computed_tokens=cached.num_computed_tokens + [s.computed for s in self._path_rows],
                num_output_tokens=cached.num_output_tokens + [0] * extra,
            ),
        )

    def _path_row(
        self,
        name: str,
        request: str,
        path: list[int],
        computed: int,
        scratch: Iterator[int],
        rows: Iterator[int],
    ) -> PathRow | None:
        """Make a path's request known to the runner; None where rows or scratch blocks have run out."""
        state = self._runner.requests[request]
        first = computed // self._block_size
        needed = (computed + len(path)) // self._block_size - first + 1
        blocks = [block for block, _ in zip(scratch, range(needed), strict=False)]
        # Captured logits are kept as rows are drawn, so a request that asks for them has one row.
        asks = state.sampling_params.extra_args[EXTRA].capture
        if asks or len(blocks) < needed or next(rows, None) is None:
            return None
        # Its tokens are put into its row in `_update`: through lists they would cost a millisecond.
        self._runner.requests[name] = CachedRequestState(
            req_id=name,
            prompt_token_ids=[],
            mm_features=[],
            sampling_params=state.sampling_params,
            generator=None,
            block_ids=([*self._blocks(request)[:first], *blocks],),
            num_computed_tokens=computed,
            output_token_ids=[],
        )
        return PathRow(name, request, path, computed, first, blocks)

    def _blocks(self, request: str) -> list[int]:
        blocks: list[int] = self._runner.requests[request].block_ids[0]
        return blocks

    def _update(self, scheduled: SchedulerOutput) -> object:
        after = self._update_states(scheduled)
        batch = self._runner.input_batch
        for path_row in self._path_rows:
            row, own = batch.req_id_to_index[path_row.name], batch.req_id_to_index[path_row.request]
            length = batch.num_tokens_no_spec[row] = batch.num_tokens_no_spec[own]
            batch.num_prompt_tokens[row] = batch.num_prompt_tokens[own]
            batch.token_ids_cpu[row, :length] = batch.token_ids_cpu[own, :length]
            batch.token_ids_cpu[row, length : length + len(path_row.path)] = path_row.path
        return after

    # --- after sampling ------------------------------------------------------------------

    def keep_winners(
        self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Keep each request's best row and its KV; remove the path rows from the batch.

        `tokens` and `logprobs` are [rows, most drafts + 1], with tokens of -1 after the first rejected
        draft; returns those of the batch without path rows.
        """
        if not self._path_rows:
            return tokens, logprobs
        batch = self._runner.input_batch
        row_of = dict(batch.req_id_to_index)
        source = self._winners(tokens, row_of)
        for path_row in self._path_rows:
            batch.remove_request(path_row.name)
            del self._runner.requests[path_row.name]
        self._path_rows = []
        batch.condense()
        batch.refresh_metadata()
        before = [row_of[request] for request in batch.req_ids]
        unfinished = self._runner.discard_request_mask.np
        unfinished[: len(before)] = unfinished[before]
        rows = [source.get(row, row) for row in before]
        return tokens[rows], logprobs[rows]

    def _winners(self, tokens: npt.NDArray[np.int32], row_of: dict[str, int]) -> dict[int, int]:
        """Return the winning row of each request whose own did not win; its KV is copied to the request's."""
        generated = (tokens >= 0).sum(axis=1)
        winners: dict[int, PathRow] = {}
        conflicts: set[int] = set()
        for path_row in self._path_rows:
            row, own = row_of[path_row.name], row_of[path_row.request]
            best = row_of[winners[own].name] if own in winners else own
            shared = min(generated[row], generated[best])
            if (tokens[row, :shared] != tokens[best, :shared]).any():
                conflicts.add(own)
            elif generated[row] > generated[best]:
                winners[own] = path_row
        self.counters["conflicts"] += len(conflicts)
        kept = {own: path_row for own, path_row in winners.items() if own not in conflicts}
        self._copy_back([(path_row, int(generated[row_of[path_row.name]])) for path_row in kept.values()])
        self.counters["won"] += len(kept)
        return {own: row_of[path_row.name] for own, path_row in kept.items()}

    def _copy_back(self, winners: list[tuple[PathRow, int]]) -> None:
        """Copy winners' scratch blocks over their requests' own; with each its number of new tokens."""
        copies = []
        for path_row, generated in winners:
            # The last token has no KV yet.
            last = (path_row.computed + generated - 1) // self._block_size
            own = self._blocks(path_row.request)[path_row.first : last + 1]
            copies += [KVCacheBlockCopy(*pair) for pair in zip(path_row.blocks, own, strict=False)]
        runner = self._runner
        copy_kv_cache_blocks_inplace(runner.kv_caches, runner.kv_cache_config.num_blocks, copies)
