"""Drafts in vLLM's model runner V2, in the place of its `speculator` and of its `draft_tokens_handler`.

vLLM has no name for a speculator of one's own: engines configure `ngram_gpu`, whose place `stand_in` takes.
One step at a time, each request's draft has the length that pays, and goes through the scheduler. With steps
scheduled ahead the engine chooses one length before anything is drawn, and drafts stay on the device.

Invariants:
- all ranks verify the same drafts: the first rank makes the drafts; other ranks get the drafts from the
  scheduler, or from the first rank as it makes them;
- scheduled ahead, nothing here waits for the device, but with a script;
- while drafts are switched off none are made; the trees get the tokens of that time afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tp_group
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from seer import _native
from seer.common.policy.draft_budget import Choice, DraftBudget
from seer.common.policy.draft_paths import SEPARATOR, paths_in, split
from seer.services.engine.vllm.drafts.draft_gate import DraftGate, StepMemory
from seer.services.engine.vllm.drafts.draft_script import DraftScript
from seer.services.engine.vllm.drafts.path_selector import PathSelector
from seer.services.engine.vllm.drafts.tree_drafter import TreeDrafter, placeholder_of
from seer.services.engine.vllm.requests import EXTRA, ExtraArgs

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from seer.services.dgds.client import StreamDelta
    from seer.services.engine.vllm.slot_sampler import SlotSampler

Ints = npt.NDArray[np.int32]


class HeadDrafts(NamedTuple):
    """A trained head's drafts of n requests: `tokens` and `scores` [n, k], of which `counts` [n] are some.

    A score is the head's own probability of a token and all before it.
    """

    tokens: Ints
    scores: npt.NDArray[np.float32]
    counts: Ints


def stand_in() -> None:
    """Have every V2 runner that is made from now on draft by `TreeSpeculator`; it must draft by n-grams."""
    from seer.services.engine.vllm.drafts.head_speculator import speculator_of

    model_runner.init_speculator = speculator_of


class TreeSpeculator(BaseSpeculator):  # type: ignore[misc]
    """See the module's docstring. `attach` gives it the runner.

    `budget` chooses lengths one step at a time; None: none are worth it. `seconds` is what drafting took.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, config: VllmConfig, device: torch.device, states: RequestState) -> None:
        rows, self._most = config.scheduler_config.max_num_seqs, config.num_speculative_tokens
        self._ahead = bool(config.scheduler_config.async_scheduling)
        self._states, self._device = states, device
        self.trees = TreeDrafter(rows, placeholder_of(config))
        self.script: DraftScript | None = None
        self.budget: DraftBudget | None = None
        self.path_selector = PathSelector(0)
        self._gate = DraftGate(self.trees.steps, device, rows, self._most + 1)
        self._drafts = torch.zeros_like(states.draft_tokens)
        self._made: DraftTokenIds | None = None
        self._drafts_now, self._always = True, False
        self._behind = False  # whether steps were taken that the trees have not seen
        self._choice: tuple[Choice, npt.NDArray[np.intp], npt.NDArray[np.int64]] | None = None
        self._budget_slots = np.zeros(rows, np.intp)
        self._probes = np.zeros(rows, bool)
        self._attached = False
        self._sampler: SlotSampler | None = None  # None: not the rank that drafts
        self._seconds = 0.0

    def attach(self, runner: Any, sampler: SlotSampler) -> None:  # noqa: ANN401 - V2's runner
        """Take the place of what hands drafts on, and see requests come and go."""
        runner.draft_tokens_handler, self._attached = self, True
        self._update_requests, runner.update_requests = runner.update_requests, self._update
        if get_tp_group().is_first_rank:
            self._sampler = sampler
            self._add_requests, runner.add_requests = runner.add_requests, self._add
            self._finish_requests, runner.finish_requests = runner.finish_requests, self._finish

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Do nothing: there is no draft model."""

    def capture(self) -> None:
        """Do nothing: there is no draft model."""

    # --- what the engine asks for ---------------------------------------------------------

    def open(self, group: str, prompt: Sequence[int]) -> None:
        """See `TreeDrafter.open`."""
        if self._sampler is not None:
            self.trees.open(group, prompt)

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """See `TreeDrafter.feed`."""
        if self._sampler is not None:
            self.trees.feed(deltas)

    def stall(self, seconds: float) -> None:
        """See `StepDrafter.stall`."""
        self.trees.steps.stall(seconds)

    def use_common_tree(self, enabled: bool) -> None:
        """See `TreeDrafter.use_common_tree`."""
        if self._sampler is not None:
            self.trees.use_common_tree(enabled)

    @property
    def seconds(self) -> float:
        """What drafting took since `set_budget`: of the engine's thread, or of the device."""
        return self.trees.steps.seconds - self._seconds

    def set_budget(self, budget: DraftBudget, max_paths: int) -> None:
        """Draft from trees from now on, as many tokens as this budget chooses, on so many paths at most."""
        self.budget, self._seconds = budget, self.trees.steps.seconds
        self.path_selector.most_paths = max_paths

    def switch(self, on: bool, always: bool = False) -> None:
        """Make drafts from the next step on, or make none; scheduled ahead, the length says it.

        `always`: by a head, too, whatever that brings.
        """
        self._drafts_now, self._always = on, always
        self._choice = None  # its drafts may be verified in a step that is not seen here

    def forget(self, groups: Iterable[str]) -> None:
        """Drop the trees of groups that no longer run here."""
        gone = set(groups)
        self._choice = None  # a group's slot of the budget may be another's by then
        self.trees.forget(gone)
        if self.budget is not None:
            for group in gone:
                self.budget.forget(group)

    def take_acceptance(self, group: str) -> tuple[list[int], list[int]]:
        """Return how many drafts of a group were verified and accepted since the last call, by cell."""
        return ([], []) if self.budget is None else self.budget.take_learned(group)

    # --- requests ------------------------------------------------------------------------

    def _add(self, scheduled: SchedulerOutput) -> None:
        self._add_requests(scheduled)
        for new in scheduled.scheduled_new_reqs:
            slot = self._states.req_id_to_index[new.req_id]
            self._set(slot, np.asarray(new.prefill_token_ids, np.int32))

    def _finish(self, scheduled: SchedulerOutput) -> None:
        """Let requests go. What they said while drafts were off is learnt before."""
        for request_id in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            slot = self._states.req_id_to_index.get(request_id)
            if slot is not None and self.trees.extras[slot] is not None:
                if self._behind:
                    self._set(slot, self._tokens(slot))
                self.trees.clear(slot)
        self._finish_requests(scheduled)

    def _set(self, slot: int, tokens: Ints) -> None:
        assert self._sampler is not None  # noqa: S101 - only the rank that drafts comes here
        params = self._sampler.params[slot]
        extra: ExtraArgs = (params.extra_args or {})[EXTRA]
        known = self.trees.extras[slot] is extra
        self._probes[slot] = extra.probe
        self.trees.set(slot, extra, params.stop_token_ids or (), tokens)
        if self.budget is not None:
            self._budget_slots[slot] = self.budget.slot(extra.group, () if known else extra.acceptance)

    def _tokens(self, slot: int, new: int = 0) -> Ints:
        """Return all tokens of a request but the `new` last ones; on a GPU this waits for the device."""
        length = int(self._states.total_len.gpu[slot]) - new
        tokens: Ints = self._states.all_token_ids.gpu[slot, :length].cpu().numpy()
        return tokens

    # --- steps ---------------------------------------------------------------------------

    def propose(
        self, input_batch: InputBatch, attn_metadata: object, slot_mappings: object,
        last_hidden_states: object, aux_hidden_states: object, num_sampled: torch.Tensor, *_: object,
        num_speculative_tokens: int = 0, dummy_run: bool = False, **__: object,
    ) -> torch.Tensor:  # fmt: skip
        """Draft for the requests of a step. Return what is verified next if that is scheduled ahead."""
        self._made = None
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run or not self._attached:  # vLLM warms up with requests of its own
            return drafts
        if self._ahead:
            self._draft_ahead(input_batch, num_sampled, num_speculative_tokens, drafts)
        elif self._sampler is not None:
            if self._drafts_now or self.script is not None:
                self._made = DraftTokenIds(input_batch.req_ids, self._draft_each(input_batch, num_sampled))
            else:
                self._behind = True
        return drafts

    def _draft_ahead(
        self, batch: InputBatch, num_sampled: torch.Tensor, k: int, drafts: torch.Tensor
    ) -> None:
        """Write `k` entries a request to the first columns of `drafts`, on all ranks."""
        made = None
        if self._sampler is not None:
            paths = paths_in(k)
            memory = self._run(batch, num_sampled, k, paths)
            if k:
                made = self._better(self._gate.on_device(memory), memory)
            if k and self.script is not None:
                made = self._padded(self._scripted(self.script, batch, num_sampled, k), made, paths)
        if not k:
            return
        if get_tp_group().world_size > 1:
            if made is None:
                made = torch.empty((batch.num_reqs, k), dtype=torch.int32, device=self._device)
            made = get_tp_group().broadcast(made, src=0)
        drafts[:, :k] = made

    def _run(
        self, batch: InputBatch, num_sampled: torch.Tensor, k: int, paths: int = 1, *, tree: bool = False
    ) -> StepMemory:
        assert self._sampler is not None  # noqa: S101 - asked before
        slots, sampled = batch.idx_mapping_np.astype(np.int32), self._sampler.sampled
        return self._gate.draft(slots, self.trees.generations[slots], sampled, num_sampled, k, paths, tree)

    def _better(self, drafts: torch.Tensor, memory: StepMemory) -> torch.Tensor:
        """Return these drafts of trees, int32 [n, k], or a head's where its scores are better."""
        return drafts

    def _draft_each(self, batch: InputBatch, num_sampled: torch.Tensor) -> list[list[int]]:
        """Return each request's draft, one step at a time: what the device drew can be read."""
        slots, drawn = batch.idx_mapping_np, num_sampled.cpu().numpy()
        self._learn(slots, drawn)
        if self._behind:
            self._behind = False
            new = dict(zip(slots.tolist(), drawn.tolist(), strict=True))
            for slot, extra in enumerate(self.trees.extras):
                if extra is not None:
                    self._set(slot, self._tokens(slot, new.get(slot, 0)))
        drafts_now = self.script is not None or (self.budget is not None and self.budget.should_draft())
        forks = drafts_now and self.script is None and self.path_selector.wanted(len(slots))
        paths = self.path_selector.most_paths if forks else 1
        memory = self._run(batch, num_sampled, self._most if drafts_now else 0, paths, tree=forks)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self.script is not None:
            return self._scripted(self.script, batch, num_sampled, self._most)
        lengths = self._states.total_len.gpu[torch.from_numpy(slots)].tolist()
        head = self._head_drafts(slots, lengths, drawn) if drafts_now else None
        if self.budget is None or (head is None and not np.count_nonzero(memory.counts)):
            return [[] for _ in slots]
        return self._choose(self.budget, slots, lengths, memory, head, forks=forks)

    def _head_drafts(
        self, slots: npt.NDArray[np.intp], lengths: Sequence[int], drawn: Ints
    ) -> HeadDrafts | None:
        """Return what a trained head drafts for requests of such lengths that `drawn`; None: nothing."""
        return None

    def _choose(
        self, budget: DraftBudget, slots: npt.NDArray[np.intp], lengths: Sequence[int], memory: StepMemory,
        head: HeadDrafts | None, *, forks: bool,
    ) -> list[list[int]]:  # fmt: skip
        """Return what of the drafts pays; with `forks` they are trees, of which several paths may."""
        names = slots.tolist()
        budget.context = sum(lengths) / len(slots)
        high = self._probes[slots]
        drafts, probes, selector = memory.drafts.numpy(), high if high.any() else None, self.path_selector
        if forks:
            selector.split_first_paths(drafts, memory.scores, memory.parents, memory.counts)
        rated = None if head is None else (head.scores, head.counts)
        choice = budget.choose(
            self._budget_slots[slots], memory.scores, memory.counts, len(slots), probes, rated
        )
        if head is not None and choice.by_head is not None:
            drafts[choice.by_head, : head.tokens.shape[1]] = head.tokens[choice.by_head]
        self._choice = choice, slots, self.trees.generations[slots]
        if not forks:
            return _native.draft_lists(drafts, choice.keep)
        most = np.array(list(map(self._room, names, lengths)), np.int32)
        return selector.flatten(names, budget, choice, most, probes)

    def _learn(self, slots: npt.NDArray[np.intp], drawn: Ints) -> None:
        """Tell the budget how many drafts of its last choice, of each first path, were accepted."""
        last, self._choice = self._choice, None
        if last is None or self.budget is None or self._sampler is None:
            return
        choice, chosen, generations = last
        accepted = np.full(len(self.trees.generations), -1, np.int32)
        accepted[slots] = drawn - 1
        if self.path_selector.has_others:
            sampled = self._sampler.sampled.tolist()
            rows = [row[:new] for row, new in zip(sampled, drawn.tolist(), strict=True)]
            accepted[slots] = self.path_selector.accepted(slots.tolist(), rows)
        stays = self.trees.generations[chosen] == generations
        self.budget.learn(choice, np.where(stays, accepted[chosen], -1).astype(np.int32))

    def _scripted(
        self, script: DraftScript, batch: InputBatch, num_sampled: torch.Tensor, most: int
    ) -> list[list[int]]:
        """Return what a script says, at most so many tokens each; this waits for the device."""
        lengths, drawn = self._states.total_len.gpu[batch.idx_mapping].tolist(), num_sampled.tolist()
        found = []
        for slot, length, new in zip(batch.idx_mapping_np.tolist(), lengths, drawn, strict=True):
            extra, room = self.trees.extras[slot], min(self._room(slot, length), most) if new else 0
            found.append(script.draft(extra, length, room) if extra is not None and room > 0 else [])
        return found

    def _room(self, slot: int, length: int) -> int:
        """Return how many entries the draft of a request of so many tokens may have."""
        extra = self.trees.extras[slot]
        return max(0, min(extra.limit - 1 - length, self._most)) if extra is not None else 0

    def _padded(self, drafts: list[list[int]], others: torch.Tensor, paths: int) -> torch.Tensor:
        """Return drafts as rows of a table, whose paths go on with the tokens of another one."""
        table = others.cpu().numpy().copy()
        each = (table.shape[1] + 1) // paths
        for row, draft in zip(table, drafts, strict=True):
            for place, path in enumerate(split(draft)[:paths]):
                row[place * each :][: len(path)] = path
        return torch.from_numpy(table).to(self._device)

    def _update(self, scheduled: SchedulerOutput) -> None:
        """Write the drafts that the scheduler has to the device, where V2 reads them."""
        self._update_requests(scheduled)
        drafts = scheduled.scheduled_spec_decode_tokens
        if not drafts or self._ahead:
            return
        slots = np.fromiter(map(self._states.req_id_to_index.__getitem__, drafts), np.intp, len(drafts))
        counts = np.fromiter(map(len, drafts.values()), np.intp, len(drafts))
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = np.fromiter(chain.from_iterable(drafts.values()), np.int64, len(places))
        tokens[tokens == SEPARATOR] = 0  # its place is for the token before the draft: see `device_paths`
        at = torch.from_numpy(np.repeat(slots, counts)), torch.from_numpy(places)
        self._states.draft_tokens[at] = torch.from_numpy(tokens).to(self._device)

    def set_draft_tokens(self, input_batch: InputBatch, draft_tokens: torch.Tensor) -> None:
        """Do nothing: `propose` has what the scheduler gets."""

    def get_draft_tokens(self) -> DraftTokenIds | None:
        """Return the drafts of the last step; None if it made none."""
        return self._made
