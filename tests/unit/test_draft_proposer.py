"""The proposer on a made-up runner: what it drafts for which rows, and that nothing makes it fail."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from seer.common.policy.draft_budget import DraftBudget
from seer.common.policy.draft_costs import CELLS, StepCosts
from seer.services.dgds.client import StreamDelta
from seer.services.engine.vllm.drafts import proposer as module
from seer.services.engine.vllm.drafts.draft_script import DraftScript
from seer.services.engine.vllm.drafts.path_selector import PathSelector
from seer.services.engine.vllm.drafts.proposer import GroupProposer
from seer.services.engine.vllm.requests import EXTRA, ExtraArgs

PROMPT = [1, 2, 3]
SONG = [10, 11, 12, 13, 14, 15, 16, 17] * 6
ROWS, WIDTH, LENGTH = 8, 4, 128
FREE = StepCosts(batches=(1, 8), drafts=(0, 8), grid=((1.0, 1.0001), (1.0, 1.0001)))
"""Rows cost nothing, so all that is likely is drafted."""


class Rows:
    """Stands for vLLM's runner and scheduler: rows of requests with their tokens."""

    def __init__(self) -> None:
        self.tokens = np.zeros((ROWS, LENGTH), np.int32)
        self.lengths = np.zeros(ROWS, np.int32)
        self.input_batch = SimpleNamespace(req_ids=[])
        self.requests: dict[str, SimpleNamespace] = {}
        self.max_num_reqs, self.num_spec_tokens = ROWS, WIDTH
        self.proposer = GroupProposer(None)
        self.proposer.bind(self, WIDTH, PathSelector(0))
        self.proposer.budget = DraftBudget(FREE, WIDTH)
        self.said: dict[str, list[int]] = {}

    def add(
        self, name: str, group: str = "g", index: int = 0, limit: int = 100, stops: Sequence[int] = ()
    ) -> None:
        extra = ExtraArgs(sampling=None, group=group, index=index, prompt_len=len(PROMPT), limit=limit)
        params = SimpleNamespace(extra_args={EXTRA: extra}, stop_token_ids=list(stops))
        self.requests[name] = SimpleNamespace(sampling_params=params)
        self.said[name] = []
        if group:
            self.proposer.open(group, PROMPT)
        self.arrange([*self.input_batch.req_ids, name])

    def arrange(self, names: list[str]) -> None:
        """Give the rows another order, or fewer requests."""
        self.input_batch.req_ids = names
        for row, name in enumerate(names):
            self._write(row, name)

    def step(self, **sampled: list[int]) -> dict[str, list[int]]:
        """Sample these tokens for the requests named, nothing for the others; return the drafts."""
        for row, name in enumerate(self.input_batch.req_ids):
            self.said[name] += sampled.get(name, [])
            self._write(row, name)
        given = [sampled.get(name, []) for name in self.input_batch.req_ids]
        drafts = self.proposer.propose(given, self.lengths, self.tokens)
        return dict(zip(self.input_batch.req_ids, drafts, strict=True))

    def _write(self, row: int, name: str) -> None:
        known = [*PROMPT, *self.said[name]]
        self.tokens[row, : len(known)] = known
        self.lengths[row] = len(known)


@pytest.fixture
def rows() -> Rows:
    return Rows()


def test_a_row_drafts_what_it_and_its_siblings_said(rows):
    rows.add("a", index=0)
    rows.add("b", index=1)
    rows.step(a=SONG[:16])
    assert rows.step(a=SONG[16:17], b=SONG[:3])["b"] == SONG[3:7]
    rows.proposer.feed([StreamDelta("g", 7, 0, np.arange(50, 90, dtype=np.int32))])
    assert rows.step(b=[50, 51, 52])["b"] == [53, 54, 55, 56]


def test_a_draft_ends_where_its_chunk_does(rows):
    rows.add("a", limit=len(PROMPT) + 20)
    drafted = [len(rows.step(a=SONG[:16])["a"])]
    drafted += [len(rows.step(a=[SONG[at]])["a"]) for at in range(16, 20)]
    assert drafted == [3, 2, 1, 0, 0]


def test_nothing_is_drafted_after_a_stop_id(rows):
    rows.add("a", index=0)
    rows.add("b", index=1, stops=[SONG[4], 2**20])
    rows.add("c", index=2, stops=[SONG[5]])
    rows.step(a=SONG[:16])
    drafts = rows.step(a=SONG[16:17], b=SONG[:3], c=SONG[:3])
    assert drafts == {"a": SONG[17:21], "b": SONG[3:5], "c": SONG[3:6]}
    drafts = rows.step(a=SONG[17:18], b=SONG[3:5], c=SONG[3:4])  # b's stop was not allowed to end it yet
    assert drafts == {"a": SONG[18:22], "b": SONG[5:9], "c": SONG[4:6]}


def test_placeholders_of_images_are_not_drafted():
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(image_token_id=SONG[4])))
    assert GroupProposer(config)._placeholder == SONG[4]
    assert GroupProposer(SimpleNamespace(model_config=None))._placeholder == -1
    rows = Rows()
    rows.proposer._placeholder = SONG[4]
    rows.add("a", index=0)
    rows.add("b", index=1, stops=[SONG[2]])
    rows.step(a=SONG[:16])
    assert rows.step(a=SONG[16:17], b=SONG[:1]) == {"a": SONG[17:20], "b": SONG[1:3]}
    assert rows.step(a=SONG[17:20], b=SONG[1:5]) == {"a": [], "b": SONG[5:9]}


def test_of_a_drafted_tree_each_path_ends_with_a_stop_id(rows):
    rows.add("a", stops=[7])
    rows.step(a=[5])
    made = {"tokens": [1, 7, 2, 7, 3], "parents": [-1, 0, 1, -1, 0], "scores": [0.9, 0.8, 0.7, 0.6, 0.5]}
    for name, values in made.items():
        array = getattr(rows.proposer, f"_{'drafts' if name == 'tokens' else name}")
        array.resize((ROWS, len(values)), refcheck=False)
        array[0] = values
    rows.proposer._counts[0] = 5
    rows.proposer._cut_after_stops(1)
    count = rows.proposer._counts[0]
    assert rows.proposer._drafts[0, :count].tolist() == [1, 7, 7, 3]
    assert rows.proposer._parents[0, :count].tolist() == [-1, 0, -1, 0]
    assert rows.proposer._scores[0, :count].tolist() == pytest.approx([0.9, 0.8, 0.6, 0.5])


def test_what_an_environment_said_to_a_sibling_is_drafted(rows):
    rows.add("a", index=0)
    rows.add("b", index=1)
    rows.step(a=SONG[:3])
    rows.arrange(["b"])
    rows.said["a"] += [60, 61, 62, 63, 64]  # by a tool, before its next turn
    rows.add("a2", index=0)
    rows.said["a2"] = list(rows.said["a"])
    rows.step(a2=[SONG[3]], b=SONG[:2])
    assert rows.step(b=[SONG[2], 60, 61])["b"] == [62, 63, 64, SONG[3]]


def test_rows_that_sampled_nothing_get_nothing_and_teach_nothing(rows):
    rows.add("a", index=0)
    rows.add("b", index=1)
    rows.said["b"] = SONG[:16]  # a resumed one, whose prefill goes on
    drafts = rows.step(a=SONG[:3])
    assert drafts == {"a": [], "b": []}
    assert rows.step(a=[SONG[3]], b=[SONG[16]])["b"] == SONG[17:21]


def test_what_is_said_while_drafts_are_off_is_drafted_afterwards(rows):
    for index, name in enumerate("abc"):
        rows.add(name, index=index)
    rows.step(a=SONG[:3])
    rows.proposer.switch(False)
    assert not rows.proposer.drafts
    rows.said["a"] += SONG[3:16]  # in steps that the proposer does not see
    rows.said["b"] += list(range(50, 90))
    for name in "ab":
        state = rows.requests[name]
        state.prompt_token_ids, state.output_token_ids = [*PROMPT, *rows.said[name][:2]], rows.said[name][2:]
    rows.proposer.learn_ended({"b", "unknown"})
    rows.arrange(["a", "c"])
    rows.proposer.switch(True)
    assert rows.step(a=[SONG[16]])["a"] == SONG[17:21]  # a row that still runs
    assert rows.step(c=[50, 51, 52])["c"] == [53, 54, 55, 56]  # one that ended meanwhile


def test_what_an_ended_request_said_in_earlier_chunks_is_drafted(rows):
    rows.add("b", index=1)
    rows.add("a", index=0)
    rows.requests["a"].prompt_token_ids = [*PROMPT, *range(50, 60)]
    rows.requests["a"].output_token_ids = [60, 61, 62]
    rows.proposer.learn_ended(["a"])
    rows.arrange(["b"])
    assert rows.step(b=[50, 51, 52])["b"] == [53, 54, 55, 56]


def test_while_drafts_are_off_there_are_none_but_those_of_a_script(rows):
    rows.add("a")
    rows.step(a=SONG[:16])
    rows.proposer.switch(False)
    assert rows.step(a=[SONG[16]])["a"] == []
    rows.proposer.script = DraftScript(kind="random", vocab=100, count=2)
    assert rows.proposer.drafts
    assert len(rows.step(a=[SONG[17]])["a"]) == 2


def test_drafts_that_are_verified_while_it_is_off_teach_nothing(rows):
    rows.add("a")
    rows.step(a=SONG[:16])
    assert rows.step(a=[SONG[16]])["a"]
    rows.proposer.take_acceptance("g")
    rows.proposer.switch(False)
    rows.said["a"] += SONG[17:21]
    rows.proposer.switch(True)
    rows.step(a=[99])  # as if the draft had been wrong
    assert sum(rows.proposer.take_acceptance("g")[0]) == 0


def test_what_a_tree_refuses_of_an_ended_request_is_counted(rows):
    rows.add("a")
    rows.step(a=SONG[:3])
    rows.proposer.switch(False)
    state = rows.requests["a"]
    state.prompt_token_ids, state.output_token_ids = PROMPT, [-7]
    rows.proposer.learn_ended(["a"])
    assert rows.proposer.counters["refused"] == 1


def test_requests_without_a_group_neither_draft_nor_teach(rows):
    rows.add("lonely", group="")
    rows.add("other", group="", index=1)
    assert rows.step(lonely=SONG[:32], other=SONG[:3]) == {"lonely": [], "other": []}


def test_before_it_is_bound_it_drafts_nothing():
    assert GroupProposer(None).propose([[1], [2]], np.zeros(2, np.int32), np.zeros((2, 8), np.int32)) == [
        [],
        [],
    ]


def test_rows_may_change_places_and_leave(rows):
    for index, name in enumerate("abc"):
        rows.add(name, index=index)
    rows.step(a=SONG[:16], b=SONG[:4], c=SONG[:5])
    rows.arrange(["c", "a"])
    drafts = rows.step(c=[SONG[5]], a=[SONG[16]])
    assert drafts == {"c": SONG[6:10], "a": SONG[17:21]}


def test_what_was_verified_is_told_once_by_group(rows):
    rows.add("a")
    rows.add("b", group="h", index=1)
    rows.step(a=SONG[:16], b=[5])
    assert len(rows.step(a=[SONG[16]], b=[6])["a"]) == WIDTH
    rows.arrange(["b", "a"])
    rows.step(a=[*SONG[17:19], 99], b=[7])  # two of four were right
    tried, right = rows.proposer.take_acceptance("g")
    assert (len(tried), len(right)) == (CELLS, CELLS)
    assert sum(right) < sum(tried)
    assert sum(right) >= 2
    assert not any(map(sum, rows.proposer.take_acceptance("g")))
    assert not any(map(sum, rows.proposer.take_acceptance("unknown")))


def test_conflicts_and_gaps_cost_drafts_alone(rows):
    rows.add("a", index=0)
    rows.add("twin", index=0)
    for at in range(20):
        drafts = rows.step(a=SONG[2 * at : 2 * at + 2], twin=[60 + at])
        assert set(drafts) == {"a", "twin"}
    assert rows.proposer.counters["refused"] > 0


def test_a_forgotten_group_is_drafted_for_no_more(rows):
    rows.add("a")
    rows.step(a=SONG[:16])
    rows.proposer.forget(["g", "unknown"])
    assert rows.step(a=[SONG[16]]) == {"a": []}
    rows.proposer.feed([StreamDelta("g", 1, 0, np.arange(8, dtype=np.int32))])
    rows.proposer.open("g", PROMPT)
    rows.arrange(["a"])
    rows.proposer.forget([])
    assert rows.step(a=[SONG[17]])["a"] == SONG[18:22]  # all it said is shown to the new tree


def test_what_is_learnt_outlives_the_end_of_other_groups(rows):
    """Chunks that end in every step drop trees in every step, where each has one of its own."""
    rows.add("a", group="g")
    rows.add("b", group="h")
    rows.step(a=SONG[:16], b=SONG[:16])
    assert rows.step(a=[SONG[16]], b=[SONG[16]])["a"] == SONG[17:21]
    rows.proposer.take_acceptance("g")
    rows.proposer.forget(["h"])
    rows.proposer.open("new", PROMPT)  # it takes the slot of h
    rows.arrange(["a"])
    rows.add("c", group="new")
    rows.step(a=SONG[17:22], c=[5])
    drafted, right = rows.proposer.take_acceptance("g")
    assert sum(drafted) == sum(right) == 4
    assert not any(map(sum, rows.proposer.take_acceptance("new")))


def test_rows_that_move_go_on_where_they_were(rows):
    for index, name in enumerate("abc"):
        rows.add(name, group=name, index=index)
    rows.step(a=SONG[:16], b=SONG[1:17], c=SONG[2:18])
    rows.arrange(["c", "b"])  # as vLLM fills the place of one that ended
    assert rows.step(c=[SONG[18]], b=[SONG[17]]) == {"c": SONG[19:23], "b": SONG[18:22]}
    assert rows.proposer.counters["refused"] == 0


def test_a_full_tree_learns_no_more_and_drafts_on(rows, monkeypatch):
    monkeypatch.setattr(module, "TREE_BYTES", 100_000)
    rows.add("a")
    rows.step(a=SONG[:16])
    rows.proposer.feed(
        StreamDelta("g", 1 + part, 0, np.random.default_rng(part).integers(100, 2**20, 999).astype(np.int32))
        for part in range(100)
    )
    assert rows.proposer.counters["refused"] > 0
    for at in range(16, 24):
        drafts = rows.step(a=[SONG[at]])
    assert drafts["a"] == SONG[24:28]


def test_a_young_group_drafts_from_what_others_said(rows):
    rows.add("a", group="old")
    rows.step(a=SONG[:16])
    rows.add("b", group="young")
    assert rows.step(b=SONG[:4])["b"] == []
    rows.proposer.use_common_tree(True)
    rows.step(a=[SONG[16]])  # shows all it said to the tree of all groups
    assert rows.step(b=[SONG[4]])["b"] == SONG[5:9]
    rows.proposer.use_common_tree(False)
    assert rows.step(b=[SONG[5]])["b"] == []


def test_the_tree_of_all_groups_begins_anew_once_it_is_large(rows, monkeypatch):
    monkeypatch.setattr(module, "COMMON_TOKENS", 20)
    rows.proposer.use_common_tree(True)
    rows.add("a", group="old")
    rows.step(a=SONG[:24])
    rows.arrange([])
    rows.add("b", group="young")
    assert rows.step(b=SONG[:4])["b"] == []
