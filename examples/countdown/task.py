"""Countdown solved by a written depth-first search: problems, traces and the checker.

A problem is three or four numbers and a target. A response searches aloud, one move at a time,
printing the state on every descent and every return. It ends with the steps of its answer, or with
`ans none` if the search came back empty-handed:

    <bos> 12 10 5 > 17
    S3 12 10 5 : 10 - 5 = 5 S2 12 5 : 12 + 5 = 17 17 ! ans 10 - 5 = 5 , 12 + 5 = 17 <eos>

Invariants:
- every text is words of `VOCAB` joined by single spaces, so words and token ids map one to one;
- a state is sorted from the largest number down, and a move never leaves 1..`LARGEST`;
- `check` accepts every trace written for a problem that has a solution, and no other ends in `none`;
- everything is a function of the `random.Random` passed in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

State = tuple[int, ...]
Move = tuple[int, str, int, int]
"""Left number, operator, right number, result."""

LARGEST = 48
LARGEST_GIVEN = 12
CANONICAL_FIRST = 0.5
"""Chance that a node tries its first remaining move in canonical order. Responses to one prompt
thus share stretches of text, as those of one policy do, without being copies."""

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCAB: tuple[str, ...] = (
    *(PAD, BOS, EOS, UNK),
    *(str(n) for n in range(1, LARGEST + 1)),
    *("+", "-", "*", "=", ":", ">", ",", "!", "x", "ans", "none", "S2", "S3", "S4"),
)
IDS: dict[str, int] = {word: i for i, word in enumerate(VOCAB)}


@dataclass(frozen=True, order=True)
class Problem:
    """Numbers from the largest down, and the target."""

    numbers: State
    target: int

    @property
    def prompt(self) -> str:
        """The text given to the model; its `<bos>` is spelled out, a tokenizer adds nothing."""
        return f"{BOS} {_words(self.numbers)} > {self.target}"


def parse_prompt(prompt: str) -> Problem:
    """Inverse of `Problem.prompt`. Raises ValueError for any other text."""
    match prompt.split():
        case ["<bos>", *numbers, ">", target] if numbers and all(
            word.isdecimal() for word in (*numbers, target)
        ):
            return Problem(tuple(int(n) for n in numbers), int(target))
    raise ValueError(f"prompt {prompt!r} is not of the form '<bos> 12 10 5 > 17'")


def moves(state: State) -> list[Move]:
    """All distinct moves of a state in canonical order; results outside 1..`LARGEST` are illegal."""
    pairs = dict.fromkeys(itertools.combinations(state, 2))
    return [
        (a, op, b, result)
        for a, b in pairs
        for op, result in (("+", a + b), ("-", a - b), ("*", a * b))
        if 1 <= result <= LARGEST
    ]


def apply(state: State, move: Move) -> State:
    """Return the state after a move: its two numbers are replaced by its result."""
    left = list(state)
    left.remove(move[0])
    left.remove(move[2])
    return tuple(sorted((*left, move[3]), reverse=True))


def reachable(state: State) -> set[int]:
    """Every number that remains after some sequence of moves that uses up the whole state."""
    if len(state) == 1:
        return {state[0]}
    return set().union(*(reachable(apply(state, move)) for move in moves(state)))


def draw_problem(rng: Random, count: int, *, solvable: bool = True) -> Problem:
    """Draw a problem of `count` numbers, its target uniform over what they can, or cannot, reach."""
    while True:
        numbers = tuple(sorted((rng.randint(1, LARGEST_GIVEN) for _ in range(count)), reverse=True))
        within = reachable(numbers)
        if targets := [n for n in range(1, LARGEST + 1) if (n in within) == solvable]:
            return Problem(numbers, rng.choice(targets))


def draw_trace(rng: Random, problem: Problem) -> list[str]:
    """Return the words of one search for the problem's target, from the first state to `<eos>`."""
    words: list[str] = []
    path = _search(rng, problem.numbers, problem.target, words)
    answer = " , ".join(_words(_spell(step)) for step in path or ())
    return [*words, "ans", *(answer or "none").split(), EOS]


def first_state(problem: Problem) -> list[str]:
    """Return the words that every trace of a problem begins with."""
    return _show(problem.numbers)


def check(prompt: str, response: str) -> bool:
    """Whether the steps after the response's `ans` are legal, use every number and hit the target.

    A step is written as in `moves`: the larger number first. Any response is judged without an
    error; a malformed prompt raises ValueError.
    """
    problem = parse_prompt(prompt)
    _, _, answer = response.removesuffix(EOS).partition(" ans ")
    state = tuple(sorted(problem.numbers, reverse=True))
    for step in answer.split(","):
        legal = {_words(_spell(move)): move for move in moves(state)}
        move = legal.get(step.strip())
        if move is None:
            return False
        state = apply(state, move)
    return state == (problem.target,)


def _search(rng: Random, state: State, target: int, words: list[str]) -> list[Move] | None:
    words += _show(state)
    for move in _order(rng, moves(state)):
        words += _spell(move)
        if len(state) == 2:
            words += [str(target), "!" if move[3] == target else "x"]
            if move[3] == target:
                return [move]
        else:
            rest = _search(rng, apply(state, move), target, words)
            if rest is not None:
                return [move, *rest]
            words += _show(state)
    return None


def _order(rng: Random, remaining: list[Move]) -> Iterator[Move]:
    remaining = list(remaining)
    while remaining:
        first = rng.random() < CANONICAL_FIRST
        yield remaining.pop(0 if first else rng.randrange(len(remaining)))


def _show(state: State) -> list[str]:
    return [f"S{len(state)}", *map(str, state), ":"]


def _spell(move: Move) -> list[str]:
    a, op, b, result = move
    return [str(a), op, str(b), "=", str(result)]


def _words(items: State | list[str]) -> str:
    return " ".join(map(str, items))
