"""vLLM's scheduler, which schedules requests that only decode together, not one by one.

vLLM looks at all that a request may need, in each step: blocks, images, hashes, ends. For one that decodes,
most of this does nothing. Here those that run first in vLLM's order, up to one that does not decode, get
their next tokens together; the rest of the step is vLLM's own, as if their seats and tokens were not there.

Invariants (tests/property/test_decode_scheduler.py runs this beside vLLM's own):
- each step has the outputs, and leaves the state, that vLLM's own scheduler would give it and leave;
- nothing changes before it is certain that these requests get what vLLM would give them, else all is vLLM's;
- blocks are given, freed and cached by vLLM's own calls, in its order. A call is left out only where it would
  do nothing.
"""

from __future__ import annotations

from itertools import chain, compress, count
from operator import add, attrgetter, ge, gt
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from seer.common.policy.draft_paths import placeholders
from seer.services.engine.vllm.decode_results import DecodeResults
from seer.services.engine.vllm.decode_rows import Batch, Row, Step, cached_until, most_tokens, quiet_until

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_computed = attrgetter("num_computed_tokens")
_drafts = attrgetter("spec_token_ids")
_placeholders = attrgetter("num_output_placeholders")


class DecodeScheduler(DecodeResults):
    """See the module's docstring. `short_schedules` counts the steps in which somebody was taken out."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(*arguments, **named)
        self._windows = any(type(each) is not FullAttentionManager for each in self._managers)
        self._leading: Batch | None = None
        self._step: Step | None = None  # while vLLM schedules the rest
        self.short_schedules = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """See vLLM's."""
        step = None if throttle_prefills else self._decode_step()
        if step is None or step.taken < len(self.running):
            self._leading = None  # of what vLLM does with the others, nothing is known
        if step is None:
            return super().schedule(throttle_prefills)
        self.short_schedules += 1
        self._allocate(step)
        running, taken, tokens = self.running, step.taken, sum(step.sizes)
        self._step, self.running = step, running[taken:]
        self.max_num_active_reqs -= taken
        self.max_num_scheduled_tokens -= tokens
        try:
            return super().schedule()
        finally:
            running[taken:] = self.running
            self._step, self.running = None, running
            self.max_num_active_reqs += taken
            self.max_num_scheduled_tokens += tokens

    def _decode_step(self) -> Step | None:
        """Return the next step of as many requests as need no more than it; None if vLLM must see all."""
        if not self._fits or self._pause_state is not PauseState.UNPAUSED:
            return None
        if self.num_spec_tokens and self.dynamic_sd_lookup is None:
            waiting = chain(self.waiting, self.kv_holding_waiting)
            if any(request.num_tokens == 1 for request in waiting):
                return None  # vLLM pads it with drafts if somebody runs
        leading = self._leading_rows()
        step = self._step_of(leading)
        fitting = self._fitting(step)
        if fitting < len(step.batch.rows):
            others = leading.rows.index(step.batch.rows[fitting])
            step = self._step_of(Batch.of(leading.rows[:others]))
        if self.policy == SchedulingPolicy.PRIORITY and step.taken < len(self.running):
            return None  # the others may preempt them
        return step if step.batch.rows else None

    def _leading_rows(self) -> Batch:
        """Return those that run first in vLLM's order and decode."""
        if self._leading is None or self._leading.requests != self.running:
            rows: list[Row] = []
            for request in self.running:
                row = self._row(request)
                if row is None or not row.decodes:
                    break
                rows.append(row)
            self._leading = Batch.of(rows)
        return self._leading

    def _step_of(self, leading: Batch) -> Step:
        """Return the step in which these requests get their next token, except who has all of them then."""
        batch, known = leading, list(map(len, leading.tokens))
        if self.ahead and any(map(ge, known, batch.lasts)):
            rows = [row for row in batch.rows if not row.is_over]
            batch, known = Batch.of(rows), [len(row.tokens) for row in rows]
        begun = list(map(add, known, map(_placeholders, batch.requests))) if self.ahead else known
        computed, drafts = list(map(_computed, batch.requests)), list(map(_drafts, batch.requests))
        sizes, ends = [1] * len(known), begun
        if any(drafts):
            sizes = [1 + len(each) for each in drafts]
            ends = list(map(add, computed, sizes))
        growing = list(compress(count(), map(gt, ends, batch.quiet)))
        filling = list(compress(count(), map(gt, known, batch.cached)))
        return Step(batch, len(leading.rows), known, begun, computed, ends, sizes, drafts, growing, filling)

    def _fitting(self, step: Step) -> int:
        """Return how many requests, from the first on, get all that a step needs, and nobody is preempted."""
        names = step.batch.names
        if (
            step.computed == [begun - 1 for begun in step.begun]
            and max(step.ends, default=0) < self.max_model_len
            and sum(step.sizes) <= self.max_num_scheduled_tokens
        ):
            fitting = len(names)
        else:
            fitting = self._decoding(step)
        missing, free = 0, self.kv_cache_manager.block_pool.get_num_free_blocks()
        for place in step.growing:
            slots = step.ends[place] + self.num_lookahead_tokens
            for manager in self._managers:
                held = len(manager.req_to_blocks.get(names[place], ()))
                missing += max(0, -(-slots // manager.block_size) - held)
            if missing > free:
                return min(place, fitting)
        return fitting

    def _decoding(self, step: Step) -> int:
        """Return how many requests, from the first on, need one token and drafts, in the step's budget."""
        tokens = 0
        for place, size in enumerate(step.sizes):
            tokens += size
            if (
                step.computed[place] != step.begun[place] - 1
                or step.ends[place] >= self.max_model_len
                or tokens > self.max_num_scheduled_tokens
            ):
                return place
        return len(step.sizes)

    def _allocate(self, step: Step) -> None:
        """Have vLLM give, free and cache blocks for those for whom it may do something."""
        batch, growing, filling = step.batch, set(step.growing), set(step.filling)
        step.new_blocks = [None] * len(batch.rows)
        for place in sorted(growing | filling):
            row = batch.rows[place]
            if place in growing:
                step.new_blocks[place] = self._grow(row.request, step.sizes[place], step.ends[place])
                row.quiet = quiet_until(self._managers, row.request, self.num_lookahead_tokens)
                batch.quiet[place] = row.quiet
            if place in filling:
                self.kv_cache_manager.cache_blocks(row.request, step.known[place])
                batch.cached[place] = row.cached = cached_until(self._managers, row.request)

    def _grow(self, request: Request, size: int, end: int) -> tuple[list[int], ...] | None:
        """Have blocks given for so many new tokens, up to `end`; return the ids of new ones, if any."""
        lookahead = self.num_lookahead_tokens
        if self._windows:
            blocks = self.kv_cache_manager.allocate_slots(request, size, num_lookahead_tokens=lookahead)
            return blocks.get_block_ids(allow_none=True)  # type: ignore[no-any-return]
        # All that `allocate_slots` does then, where there is room and blocks are cached by themselves.
        slots = min(end + lookahead, self.max_model_len)
        groups = self.kv_cache_manager.coordinator.allocate_new_blocks(request.request_id, slots, end)
        return tuple([block.block_id for block in blocks] for blocks in groups) if any(groups) else None

    # --- what vLLM calls while it schedules the rest -------------------------------------

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        if self._step is not None:
            self._merge(self._step, scheduler_output)
            scheduler_output.kv_connector_block_state.req_ids.update(self._step.batch.names)
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _merge(self, step: Step, output: SchedulerOutput) -> None:
        """Put a step before what vLLM has scheduled beside it."""
        batch, cached, step.rest = step.batch, output.scheduled_cached_reqs, output.num_scheduled_tokens
        rows = zip(step.computed, batch.prompts, strict=True)
        cached.req_ids = batch.names + cached.req_ids
        cached.new_block_ids = step.new_blocks + cached.new_block_ids
        cached.num_computed_tokens = step.computed + cached.num_computed_tokens
        cached.num_output_tokens = [done + 1 - prompt for done, prompt in rows] + cached.num_output_tokens
        output.num_scheduled_tokens = dict(zip(batch.names, step.sizes, strict=True)) | step.rest
        output.total_num_scheduled_tokens += sum(step.sizes)
        drafts = {name: each for name, each in zip(batch.names, step.drafts, strict=True) if each}
        output.scheduled_spec_decode_tokens = drafts | output.scheduled_spec_decode_tokens
        if self.dynamic_sd_lookup is not None:
            output.num_spec_tokens_to_schedule = self.dynamic_sd_lookup[len(output.num_scheduled_tokens)]

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        step = self._step
        if step is None:
            super()._update_after_schedule(scheduler_output)
            return
        if step.rest is None:
            self._merge(step, scheduler_output)
        if self.defer_block_free and not step.rest:  # else vLLM has counted this step
            self.sched_step_seq += 1
        merged, scheduler_output.num_scheduled_tokens = scheduler_output.num_scheduled_tokens, step.rest
        super()._update_after_schedule(scheduler_output)
        scheduler_output.num_scheduled_tokens = merged
        self._advance(step)

    def _advance(self, step: Step) -> None:
        """Do for a step's requests what `_update_after_schedule` does for the rest."""
        for request, end, size in zip(step.batch.requests, step.ends, step.sizes, strict=True):
            request.num_computed_tokens = end
            request.num_in_flight_tokens += size
        for request in compress(step.batch.requests, step.drafts):
            request.spec_token_ids = []
        if self.defer_block_free:
            for request in step.batch.requests:
                request.last_sched_seq = self.sched_step_seq


class DraftsAhead(AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler ahead, with as many drafts as `draft_length` says, and none beyond a request's limit.

    A request's drafts end where all of its tokens but the last, which is never computed, have their KV. The
    step after that, begun before it is known which drafts are right, computes one token more at most.
    A request with a grammar drafts nothing: its masks are made from tokens that the host knows.
    """

    draft_length: int
    requests: dict[str, Request]

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        scheduler_output.num_spec_tokens_to_schedule = self.draft_length
        super()._update_after_schedule(scheduler_output)
        drafts = placeholders(self.draft_length)
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            if request.use_structured_output:
                request.spec_token_ids = []
            elif request.spec_token_ids:
                room = most_tokens(request, self.max_model_len) - 2 - request.num_computed_tokens
                request.spec_token_ids = drafts if room >= len(drafts) else drafts[: max(0, room)]


class AsyncDecodeScheduler(DecodeScheduler, DraftsAhead):
    """The same for steps that begin before the last one's tokens are known. Drafts are placeholders, -1."""

    ahead = True

    def _advance(self, step: Step) -> None:
        super()._advance(step)
        length, following = self.draft_length, self.current_step + self.decode_stagger
        drafts = placeholders(length)
        for row, end, size in zip(step.batch.rows, step.ends, step.sizes, strict=True):
            request, room = row.request, row.end - 2 - end
            request.num_output_placeholders += size
            request.spec_token_ids = drafts if room >= length else drafts[: max(0, room)]
            request.next_decode_eligible_step = following

    def _settle(self, row: Row, tokens: int) -> None:
        request = row.request
        request.num_output_placeholders -= tokens
        settled = request.num_computed_tokens - request.num_output_placeholders
        if settled > row.cached:
            self.kv_cache_manager.cache_blocks(request, settled)
            row.cached = cached_until(self._managers, request)
