"""The step drafter drafts what `ReferenceDrafts` does, whatever comes between steps.

Two histories: as engines have them, where no tree refuses anything; and where trees are full and attempts
contradict each other: what is refused costs a row alone.
"""

import ctypes
import sys
import threading
import time
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_drafts import ReferenceDrafts, Row, cut_tree

from seer._native import RUN_DRAFT_STEP, DraftStep, GroupTree, StepDrafter
from seer.common.policy.draft_paths import paths_of

SLOTS, WIDTH = 4, 9
KS = (0, 1, 2, 4, 8)
PROMPTS = {"g": [1, 2, 3], "h": list(range(6)) * 7, "": [2], "lost": [4, 5]}
"""Prompts by group: one is shorter than contexts reach, one longer, one has no group, one no tree."""
SONG = [0, 1, 2, 3, 4, 5, 3, 1] * 5
LARGE = 2**30


class Pair:
    """The same history told to the step drafter and to the reference. `orderly`: no tree refuses anything."""

    def __init__(self, orderly, placeholder, most_bytes) -> None:
        self.orderly, self.placeholder, self.most_bytes = orderly, placeholder, most_bytes
        self.drafter, self.peer = StepDrafter(SLOTS), ReferenceDrafts(most_bytes)
        # Trees of the one and of the other, by group.
        self.trees, self.theirs = (
            {group: GroupTree(PROMPTS[group], most_bytes) for group in "gh"} for _ in range(2)
        )
        self.names: dict[tuple[str, int], int] = {}
        self.count = 0
        self.generations = np.zeros(SLOTS, np.int64)
        self.stale: dict[int, int] = {}

    def set(self, slot, group, index, output, more, stops) -> None:
        if self.orderly:  # an index runs once, and outputs go on
            self.clear(slot)
            self.count += 1
            index += 10 * self.count
        known = [*PROMPTS[group], *output]
        before, limit = len(PROMPTS[group]), len(known) + more
        name = self.names.setdefault((group, index), len(self.names)) if group else -1
        self.peer.set(
            slot, Row(self.theirs.get(group), index, name, before, known, limit, stops, self.placeholder)
        )
        self.stale[slot] = self.generations[slot]
        self.generations[slot] = self.drafter.set(
            slot, self.trees.get(group), index, name, before, np.array(known, np.int32), limit, stops,
            self.placeholder,
        )  # fmt: skip

    def clear(self, slot) -> None:
        self.peer.clear(slot)
        self.drafter.clear(slot)

    def feed(self, group, index, kind, at, tokens) -> None:
        """Feed a sibling's tokens; if not orderly also such as contradict a row's, or come after a gap."""
        running = {(row.tree, row.index) for row in self.peer.rows.values()}
        tree = self.theirs[group]
        if self.orderly and (tree, index) in running:
            return
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
        for each in (self.peer, self.drafter):
            each.use_common(GroupTree((), self.most_bytes) if enabled else None)

    def length(self, slot) -> int:
        return len(self.peer.rows[slot].output) if slot in self.peer.rows else 0

    def step(self, rows, k, stale) -> None:
        """Sample these tokens, by slot; those in `stale` are of requests that lost their slots."""
        here = {slot: tokens for slot, tokens in rows.items() if slot in self.peer.rows and slot not in stale}
        expected = self.peer.step(here, k)
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
        assert not (self.orderly and self.peer.refused)


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
def test_drafts_are_those_of_the_reference(history, placeholder):
    play(Pair(True, placeholder, LARGE), history)


@given(histories, st.sampled_from([-1, 4]), st.sampled_from([1500, 4000, 20_000, LARGE]))
def test_what_a_tree_refuses_costs_that_row_alone(history, placeholder, most_bytes):
    play(Pair(False, placeholder, most_bytes), history)


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


def cut(draft, stops) -> tuple[list[int], list[int], list[float]]:
    return cut_tree((draft.token_ids, draft.parents, draft.scores), stops, 4)


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
    tokens, above, scores = cut(tree.draft(9, depth, paths), stops)
    count = len(tokens)
    assert as_tree.counts.tolist() == [count]
    assert as_tree.drafts[0].tolist() == tokens + [drawn[-1]] * (k - count)
    assert parents[0, :count].tolist() == above
    assert as_tree.scores[0].tolist() == scores + [0.0] * (k - count)

    depth = min(room, each)
    flat = step(paths=paths)
    tokens, above, scores = cut(tree.draft(9, depth * paths, paths, max_depth=depth or None), stops)
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
        right = cut(one, stops)[0]
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
