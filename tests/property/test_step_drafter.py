"""The step drafter makes the drafts of `GroupProposer`, whatever comes between steps.

Two comparisons: with one proposer for all rows, as engines have it, where no tree refuses anything; and with a
proposer for each slot, where trees are full and attempts contradict each other: what is refused costs a row alone.
"""

import ctypes
import sys
import threading
import time
from random import Random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer._native import RUN_DRAFT_STEP, DraftStep, GroupTree, StepDrafter
from seer.common.policy.draft_budget import Choice
from seer.common.policy.draft_paths import paths_of
from seer.services.engine.vllm.drafts import proposer as module
from seer.services.engine.vllm.drafts.path_selector import PathSelector
from seer.services.engine.vllm.drafts.proposer import GroupProposer
from seer.services.engine.vllm.requests import EXTRA, ExtraArgs

SLOTS, LENGTH, WIDTH = 4, 4096, 9
KS = (0, 1, 2, 4, 8)
PROMPTS = {"g": [1, 2, 3], "h": list(range(6)) * 7, "": [2], "lost": [4, 5]}
"""Prompts by group: one is shorter than contexts reach, one longer, one has no group, one no tree."""
SONG = [0, 1, 2, 3, 4, 5, 3, 1] * 5
LARGE = 2**30


class TakeAll:
    """Stands for the budget: all that is drafted is verified."""

    def __init__(self) -> None:
        self.on, self.scores = True, None

    def should_draft(self) -> bool:
        return self.on

    def slot(self, group, told) -> int:
        return 0

    def learn(self, choice, accepted) -> None:
        pass

    def choose(self, slots, scores, counts, n, high) -> Choice:
        self.scores = scores.copy()
        return Choice(counts.copy(), np.zeros_like(scores, dtype=np.int32), slots)


class Taught(GroupProposer):
    """Knows that trees were given what a request had said when it got its row."""

    def _set_rows(self, ids, requests) -> None:
        super()._set_rows(ids, requests)
        for row, name in enumerate(ids):
            if requests[name].taught is not None:
                self._appended[row], requests[name].taught = requests[name].taught, None


class Proposers:
    """`GroupProposer` on a made-up runner: one for all slots, or one for each with common trees."""

    def __init__(self, kind: type[GroupProposer], placeholder: int, apart: bool) -> None:
        self.tokens, self.lengths = np.zeros((SLOTS, LENGTH), np.int32), np.zeros(SLOTS, np.int32)
        self.rows: dict[int, str] = {}
        self.requests: dict[str, SimpleNamespace] = {}
        self.refused = self.names = 0
        self.all = [self._proposer(kind, placeholder) for _ in range(SLOTS if apart else 1)]
        self.trees = self.all[0]._trees
        for proposer in self.all:
            proposer._trees = self.trees

    def _proposer(self, kind: type[GroupProposer], placeholder: int) -> GroupProposer:
        proposer = kind(None)
        runner = SimpleNamespace(max_num_reqs=SLOTS, requests=self.requests, input_batch=SimpleNamespace())
        proposer.bind(runner, WIDTH, PathSelector(0))
        proposer._placeholder, proposer.budget = placeholder, TakeAll()
        return proposer

    def _teach(self, tree, name, output) -> bool:
        try:
            if tree is not None and name >= 0 and output:  # in pieces: a tree may be full in between
                StepDrafter(1).feed(tree, name, 0, output)
        except ValueError:
            self.refused += 1
            return False
        return True

    def set(self, slot, extra, output, stops) -> None:
        self.names += 1
        name = self.rows[slot] = f"{self.names}"
        tree, common = self.trees.get(extra.group), self.all[0]._common
        learnt = tree is None or tree.bytes >= module.TREE_BYTES or self._teach(tree, extra.index, output)
        learnt &= self._teach(common, name_of(extra), output)
        params = SimpleNamespace(extra_args={EXTRA: extra}, stop_token_ids=list(stops))
        self.requests[name] = SimpleNamespace(
            sampling_params=params, extra=extra, taught=len(output) if learnt else 0
        )
        known = [*PROMPTS[extra.group], *output]
        self.tokens[slot, : len(known)], self.lengths[slot] = known, len(known)

    def prompt(self, slot) -> list[int]:
        return PROMPTS[self.requests[self.rows[slot]].extra.group]

    def output(self, slot) -> list[int]:
        return self.tokens[slot, len(self.prompt(slot)) : self.lengths[slot]].tolist()

    def use_common(self, enabled) -> None:
        common = GroupTree((), module.TREE_BYTES) if enabled else None
        for proposer in self.all:
            proposer._common = common
        for slot, name in sorted(self.rows.items()) if enabled else ():
            output, request = self.output(slot), self.requests[name]
            if self._teach(common, name_of(request.extra), output):
                continue
            if request.taught is not None:
                request.taught = 0
            else:
                self.all[slot]._appended[0] = 0

    def step(self, rows, k) -> list[tuple[list[int], list[float]]]:
        """Sample these tokens, by slot; return drafts and scores."""
        for slot, sampled in rows.items():
            end = self.lengths[slot] + len(sampled)
            self.tokens[slot, self.lengths[slot] : end], self.lengths[slot] = sampled, end
        parts = [[slot] for slot in rows] if len(self.all) > 1 else [list(rows)]
        return [made for slots in parts for made in self._propose(slots, [rows[slot] for slot in slots], k)]

    def _propose(self, slots, sampled, k) -> list[tuple[list[int], list[float]]]:
        if not slots:
            return []
        if len(self.all) > 1 and not sampled[0]:  # it would look now whether the tree is full
            return [([], [])]
        proposer = self.all[slots[0] % len(self.all)]
        proposer._runner.input_batch.req_ids = [self.rows[slot] for slot in slots]
        proposer._drafts, proposer._parents = (np.zeros((SLOTS, max(k, 1)), np.int32) for _ in range(2))
        proposer._scores, proposer.budget.on = np.zeros((SLOTS, max(k, 1)), np.float32), k > 0
        before = proposer.counters["refused"]
        order = [*slots, *(slot for slot in range(SLOTS) if slot not in slots)]
        drafts = proposer.propose(sampled, self.lengths[order], self.tokens[order])
        self.refused += proposer.counters["refused"] - before
        scores = [
            proposer.budget.scores[row, : len(draft)].tolist() if draft else []
            for row, draft in enumerate(drafts)
        ]
        return list(zip(drafts, scores, strict=True))


def name_of(extra) -> int:
    return module._name(extra) if extra.group else -1


class Pair:
    """The same history told to the step drafter and to proposers."""

    def __init__(self, apart, placeholder, most_bytes) -> None:
        self.apart, self.placeholder, self.most_bytes = apart, placeholder, most_bytes
        self.drafter = StepDrafter(SLOTS)
        self.peer = Proposers(Taught if apart else GroupProposer, placeholder, apart)
        self.trees = {group: GroupTree(PROMPTS[group], most_bytes) for group in "gh"}
        for group in self.trees:
            self.peer.all[0].open(group, PROMPTS[group])
        self.generations = np.zeros(SLOTS, np.int64)
        self.stale: dict[int, int] = {}

    def running(self) -> set[tuple[str, int]]:
        extras = [self.peer.requests[name].extra for name in self.peer.rows.values()]
        return {(extra.group, extra.index) for extra in extras}

    def set(self, slot, group, index, output, more, stops) -> None:
        if not self.apart:  # an index runs once, and outputs go on
            self.clear(slot)
            index += 10 * self.peer.names
        known = [*PROMPTS[group], *output]
        before, limit = len(PROMPTS[group]), len(known) + more
        extra = ExtraArgs(sampling=None, group=group, index=index, prompt_len=before, limit=limit)
        self.peer.set(slot, extra, output, stops)
        self.stale[slot] = self.generations[slot]
        self.generations[slot] = self.drafter.set(
            slot, self.trees.get(group), index, name_of(extra), before, np.array(known, np.int32), limit,
            stops, self.placeholder,
        )  # fmt: skip

    def clear(self, slot) -> None:
        self.peer.rows.pop(slot, None)
        self.drafter.clear(slot)

    def feed(self, group, index, kind, at, tokens) -> None:
        """Feed a sibling's tokens; if rows are apart also such as contradict a row's, or come after a gap."""
        if not self.apart and (group, index) in self.running():
            return
        tree = self.peer.trees[group]
        length = tree.length(index) or 0
        previous = {"new": length, "within": round(at * length), "gap": length + 1}[kind]
        refused = []
        for take in (
            lambda: tree.append(index, previous, tokens),
            lambda: self.drafter.feed(self.trees[group], index, previous, np.array(tokens, np.int32)),
        ):
            try:
                take()
            except ValueError as error:
                refused.append(str(error))
        assert len(set(refused)) <= 1
        assert len(refused) in (0, 2)

    def use_common(self, enabled) -> None:
        self.peer.use_common(enabled)
        self.drafter.use_common(GroupTree((), self.most_bytes) if enabled else None)

    def length(self, slot) -> int:
        return int(self.peer.lengths[slot]) - len(self.peer.prompt(slot)) if slot in self.peer.rows else 0

    def step(self, rows, k, stale) -> None:
        """Sample these tokens, by slot; those in `stale` are of requests that lost their slots."""
        here = {slot: tokens for slot, tokens in rows.items() if slot in self.peer.rows and slot not in stale}
        expected = dict(zip(here, self.peer.step(here, k), strict=True))
        generations = self.generations.copy()
        for slot in stale:
            generations[slot] = self.stale.get(slot, 0)
        step = Arrays(rows, generations, k)
        DraftStep(self.drafter, *step.all).run()
        for row, (slot, tokens) in enumerate(rows.items()):
            draft, scores = expected.get(slot, ([], []))
            padding = k - len(draft)
            assert step.counts[row] == len(draft)
            assert step.drafts[row].tolist() == draft + [tokens[-1] if tokens else 0] * padding
            assert step.scores[row].tolist() == scores + [0.0] * padding
        assert self.drafter.refused == self.peer.refused


class Arrays:
    """A step's arrays, of tokens drawn by slot."""

    def __init__(self, rows, generations, k) -> None:
        n = len(rows)
        self.slots = np.array(list(rows), np.int32)
        self.sampled = np.full((n, WIDTH), -1, np.int32)  # as a kernel leaves what was not accepted
        for row, tokens in enumerate(rows.values()):
            self.sampled[row, : len(tokens)] = tokens
        self.num_sampled = np.array([len(tokens) for tokens in rows.values()], np.int32)
        self.drafts, self.counts = np.full((n, k), -5, np.int32), np.full(n, -5, np.int32)
        self.scores = np.full((n, k), -5, np.float32)
        self.all = [
            self.slots, np.array([generations[slot] for slot in rows], np.int64), self.sampled, self.num_sampled,
            self.drafts, self.counts, self.scores,
        ]  # fmt: skip


# An event is its kind and a seed for all else.
KINDS = ["step"] * 12 + ["set"] * 4 + ["feed"] * 4 + ["clear", "use_common"]
histories = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**16)), min_size=20, max_size=100)


def said(random, most) -> list[int]:
    """Return a part of the song, or other tokens."""
    at, count = random.randrange(20), random.randint(1, most)
    return SONG[at : at + count] if random.random() < 0.7 else random.choices(range(6), k=count)


def arguments(kind, random, pair) -> tuple:
    slot = random.randrange(SLOTS)
    if kind == "set":
        output, more = random.choice([[], said(random, 20)]), random.choice([2, 5, 20, 400, 400])
        stops = random.choices(range(8), k=random.randrange(3))
        group = random.choice(["g", "g", "g", "h", "h", "", "lost"])
        return slot, group, random.randrange(4), output, more, stops
    if kind == "feed":
        how = random.choice(["new", "new", "within", "gap"])
        return random.choice("gh"), random.randrange(10), how, random.random(), said(random, 20)
    if kind == "clear":
        return (slot,)
    if kind == "use_common":
        return (random.random() < 0.7,)
    order = random.sample(range(SLOTS), random.choice([1, 2, SLOTS, SLOTS]))
    goes_on = {slot: SONG[pair.length(slot) % 8 :][: random.randint(1, WIDTH)] for slot in order}
    sampled = {slot: random.choice([goes_on[slot], goes_on[slot], said(random, WIDTH), []]) for slot in order}
    stale = set(random.sample(order, random.choice([0, 0, 0, 1])))
    return sampled, random.choice(KS), stale


def play(pair, history) -> None:
    for slot in range(SLOTS):
        pair.set(slot, "g", slot, [], 400, [])
    for kind, seed in history:
        getattr(pair, kind)(*arguments(kind, Random(seed), pair))


@given(histories, st.sampled_from([-1, 4]))
def test_drafts_are_those_of_the_proposer(history, placeholder):
    play(Pair(False, placeholder, LARGE), history)


@given(histories, st.sampled_from([-1, 4]), st.sampled_from([1500, 4000, 20_000, LARGE]))
def test_what_a_tree_refuses_costs_that_row_alone(history, placeholder, most_bytes):
    with mock.patch.object(module, "TREE_BYTES", most_bytes):
        play(Pair(True, placeholder, most_bytes), history)


feeds_of = st.tuples(st.floats(0, 1), st.integers(0, 300), st.booleans(), st.integers(0, 4))


@given(st.lists(feeds_of, max_size=8))
def test_a_feed_in_pieces_is_an_append(feeds):
    """Feeds that go on, repeat, and contradict what the tree has."""
    drafter, pieces, whole = StepDrafter(1), GroupTree(SONG), GroupTree(SONG)
    rng = np.random.default_rng(len(feeds))
    for at, count, new, request in feeds:
        previous = round(at * (whole.length(request) or 0))
        tokens = (
            rng.integers(0, 3, count).astype(np.int32) if new else np.resize(np.array(SONG, np.int32), count)
        )
        whole.append(request, previous, tokens)
        drafter.feed(pieces, request, previous, tokens if count % 2 else tokens.tolist())
        assert (pieces.length(request), pieces.tokens) == (whole.length(request), whole.tokens)
        assert pieces.draft(request, 20, 4).token_ids == whole.draft(request, 20, 4).token_ids


def alone(output=(), limit=1000, **changed):
    """A drafter with one request, that has said the output, and its tree."""
    tree, drafter = GroupTree([1]), StepDrafter(2)
    tree.append(7, 0, SONG)
    arguments = {
        "slot": 0, "tree": tree, "index": 0, "common_name": -1, "prompt_length": 1,
        "tokens": np.array([1, *output], np.int32), "limit": limit,
    } | changed  # fmt: skip
    return tree, drafter, drafter.set(**arguments)


def test_what_is_drawn_without_drafts_is_learnt():
    tree, drafter, generation = alone(SONG[:2])
    assert tree.length(0) == 2
    step = Arrays({0: SONG[2:4]}, {0: generation}, 0)
    DraftStep(drafter, *step.all).run()
    assert (tree.length(0), step.counts.tolist()) == (4, [0])


def test_of_two_trees_drafts_the_better_is_made():
    """By the sum of scores: the tokens expected to be right."""
    better = []
    for seed in range(20):
        random, common = Random(seed), GroupTree()
        tree, drafter, _ = alone(prompt_length=0, tokens=np.zeros(0, np.int32))
        for index in range(1, 5):
            tree.append(index, 0, said(random, 20))
            common.append(index, 0, said(random, 20))
        drafter.use_common(common)
        output = np.array([said(random, 1)[0] for _ in range(40)], np.int32)  # further than contexts reach
        generation = drafter.set(1, tree, 9, 9, 0, output[:32], 1000)
        step = Arrays({1: output[32:].tolist()}, {1: generation}, 8)
        DraftStep(drafter, *step.all).run()
        made = [tree.draft(9, 8), common.draft(9, 8)]
        better.append(sum(made[1].scores) > sum(made[0].scores))
        assert step.drafts[0, : step.counts[0]].tolist() == made[better[-1]].token_ids
    assert len(set(better)) == 2


def cut_tree(draft, stops, placeholder) -> tuple[list[int], list[int], list[float]]:
    """A tree without placeholders and what follows a stop id."""
    kept: dict[int, int] = {}
    for place, parent in enumerate(draft.parents):
        goes_on = parent < 0 or (parent in kept and draft.token_ids[parent] not in stops)
        if goes_on and draft.token_ids[place] != placeholder:
            kept[place] = len(kept)
    tokens, scores = ([each[place] for place in kept] for each in (draft.token_ids, draft.scores))
    return tokens, [kept.get(draft.parents[place], -1) for place in kept], scores


trees_of = st.tuples(
    st.integers(0, 2**16),
    st.integers(1, 5),
    st.integers(0, 6),
    st.integers(0, 20),
    st.sets(st.integers(0, 5), max_size=2),
)


@given(trees_of)
def test_several_paths_are_those_of_the_tree(case):
    """As a tree, and one after the other; the first is the one that there is alone."""
    seed, paths, each, room, stops = case
    random = Random(seed)
    tree, drafter, _ = alone()
    for index in range(1, 6):
        tree.append(index, 0, said(random, 30))
    output = said(random, 9)
    drawn = output[-min(3, len(output)) :]
    before = np.array([1, *output[: len(output) - len(drawn)]], np.int32)
    k = paths * each + paths - 1 if each else 0

    def step(**more) -> Arrays:
        generation = drafter.set(1, tree, 9, -1, 1, before, len(output) + 2 + room, sorted(stops), 4)
        made = Arrays({1: drawn}, {1: generation}, k)
        DraftStep(drafter, *made.all, **more).run()
        return made

    depth = min(room, k)
    parents = np.full((1, k), -5, np.int32)
    as_tree = step(paths=paths, out_parents=parents)
    tokens, above, scores = cut_tree(tree.draft(9, depth, paths), stops, 4)
    count = len(tokens)
    assert as_tree.counts.tolist() == [count]
    assert as_tree.drafts[0].tolist() == tokens + [drawn[-1]] * (k - count)
    assert parents[0, :count].tolist() == above
    assert as_tree.scores[0].tolist() == scores + [0.0] * (k - count)

    depth = min(room, each)
    flat = step(paths=paths)
    tokens, above, scores = cut_tree(tree.draft(9, depth * paths, paths, max_depth=depth or None), stops, 4)
    expected, rated = [drawn[-1]] * k, [0.0] * k
    for place, path in enumerate(paths_of(above)):
        begin = place * (each + 1)
        expected[begin : begin + len(path)] = [tokens[i] for i in path]
        rated[begin : begin + len(path)] = [scores[i] for i in path]
    assert flat.drafts[0].tolist() == expected
    assert flat.scores[0].tolist() == rated
    assert flat.counts.tolist() == [len(tokens)]
    one = tree.draft(9, depth)
    if 4 not in one.token_ids:  # else the second best follows where no placeholder may
        right = cut_tree(one, stops, 4)[0]
        assert flat.drafts[0, :each].tolist() == right + [drawn[-1]] * ((each if k else 0) - len(right))


def test_steps_come_between_the_pieces_of_a_feed():
    tree, drafter, generation = alone(limit=10**9)
    long, seen = np.random.default_rng(0).integers(0, 10**6, 500_000).astype(np.int32), set()
    for request in range(100, 120):
        thread = threading.Thread(target=drafter.feed, args=(tree, request, 0, long))
        thread.start()
        while thread.is_alive():
            DraftStep(drafter, *Arrays({0: SONG[:2]}, {0: generation}, 8).all).run()
            seen.add(tree.length(request))
        thread.join()
        if seen - {None, 0, len(long)}:
            return
    pytest.fail(f"steps came after {seen} tokens of feeds")


def test_it_keeps_trees_for_as_long_as_slots_use_them():
    tree, drafter, _ = alone()
    held = sys.getrefcount(tree)
    drafter.clear(0)
    assert sys.getrefcount(tree) == held - 1
    for _ in range(2):
        drafter.set(1, tree, 0, -1, 0, np.zeros(0, np.int32), 9)
        drafter.use_common(tree)
    assert sys.getrefcount(tree) == held + 1
    drafter.set(1, None, 0, -1, 0, np.zeros(0, np.int32), 9)
    drafter.use_common(None)
    assert sys.getrefcount(tree) == held - 1
    generation = drafter.set(1, tree, 0, -1, 0, np.zeros(0, np.int32), 9)
    step = Arrays({1: SONG[:1]}, {1: generation}, 4)
    made = DraftStep(drafter, *step.all)
    del drafter, tree
    made.run()
    assert step.drafts.tolist() == [SONG[1:5]]


def test_a_callback_needs_no_gil():
    """A thread that Python does not know runs the step, as one of CUDA's, while this one has the GIL."""
    _, drafter, generation = alone()
    step = Arrays({0: SONG[:1]}, {0: generation}, 8)
    made, thread, c = DraftStep(drafter, *step.all), ctypes.c_ulong(), ctypes.PyDLL(None)
    arguments = ctypes.c_void_p(RUN_DRAFT_STEP), ctypes.c_void_p(made.address)
    interval, deadline = sys.getswitchinterval(), time.monotonic() + 60
    sys.setswitchinterval(1000)  # nobody gets the GIL before
    try:
        assert c.pthread_create(ctypes.byref(thread), None, *arguments) == 0
        while step.scores[0, -1] < 0:
            assert time.monotonic() < deadline
    finally:
        sys.setswitchinterval(interval)
    ctypes.CDLL(None).pthread_join(thread, None)
    assert step.drafts.tolist() == [SONG[1:9]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slot": 2}, "slot is 2; must be 0 to 2 - 1"),
        ({"prompt_length": 2}, "prompt_length is 2 of 1 tokens"),
        ({"tokens": np.array([-1], np.int32)}, r"tokens\[0\] is -1; token ids are not negative"),
    ],
)
def test_a_bad_set_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        alone(**changed)


@pytest.mark.parametrize("place", range(1, 7))
def test_arrays_of_other_shapes_are_refused(place):
    _, drafter, _ = alone()
    arrays = Arrays({0: [1]}, {0: 1}, 4).all
    arrays[place] = np.repeat(arrays[place], 2, axis=0)
    with pytest.raises(ValueError, match="has 2 rows for 1 slots"):
        DraftStep(drafter, *arrays)


@pytest.mark.parametrize(
    ("paths", "columns", "message"),
    [
        (0, None, "paths is 0; must be 1 or more"),
        (2, None, "paths is 2; must divide the 4 columns of out_drafts, and one more"),
        (2, 3, "out_drafts and out_parents must have the same shape"),
    ],
)
def test_paths_that_do_not_fit_are_refused(paths, columns, message):
    _, drafter, _ = alone()
    parents = None if columns is None else np.zeros((1, columns), np.int32)
    with pytest.raises(ValueError, match=message):
        DraftStep(drafter, *Arrays({0: [1]}, {0: 1}, 4).all, paths=paths, out_parents=parents)


def test_slots_that_there_are_not_do_nothing():
    _, drafter, generation = alone()
    step = Arrays({0: [1], 9: [2], -1: [3]}, {0: generation, 9: generation, -1: 0}, 1)
    step.num_sampled[:] = [99, -1, 1]  # and counts that cannot be
    DraftStep(drafter, *step.all).run()
    assert step.counts[1:].tolist() == [0, 0]
    assert step.drafts[1:].tolist() == [[0], [3]]
    with pytest.raises(ValueError, match="patience is 2"):
        StepDrafter(1, 2.0)
