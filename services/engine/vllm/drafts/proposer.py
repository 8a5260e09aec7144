"""Drafts in a vLLM worker: a suffix tree per group, fed by the rows that run here and by the dgds.

Invariants (tests/unit/test_draft_proposer.py asserts them):
- a draft never goes beyond its chunk's limit, so it needs no KV block that the chunk has not reserved;
- nothing is drafted after a stop id: it would never count; nor are placeholders of images, which tools'
  answers have and models do not generate;
- no error here fails a step: what a tree refuses costs drafts only, and is counted;
- only the rank whose drafts vLLM's scheduler reads makes any;
- while it is switched off it makes none, and what responses say meanwhile is in the trees afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from seer import _native
from seer.common.policy.draft_budget import Choice, DraftBudget
from seer.services.engine.vllm.drafts.draft_script import DraftScript
from seer.services.engine.vllm.drafts.path_selector import PathSelector
from seer.services.engine.vllm.requests import EXTRA, ExtraArgs

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from seer.services.dgds.client import StreamDelta

TREE_BYTES = 2**30
"""Most memory of one tree; a full one takes no more tokens."""

COMMON_TOKENS = 4_000_000
"""Most tokens of the common tree, 70 MB; it is then rebuilt from what runs."""


class GroupProposer:
    """vLLM's `custom_class` proposer; `bind` gives it what vLLM does not pass to the constructor."""

    def __init__(self, vllm_config: object) -> None:
        self.counters: Counter[str] = Counter()
        self.seconds = 0.0
        self._trees: dict[str, _native.GroupTree] = {}
        self._common: _native.GroupTree | None = None
        self._ids: list[str] = []
        self._ids_known = False  # whether rows refer to the trees that there are
        self._extras: list[ExtraArgs] = []
        self._of_row: list[_native.GroupTree] = []
        self._stops: list[frozenset[int]] = []
        self._is_stop = np.zeros(1, bool)  # of any row; ids beyond its end are as the last, which is none
        self._placeholder = _placeholder(vllm_config)
        self._runner: GPUModelRunner | None = None
        self._choice: Choice | None = None
        self._on = True
        self.path_selector = PathSelector(0)
        self.script: DraftScript | None = None
        self.budget: DraftBudget | None = None

    def load_model(self, model: object) -> None:
        """Do nothing: there is no draft model."""

    def bind(self, runner: GPUModelRunner, max_draft: int, path_selector: PathSelector) -> None:
        """Begin to draft, at most `max_draft` tokens a request, for the rows of this runner."""
        self._runner = runner
        self.path_selector = path_selector
        rows = runner.max_num_reqs
        self._rows = np.arange(rows, dtype=np.int32)
        self._prompts = np.zeros(rows, np.int32)
        self._ends = np.zeros(rows, np.int32)  # a draft ends before: the last token is sampled
        self._appended = np.zeros(rows, np.int32)
        self._indexes = np.zeros(rows, np.int64)
        self._names = np.zeros(rows, np.int64)
        self._slots = np.zeros(rows, np.intp)
        self._drafts = np.zeros((rows, max_draft), np.int32)
        self._scores = np.zeros((rows, max_draft), np.float32)
        self._parents = np.zeros((rows, max_draft), np.int32)
        self._counts = np.zeros(rows, np.int32)

    # --- trees ---------------------------------------------------------------------------

    def open(self, group: str, prompt: Sequence[int]) -> None:
        """Create a group's tree, if there is none."""
        if group not in self._trees:
            self._trees[group] = _native.GroupTree(prompt, TREE_BYTES)

    def use_common_tree(self, enabled: bool) -> None:
        """Use, or do not use, one tree of all groups for drafts where a group's own tree has worse ones."""
        self._common = _native.GroupTree((), TREE_BYTES) if enabled else None
        self._ids, self._choice = [], None

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """Add tokens of other responses to the trees; those of unknown groups are ignored."""
        for delta in deltas:
            tree = self._trees.get(delta.group_id)
            if tree is None:
                continue
            try:
                tree.append(delta.index, delta.previous, delta.tokens)
                self.counters["fed"] += len(delta.tokens)
            except ValueError:  # the tree is full, or there is a gap after something it refused
                self.counters["refused"] += 1

    def forget(self, groups: Iterable[str]) -> None:
        """Drop the trees of groups that no longer run here."""
        gone = set(groups)
        for group in gone:
            self._trees.pop(group, None)
            if self.budget is not None:
                self.budget.forget(group)
        if self._choice is not None:
            for row, extra in enumerate(self._extras):
                if extra.group in gone:
                    self._choice.keep[row] = 0  # its slot of the budget may be another group's by then
        self._ids_known = False

    # --- drafts --------------------------------------------------------------------------

    @property
    def drafts(self) -> bool:
        """Whether drafts are made: it is switched on, or a script says what to draft."""
        return self._on or self.script is not None

    def set_budget(self, budget: DraftBudget, max_paths: int) -> None:
        """Draft from trees from now on, as many tokens as this budget chooses, on so many paths at most."""
        self.budget, self.seconds = budget, 0.0  # without what was drafted to measure
        self.path_selector.most_paths = max_paths

    def switch(self, on: bool) -> None:
        """Make drafts from the next step on, or make none."""
        self._on = on
        self._choice = None  # its drafts may be verified in a step that this proposer does not see

    def learn_ended(self, ended: Iterable[str]) -> None:
        """Add to the trees what requests have said that end while drafts are off; the others' comes later."""
        runner = self._runner
        for state in () if runner is None else filter(None, map(runner.requests.get, ended)):
            extra: ExtraArgs = state.sampling_params.extra_args[EXTRA]
            output = [*(state.prompt_token_ids or ()), *state.output_token_ids][extra.prompt_len :]
            try:
                if (tree := self._tree(extra.group)) is not _NO_TREE:
                    tree.append(extra.index, 0, output)
                    if self._common is not None:
                        self._common.append(_name(extra), 0, output)
            except ValueError:  # the tree is full
                self.counters["refused"] += 1

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a draft per row, empty for rows of unfinished prefills, which sampled nothing."""
        if self._runner is None or not self.drafts:  # not the rank that drafts, or vLLM padded a draft
            return [[] for _ in sampled_token_ids]
        begun = perf_counter()
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except ValueError:  # from an append: the next step appends every row's whole output again
            self._ids, self._choice = [], None
            self.counters["refused"] += 1
            return [[] for _ in sampled_token_ids]
        finally:
            self.seconds += perf_counter() - begun

    def _propose(
        self,
        sampled: list[list[int]],
        all_lengths: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
    ) -> list[list[int]]:
        runner, n = self._runner, len(sampled)
        lengths = all_lengths[:n]
        assert runner is not None  # noqa: S101 - asked before
        ids = runner.input_batch.req_ids
        if self._choice is not None:
            self._learn(self._choice, sampled, ids)
        if ids != self._ids or not self._ids_known:
            self._set_rows(ids, runner.requests)
        if self.script is not None:
            return self._scripted(self.script, sampled, lengths)
        indexes, names, unfinished = self._indexes[:n], self._names[:n], not all(sampled)
        most = self._ends[:n] - lengths
        np.maximum(most, 0, out=most)  # np.clip takes longer than both
        np.minimum(most, self._drafts.shape[1], out=most)
        if self.budget is None or not self.budget.should_draft():
            most[:] = 0
        if unfinished:
            empty = np.array([not row for row in sampled])
            most[empty] = 0
            indexes = np.where(empty, -1, indexes)
            names = np.where(empty, -1, names)
        if self.budget is not None:
            self.budget.context = int(lengths.sum()) / max(n, 1)  # mean() takes 20 us more
        forked = self.budget is not None and self.path_selector.wanted(n)
        _native.draft_batch(
            self._of_row, indexes, self._rows[:n], tokens, self._prompts, all_lengths, self._appended[:n],
            most, self._drafts[:n], self._counts[:n], self._parents[:n], self._scores[:n],
            top_k=self.path_selector.most_paths if forked else 1, common=self._common, common_ids=names,
        )  # fmt: skip
        self._cut_after_stops(n)
        learnt = lengths - self._prompts[:n]
        self._appended[:n] = np.where(indexes >= 0, learnt, self._appended[:n]) if unfinished else learnt
        if self.budget is None or not np.count_nonzero(self._counts[:n]):
            return [[] for _ in sampled]
        if forked:
            self.path_selector.split_first_paths(
                self._drafts[:n], self._scores[:n], self._parents[:n], self._counts[:n]
            )
        choice = self.budget.choose(self._slots[:n], self._scores[:n], self._counts[:n], n, self._high)
        self._choice = choice
        if forked:
            return self.path_selector.flatten(ids, self.budget, choice, most, self._high)
        return _native.draft_lists(self._drafts[:n], choice.keep)

    def _cut_after_stops(self, n: int) -> None:
        """Take placeholders, and what follows a stop id, out of the drafted trees of the first `n` rows."""
        found = self._is_stop.take(self._drafts[:n], mode="clip")
        if not np.count_nonzero(found):  # any() by rows takes longer than all else here
            return
        for row in np.flatnonzero(found.any(axis=1)).tolist():
            count = int(self._counts[row])
            tokens, parents = self._drafts[row, :count].tolist(), self._parents[row, :count].tolist()
            kept: dict[int, int] = {}  # old places to new ones; parents come before their children
            for place, parent in enumerate(parents):
                goes_on = parent < 0 or (parent in kept and tokens[parent] not in self._stops[row])
                if goes_on and tokens[place] != self._placeholder:
                    kept[place] = len(kept)
            places = list(kept)
            self._counts[row] = count = len(kept)
            self._drafts[row, :count] = self._drafts[row, places]
            self._scores[row, :count] = self._scores[row, places]
            self._parents[row, :count] = [kept.get(parents[place], -1) for place in places]

    def _learn(self, choice: Choice, sampled: list[list[int]], ids: list[str]) -> None:
        """Tell the budget how many drafts of its last choice, for the rows `_ids`, were accepted."""
        self._choice = None
        if ids != self._ids:
            tokens = dict(zip(ids, sampled, strict=True))
            sampled = [tokens.get(request, []) for request in self._ids]
        if self.budget is not None:
            self.budget.learn(choice, self.path_selector.accepted(self._ids, sampled))

    def take_acceptance(self, group: str) -> tuple[list[int], list[int]]:
        """Return how many drafts of a group were verified and accepted since the last call, by cell."""
        return ([], []) if self.budget is None else self.budget.take_learned(group)

    def _scripted(
        self, script: DraftScript, sampled: list[list[int]], lengths: npt.NDArray[np.int32]
    ) -> list[list[int]]:
        n = len(sampled)
        most = np.minimum(self._ends[:n] - lengths, self._drafts.shape[1])
        rows = zip(self._extras, sampled, lengths.tolist(), most.tolist(), strict=True)
        return [script.draft(extra, length, room) if new else [] for extra, new, length, room in rows]

    def _set_rows(self, ids: list[str], requests: Mapping[str, CachedRequestState]) -> None:
        """Look up the requests of the rows, which changed."""
        if self._common is not None and self._common.tokens > COMMON_TOKENS:
            self.use_common_tree(True)
        before = self._ids if self._ids_known else []
        appended = zip(self._of_row, self._appended.tolist(), strict=False)
        known = dict(zip(self._ids, appended, strict=False))
        for row, request_id in enumerate(ids):
            if row < len(before) and before[row] == request_id:
                continue
            params = requests[request_id].sampling_params
            extra: ExtraArgs = params.extra_args[EXTRA]
            tree = self._tree(extra.group)
            here = slice(row, row + 1)  # behind the end it appends
            self._extras[here], self._of_row[here] = [extra], [tree]
            self._stops[here] = [frozenset(params.stop_token_ids or ())]
            self._prompts[row] = extra.prompt_len
            self._ends[row] = extra.limit - 1
            learns = tree is not _NO_TREE and tree.bytes < TREE_BYTES
            self._indexes[row] = extra.index if learns else -1
            # The same for all chunks of a response, so that the common tree knows its earlier output.
            self._names[row] = _name(extra) if extra.group else -1
            # Output is appended from its start in a new row, as an earlier attempt may have had other tokens,
            # and to a new tree.
            of, length = known.get(request_id, (None, 0))
            self._appended[row] = length if of is tree else 0
            if self.budget is not None:
                told = () if request_id in known else extra.acceptance
                self._slots[row] = self.budget.slot(extra.group, told)
        del self._extras[len(ids) :], self._of_row[len(ids) :], self._stops[len(ids) :]
        stops = [token for token in frozenset({self._placeholder}).union(*self._stops) if token >= 0]
        self._is_stop = np.zeros(max(stops, default=-1) + 2, bool)
        self._is_stop[stops] = True
        high = np.array([extra.probe for extra in self._extras])
        self._high = high if high.any() else None
        self._ids, self._ids_known = list(ids), True

    def _tree(self, group: str) -> _native.GroupTree:
        return self._trees.get(group, _NO_TREE)


def _placeholder(vllm_config: object) -> int:
    """Return the token id that stands for images in a model's prompts; -1: it has none."""
    model = getattr(vllm_config, "model_config", None)
    return int(getattr(getattr(model, "hf_config", None), "image_token_id", None) or -1)


_POSITIVE = 2**63 - 1


def _name(extra: ExtraArgs) -> int:
    """Return the name of a response in the common tree."""
    return hash((extra.group, extra.index)) & _POSITIVE


_NO_TREE = _native.GroupTree()
"""Tree of requests without a group: it stays empty, so they get no drafts."""
