"""Token streams like those of a group of responses: habits of language, of group and of self.

A response is a chain of four kinds of spans: phrases that every group uses; walks through statements of
its group, some slots of which have alternatives that a request tends to choose alike; copies of what it
generated before; and tokens drawn anew. The vocabulary has 151k. Shares are set so that linear drafts of 8
accept about as many tokens as the paper reports: 1.7 a step from a response alone, 2.5 with 15 siblings.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 151_000
PHRASES, STATEMENTS = 20_000, 3_000
SHARES = {"phrase": 0.33, "statement": 0.49, "copy": 0.14, "new": 0.04}
ALTERNATIVES = (0.65, 0.22, 0.09, 0.04)
VARIABLE_SLOTS = 0.18
STICKY = 0.35  # how often a request repeats its own choice in a slot
SLIP = 0.015  # tokens replaced by any other
STATEMENT_TOKENS, PART_TOKENS = 40, 14.0


def zipf_table(rng: np.random.Generator, items: int, exponent: float) -> list[int]:
    """Return 65,536 draws of a Zipf distribution: drawing from them is one look-up."""
    weights = 1.0 / np.arange(1, items + 1) ** exponent
    return rng.choice(items, 2**16, p=weights / weights.sum()).tolist()


@dataclass(frozen=True)
class Group:
    """Statements: rows of slots, each of which holds its alternatives."""

    slots: NDArray[np.int32]  # [statements, tokens, alternatives]
    variable: NDArray[np.bool_]  # [statements, tokens]


class Language:
    """What all groups share. `seed` decides everything."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        names = rng.permutation(VOCABULARY)
        self._tokens = names[zipf_table(rng, VOCABULARY, 1.05)].astype(np.int32)
        self._phrase_of, self._statement_of = zipf_table(rng, PHRASES, 1.2), zipf_table(rng, STATEMENTS, 1.2)
        self._phrases = [rng.choice(self._tokens, int(rng.integers(2, 8))).tolist() for _ in range(PHRASES)]

    def group(self, seed: int, responses: int, tokens: int) -> list[NDArray[np.int32]]:
        """Return `responses` int32 arrays of `tokens` tokens each."""
        rng = np.random.default_rng(seed)
        shape = (STATEMENTS, STATEMENT_TOKENS)
        group = Group(rng.choice(self._tokens, (*shape, 4)), rng.random(shape) < VARIABLE_SLOTS)
        return [self._response(group, random.Random(seed * 1000 + i), tokens) for i in range(responses)]

    def _response(self, group: Group, rng: random.Random, tokens: int) -> NDArray[np.int32]:
        out: list[int] = []
        habits: dict[tuple[int, int], int] = {}
        kinds, shares = list(SHARES), list(SHARES.values())
        while len(out) < tokens:
            kind = rng.choices(kinds, shares)[0]
            if kind == "phrase":
                out += self._phrases[rng.choice(self._phrase_of)]
            elif kind == "statement":
                out += self._slipped(self._walk(group, rng, habits), rng)
            elif kind == "copy" and len(out) > 64:
                start = len(out) - min(len(out), 32 + int(rng.lognormvariate(6, 1.3)))
                out += self._slipped(out[start : start + 3 + int(rng.lognormvariate(2.1, 0.8))], rng)
            else:
                out += [self._any(rng) for _ in range(1 + int(rng.expovariate(0.5)))]
        return np.array(out[:tokens], dtype=np.int32)

    def _walk(self, group: Group, rng: random.Random, habits: dict[tuple[int, int], int]) -> list[int]:
        statement = rng.choice(self._statement_of)
        start = rng.randrange(20) if rng.random() < 0.25 else 0
        tokens = []
        for place in range(start, min(STATEMENT_TOKENS, start + 1 + int(rng.expovariate(1 / PART_TOKENS)))):
            choice = 0
            if group.variable[statement, place]:
                choice = rng.choices(range(4), ALTERNATIVES)[0]
                habit = habits.setdefault((statement, place), choice)
                choice = habit if rng.random() < STICKY else choice
            tokens.append(int(group.slots[statement, place, choice]))
        return tokens

    def _slipped(self, tokens: list[int], rng: random.Random) -> list[int]:
        return [self._any(rng) if rng.random() < SLIP else token for token in tokens]

    def _any(self, rng: random.Random) -> int:
        return int(self._tokens[rng.getrandbits(16)])
