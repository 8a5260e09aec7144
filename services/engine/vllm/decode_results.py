"""The results half of `DecodeScheduler`: what vLLM's `update_from_output` does for requests with new tokens.

Invariants:
- a request's tokens, end, hashes, freed and cached blocks, and what is told of it, are vLLM's own: by its own
  calls wherever they may do something;
- a step goes this way only if all of its requests are usual ones that run, or are gone; else vLLM's own;
- all else of a step (loads and saves of KV, events) is vLLM's own call, as if nobody had had a token.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from seer.services.engine.vllm.decode_rows import Row, by_request, fits, is_usual

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request

_NO_ROWS = SchedulerOutput.make_empty()
_RUNNING = RequestStatus.RUNNING


class DecodeResults(Scheduler):  # type: ignore[misc]
    """See the module's docstring. `short_updates` counts the steps that did not go vLLM's own way.

    `draft_length`, to be set before a step is scheduled ahead: how many drafts the worker makes after it for
    each request. `verified`: the drafts by request, or their placeholders, that were in the step whose
    results came last; `prefilled`: how many tokens of prompts that step computed. `last_blocks`: of the
    requests that are in it, the blocks that they had at their ends, of the group of layers `kept_group`.
    """

    ahead = False
    """Whether a step begins before the last one's tokens are known."""

    running: list[Request]

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(*arguments, **named)
        self._fits = fits(self)
        self._managers = self.kv_cache_manager.coordinator.single_type_managers
        self._rows: dict[str, Row] = {}
        self.short_updates = 0
        self.draft_length: int = self.num_spec_tokens
        self.verified: dict[str, list[int]] = {}
        self.prefilled = 0
        self.kept_group = 0
        self.last_blocks: dict[str, list[int]] = {}

    def _row(self, request: Request) -> Row | None:
        row = self._rows.get(request.request_id)
        if row is None and is_usual(request):
            row = self._rows[request.request_id] = Row(request, self.max_model_len)
        return row

    def _free_request_blocks(self, request: Request) -> None:
        self._rows.pop(request.request_id, None)
        if request.request_id in self.last_blocks:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)
            self.last_blocks[request.request_id] = blocks[self.kept_group]
        super()._free_request_blocks(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM's."""
        self.verified, rows = scheduler_output.scheduled_spec_decode_tokens, None
        one_each = len(scheduler_output.num_scheduled_tokens) + sum(map(len, self.verified.values()))
        self.prefilled = scheduler_output.total_num_scheduled_tokens - one_each
        if self._is_plain(model_runner_output):
            rows = self._rows_of(scheduler_output)
        if rows is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[no-any-return]
        self.short_updates += 1
        if self.defer_block_free and scheduler_output.total_num_scheduled_tokens:
            self.processed_step_seq += 1
            self._drain_deferred_frees()
        outputs = self._take(rows, scheduler_output, model_runner_output)
        super().update_from_output(_NO_ROWS, model_runner_output)
        return {client: EngineCoreOutputs(outputs=each) for client, each in outputs.items()}

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """See vLLM's."""
        names, drafts = [], []
        for name, made in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=False):
            row = self._rows.get(name)
            if row is None or row.request.is_prefill_chunk or row.request.status is not _RUNNING:
                names.append(name)
                drafts.append(made)
            else:
                row.request.spec_token_ids = made
        if names:
            super().update_draft_token_ids(DraftTokenIds(names, drafts))

    def _is_plain(self, produced: ModelRunnerOutput) -> bool:
        """Say whether a step has produced tokens and logprobs alone."""
        if produced.num_nans_in_logits:
            self._fits = False  # vLLM counts them, and keeps the numbers in requests
        loads = produced.kv_connector_output
        return bool(self._fits and produced.sampled_token_ids) and not (
            produced.prompt_logprobs_dict
            or produced.prompt_token_id_logprobs_dict
            or produced.pooler_output
            or produced.ec_connector_output
            or (loads is not None and (loads.failed_recving or loads.invalid_block_ids))
            or self.grammar_compile_error_reqs
            or self.encoder_cache_mismatch_reqs
        )

    def _rows_of(self, scheduled: SchedulerOutput) -> list[Row | None] | None:
        """Return the rows of a step's requests, None for those that are gone; None if some are not usual."""
        rows: list[Row | None] = []
        for name in scheduled.num_scheduled_tokens:
            row = self._rows.get(name)
            if row is None:
                request = self.requests.get(name)
                if request is None:
                    rows.append(None)
                    continue
                row = self._row(request)
                if row is None:
                    return None
            if row.request.status is not _RUNNING or row.request.num_stale_output_tokens:
                return None
            rows.append(row)
        return rows

    def _take(
        self, rows: list[Row | None], scheduled: SchedulerOutput, produced: ModelRunnerOutput
    ) -> dict[int, list[EngineCoreOutput]]:
        """Give the rows their tokens, end those that are done, and return what is told of each, by client."""
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        sampled, places, logprobs = produced.sampled_token_ids, produced.req_id_to_index, produced.logprobs
        slices = by_request(logprobs, sampled) if logprobs is not None else []
        drafts = scheduled.scheduled_spec_decode_tokens
        ended: set[Request] = set()
        for row, (name, size) in zip(rows, scheduled.num_scheduled_tokens.items(), strict=True):
            if row is None:
                continue
            request, place = row.request, places[name]
            new = sampled[place]
            request.num_in_flight_tokens -= size
            if new and name in drafts:
                self._reject(request, len(drafts[name]) + 1 - len(new))
            if row.images:
                self._free_encoder_inputs(request)
            if not new:  # a part of a prompt
                continue
            length, stopped = len(row.tokens) + len(new), False
            if length < row.end and row.stops.isdisjoint(new):
                row.output.extend(new)
                row.tokens.extend(new)
                if length >= row.hash_at:
                    request.update_block_hashes()
                    row.hash_at = (len(request.block_hashes) + 1) * self.hash_block_size
                self._settle(row, len(new))
            else:
                new, stopped = self._update_request_with_output(request, new)
            found = None
            if row.logprobs and logprobs is not None:
                found = logprobs.slice_request(place, len(new)) if stopped else slices[place]
            if stopped or request.prefill_stats is not None:
                output = self._first_or_last(request, new, found, ended if stopped else None)
            else:
                output = EngineCoreOutput(name, new, found)
            outputs[row.client].append(output)
        if ended:
            self.running = remove_all(self.running, ended)
        return outputs

    def _reject(self, request: Request, wrong: int) -> None:
        """Do what vLLM does as so many drafts of a request turn out to be wrong."""
        if request.num_computed_tokens > 0:
            request.num_computed_tokens -= wrong
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= wrong

    def _settle(self, row: Row, tokens: int) -> None:
        """Do what vLLM does as so many tokens become known of a request that goes on."""

    def _first_or_last(
        self, request: Request, new: list[int], logprobs: LogprobsLists | None, ended: set[Request] | None
    ) -> EngineCoreOutput:
        """Return what is told of a request's first or last tokens; with the last, it joins `ended`."""
        stats, output = request.take_prefill_stats(), EngineCoreOutput(request.request_id, new, logprobs)
        if stats is not None:
            stats.finalize(self.kv_cache_manager.estimate_cached_tokens(request))
            output.prefill_stats = stats
        if ended is not None:
            ended.add(request)
            output.finish_reason, output.stop_reason = request.get_finished_reason(), request.stop_reason
            kept, output.ec_transfer_params = self._free_request(request)
            if stats is not None and kept is not None and kept.get("do_remote_prefill"):
                kept["remote_prefill_cached_tokens"] = stats.num_cached_tokens
            output.kv_transfer_params = kept
        return output
