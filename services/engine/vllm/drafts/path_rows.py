"""Verifies several draft paths of a request in one step, by a row for each: a worker's side.

A flat draft (`common/policy/draft_paths.py`) is split before vLLM sees it: the request's own row keeps
the first path, every other path becomes a sibling, a row that lives for this step alone. It reads the
request's KV blocks and writes into scratch blocks. All rows draw the same tokens where they say the
same, since noise depends on key and position; the row that went furthest wins.

Invariants (tests/e2e/test_draft_paths.py asserts them):
- siblings are never seen outside `execute_model` and sampling: not by the scheduler, proposer or pool;
- rows of a step are never more than vLLM's batch holds, nor their tokens more than were scheduled;
- when the step ends, the request's own blocks hold the KV of the tokens it got: a winner's scratch
  blocks are copied back as whole blocks (CPU layouts cannot be addressed by token);
- where rows disagree on a token, by last bits of arithmetic, the request's own row counts;
- all ranks hold equal logits, rows and scratch blocks, so they choose alike without talking.
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
    """A path's row `name` beside its request's; `blocks` stand in for the request's from `first` on."""

    name: str
    request: str
    path: list[int]
    computed: int
    first: int
    blocks: list[int]


class PathRows:
    """Puts itself around a model runner. `scratch` are KV blocks that the scheduler never gives out."""

    def __init__(self, runner: GPUModelRunner, scratch: list[int]) -> None:
        self.counters: Counter[str] = Counter()
        self._runner = runner
        self._scratch = scratch
        self._block_size: int = runner.cache_config.block_size
        self._siblings: list[PathRow] = []
        self._execute_model, runner.execute_model = runner.execute_model, self._execute
        self._update_states, runner._update_states = runner._update_states, self._update

    # --- before the forward pass ---------------------------------------------------------

    def _execute(self, scheduled: SchedulerOutput, *args: object, **kwargs: object) -> object:
        drafts = scheduled.scheduled_spec_decode_tokens
        flat = {request: paths for request in drafts if len(paths := split(drafts[request])) > 1}
        return self._execute_model(self._split(scheduled, flat) if flat else scheduled, *args, **kwargs)

    def _split(self, scheduled: SchedulerOutput, flat: dict[str, list[list[int]]]) -> SchedulerOutput:
        """Return a copy with a request per path: the scheduler goes on to use its own."""
        tokens = dict(scheduled.num_scheduled_tokens)
        drafts = dict(scheduled.scheduled_spec_decode_tokens)
        copies = list(scheduled.kv_cache_block_copies or ())
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scratch, rows = iter(self._scratch), iter(range(self._runner.max_num_reqs - len(tokens)))
        for request, (first, *others) in flat.items():
            drafts[request], tokens[request] = first, 1 + len(first)
            for place, path in enumerate(others):
                sibling = self._sibling(f"{request}/{place}", request, path, computed[request], scratch, rows)
                if sibling is None:
                    self.counters["dropped"] += 1
                    continue
                self._siblings.append(sibling)
                drafts[sibling.name], tokens[sibling.name] = path, 1 + len(path)
                if sibling.computed % self._block_size:
                    copies.append(KVCacheBlockCopy(self._blocks(request)[sibling.first], sibling.blocks[0]))
        extra = len(self._siblings)
        self.counters["siblings"] += extra
        return replace(
            scheduled,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts,
            kv_cache_block_copies=copies,
            scheduled_cached_reqs=replace(
                cached,
                req_ids=cached.req_ids + [sibling.name for sibling in self._siblings],
                new_block_ids=cached.new_block_ids + [None] * extra,
                num_computed_tokens=cached.num_computed_tokens + [s.computed for s in self._siblings],
                num_output_tokens=cached.num_output_tokens + [0] * extra,
            ),
        )

    def _sibling(
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
        for sibling in self._siblings:
            row, own = batch.req_id_to_index[sibling.name], batch.req_id_to_index[sibling.request]
            length = batch.num_tokens_no_spec[row] = batch.num_tokens_no_spec[own]
            batch.num_prompt_tokens[row] = batch.num_prompt_tokens[own]
            batch.token_ids_cpu[row, :length] = batch.token_ids_cpu[own, :length]
            batch.token_ids_cpu[row, length : length + len(sibling.path)] = sibling.path
        return after

    # --- after sampling ------------------------------------------------------------------

    def settle(
        self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Keep each request's best row, and its KV; take the siblings out of the batch.

        `tokens` and `logprobs` are [rows, most drafts + 1], with tokens of -1 from the first wrong
        draft on; returned are those of the batch without siblings, row by row.
        """
        if not self._siblings:
            return tokens, logprobs
        batch = self._runner.input_batch
        row_of = dict(batch.req_id_to_index)
        source = self._winners(tokens, row_of)
        for sibling in self._siblings:
            batch.remove_request(sibling.name)
            del self._runner.requests[sibling.name]
        self._siblings = []
        batch.condense()
        batch.refresh_metadata()
        before = [row_of[request] for request in batch.req_ids]
        unfinished = self._runner.discard_request_mask.np
        unfinished[: len(before)] = unfinished[before]
        rows = [source.get(row, row) for row in before]
        return tokens[rows], logprobs[rows]

    def _winners(self, tokens: npt.NDArray[np.int32], row_of: dict[str, int]) -> dict[int, int]:
        """Return the winning row of each request whose own did not win, with its KV brought home."""
        said = (tokens >= 0).sum(axis=1)
        winners: dict[int, PathRow] = {}
        torn: set[int] = set()
        for sibling in self._siblings:
            row, own = row_of[sibling.name], row_of[sibling.request]
            best = row_of[winners[own].name] if own in winners else own
            shared = min(said[row], said[best])
            if (tokens[row, :shared] != tokens[best, :shared]).any():
                torn.add(own)
            elif said[row] > said[best]:
                winners[own] = sibling
        self.counters["torn"] += len(torn)
        kept = {own: sibling for own, sibling in winners.items() if own not in torn}
        self._bring_home([(sibling, int(said[row_of[sibling.name]])) for sibling in kept.values()])
        self.counters["won"] += len(kept)
        return {own: row_of[sibling.name] for own, sibling in kept.items()}

    def _bring_home(self, winners: list[tuple[PathRow, int]]) -> None:
        """Copy the scratch blocks of siblings that said so many tokens over their requests' own."""
        copies = []
        for sibling, said in winners:
            # The last token said has no KV yet.
            last = (sibling.computed + said - 1) // self._block_size
            own = self._blocks(sibling.request)[sibling.first : last + 1]
            copies += [KVCacheBlockCopy(*pair) for pair in zip(sibling.blocks, own, strict=False)]
        runner = self._runner
        copy_kv_cache_blocks_inplace(runner.kv_caches, runner.kv_cache_config.num_blocks, copies)
