"""The group tree in plain Python: what `seer._native.GroupTree` must do, to the bit.

`ReferenceTree` keeps the same lists of places as the native tree, in a dict by context instead of by
hash. `brute_matches` keeps nothing: it finds the same places by comparing a context with every token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LEVELS = (1, 2, 4, 8, 16, 32)
MOST_PLACES = 15
"""Places kept per context: the newest."""
MOST_MATCHES = 16
MOST_FORKS = 4
ESCAPE = 2


@dataclass
class Token:
    """One appended token, linked to the one before it and to the first that came after it."""

    value: int
    owner: int | None
    before: Token | None
    after: Token | None = None

    def context(self, most: int) -> list[int]:
        """Return up to `most` tokens before this one, newest first."""
        found: list[int] = []
        token = self.before
        while token is not None and len(found) < most:
            found.append(token.value)
            token = token.before
        return found


@dataclass
class Places:
    """Tokens that followed one context: all that were ever added here, oldest first."""

    tokens: list[Token] = field(default_factory=list)

    def newest(self) -> list[Token]:
        return self.tokens[: -MOST_PLACES - 1 : -1]


Match = tuple[int, Token]


class ReferenceTree:
    """See `GroupTree` in seer/_native.pyi; errors are left to the native tree."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self.arrived: list[Token] = []
        self._places: dict[tuple[int, ...], Places] = {}
        self._streams: dict[int, list[Token]] = {}
        self._prompt: list[Token] = []
        for value in prompt:
            self._add(self._prompt, None, self._prompt[-1] if self._prompt else None, value)

    def append(self, request_id: int, prev_token_count: int, tokens: Sequence[int]) -> None:
        stream = self._streams.setdefault(request_id, [])
        for i, value in enumerate(tokens, prev_token_count):
            if i < len(stream) and stream[i].value == value:
                continue
            del stream[i:]
            prompt_end = self._prompt[-1] if self._prompt else None
            self._add(stream, request_id, stream[-1] if stream else prompt_end, value)

    def output(self, request_id: int) -> list[int]:
        return [token.value for token in self._streams[request_id]]

    def context(self, request_id: int) -> list[int]:
        return [token.value for token in self._prompt] + self.output(request_id)

    def matches(self, context: Sequence[int]) -> list[Match]:
        newest_first = list(context[: -LEVELS[-1] - 1 : -1])
        levels: list[Places] = []
        for length in LEVELS:
            places = self._places.get(tuple(newest_first[:length]))
            if len(newest_first) < length or places is None:
                break
            levels.append(places)
        found: list[Match] = []
        for places in reversed(levels):
            for token in places.newest():
                if len(found) < MOST_MATCHES and all(token is not known for _, known in found):
                    found.append((matched_length(token, newest_first), token))
        return found

    def draft(
        self,
        context: Sequence[int],
        max_tokens: int,
        top_k: int = 1,
        min_score: float = 0.0,
        max_depth: int | None = None,
        own: int | None = None,
    ) -> list[tuple[int, int, float]]:
        """Return (token, parent, score) of every drafted token."""
        drafted: list[tuple[int, int, float]] = []
        matches = {-1: self.matches(context)}
        paths: dict[int, list[int]] = {-1: []}
        heap: list[tuple[float, int, int, int]] = []
        leaves = 0

        def propose(parent: int) -> None:
            if not matches[parent]:
                matches[parent] = self.matches([*context, *paths[parent]])
            score = 1.0 if parent < 0 else drafted[parent][2]
            weights: dict[int, int] = {}
            for length, token in matches[parent]:
                weight = length**3 * (2 if own is not None and token.owner == own else 1)
                weights[token.value] = weights.get(token.value, 0) + weight
            total = sum(weights.values()) + ESCAPE
            best = sorted(weights.items(), key=lambda item: -item[1])  # stable: first seen of equals
            for value, weight in best[: min(top_k, MOST_FORKS)]:
                if score * (weight / total) >= min_score:
                    heapq.heappush(heap, (-score * (weight / total), next(order), parent, value))

        order: Iterator[int] = iter(range(10**6))
        propose(-1)
        while heap and len(drafted) < max_tokens:
            negative, _, parent, value = heapq.heappop(heap)
            forks = parent < 0 or any(known == parent for _, known, _ in drafted)
            if forks and leaves == top_k:
                continue
            leaves += forks
            index = len(drafted)
            drafted.append((value, parent, -negative))
            paths[index] = [*paths[parent], value]
            matches[index] = [
                (length, token.after)
                for length, token in matches[parent]
                if token.value == value and token.after is not None
            ]
            if len(paths[index]) < (max_depth or max_tokens):
                propose(index)
        return drafted

    def _add(self, stream: list[Token], owner: int | None, before: Token | None, value: int) -> None:
        token = Token(value, owner, before)
        if before is not None and before.owner == owner and before.after is None:
            before.after = token
        newest_first = token.context(LEVELS[-1])
        for length in LEVELS:
            if len(newest_first) < length:
                break
            places = self._places.setdefault(tuple(newest_first[:length]), Places())
            places.tokens.append(token)
            if len(places.tokens) <= MOST_PLACES:
                break
        stream.append(token)
        self.arrived.append(token)


def matched_length(token: Token, newest_first: Sequence[int]) -> int:
    """Return how many tokens before `token` equal the context's newest."""
    length = 0
    for mine, theirs in zip(token.context(LEVELS[-1]), newest_first, strict=False):
        if mine != theirs:
            break
        length += 1
    return length


def brute_matches(arrived: Sequence[Token], context: Sequence[int]) -> list[Match]:
    """Return what `ReferenceTree.matches` returns, from the tokens in their order of arrival alone.

    A level's places are those that match its length, but for the first MOST_PLACES of the level
    before: while those arrived, there was no need of longer contexts.
    """
    newest_first = list(context[: -LEVELS[-1] - 1 : -1])
    lengths = [(matched_length(token, newest_first), token) for token in arrived]
    found: list[Match] = []
    candidates, levels = lengths, []
    for length in LEVELS:
        candidates = [(matched, token) for matched, token in candidates if matched >= length]
        levels.append(candidates[-MOST_PLACES:])
        candidates = candidates[MOST_PLACES:]
    for level in reversed(levels):
        for matched, token in reversed(level):
            if len(found) < MOST_MATCHES and all(token is not known for _, known in found):
                found.append((matched, token))
    return found
