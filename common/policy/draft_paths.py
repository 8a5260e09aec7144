"""Several draft paths of one request: which pay, and how they are sent as one flat draft.

vLLM's scheduler only knows flat drafts. An extra path costs its tokens, the token before its tokens once
more, and the bookkeeping of a row. An extra path gains where that path is accepted and the first path is not.
So extra paths pay in small batches, at uncertain forks, on hardware where rows are cheap.

Invariants (tests/property/test_draft_paths.py asserts them):
- `split(join(paths))` is `paths` without empty ones, and a flat draft cut off anywhere keeps whole
  paths but for the last;
- a flat draft has as many entries as verifying its paths takes rows beyond the first: each path after
  the first repeats the token before it, and its separator pays for that row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seer.common.policy.draft_budget import COST_FACTOR
from seer.common.policy.draft_costs import StepCosts

SEPARATOR = -2
"""Stands between two paths: neither a token id nor vLLM's -1, which pads drafts."""

DEFAULT_PATHS = 3
"""Most paths of a request unless configured: more bring little."""

CHEAP_SHARE = 0.05
"""By default there are extra paths only if one adds no more than this share of a step: choosing them costs
1 or 2 %."""


def most_paths(costs: StepCosts, configured: int | None) -> int:
    """Return how many paths a request may have: as configured, else 1 unless extra paths are cheap."""
    cheap = costs.sibling <= CHEAP_SHARE * costs.seconds(1, 0)
    return configured or (DEFAULT_PATHS if cheap else 1)


class Entries(int):
    """How many entries each draft has of a step that is scheduled ahead, and on how many `paths`.

    All paths are equally long: with their separators they take one entry less than a multiple of `paths`.
    """

    paths: int

    def __new__(cls, entries: int, paths: int = 1) -> Entries:
        """Refuse, by a `ValueError`, what cannot be equally long paths of one token at least."""
        if entries and ((entries + 1) % paths or entries < 2 * paths - 1):
            raise ValueError(f"{entries} entries are no {paths} equal paths")
        made = super().__new__(cls, entries)
        made.paths = paths
        return made

    @property
    def each(self) -> int:
        """Tokens of each path."""
        return (self + 1) // self.paths - 1


def paths_in(entries: int) -> int:
    """Return on how many paths drafts of so many entries are: one, if it is a number alone."""
    return getattr(entries, "paths", 1)


def path_rows(entries: int) -> int:
    """Return how many tokens each path of so many entries has in a step, the one before it included."""
    return (entries + 1) // paths_in(entries)


def placeholders(entries: int) -> list[int]:
    """Return a draft of so many entries, of which nothing but the places of separators is known yet."""
    each = path_rows(entries)
    return [SEPARATOR if place % each == 0 else -1 for place in range(1, entries + 1)]


def join(paths: Iterable[Sequence[int]]) -> list[int]:
    """Return paths as one flat draft, empty ones left out."""
    flat: list[int] = []
    for path in paths:
        if path:
            flat += [SEPARATOR, *path] if flat else path
    return flat


def split(flat: Sequence[int]) -> list[list[int]]:
    """Return the paths of a flat draft, cut anywhere; none of them is empty."""
    paths: list[list[int]] = [[]]
    for token in flat:
        if token == SEPARATOR:
            paths.append([])
        else:
            paths[-1].append(token)
    return [path for path in paths if path]


@dataclass(frozen=True, slots=True)
class Fork:
    """One request's drafted tree: `paths` of token indices, the first one kept for `keep` tokens.

    `chances` by index: P(the token and all before it are accepted). Extra paths may take `room` entries of
    the flat draft; each token of this request weighs `weight`.
    """

    paths: Sequence[Sequence[int]]
    chances: Sequence[float]
    keep: int
    room: int
    weight: float = 1.0


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """Return a drafted tree's paths as token indices, the first one along every token's best child.

    `parents` are indices of earlier tokens, -1 at the root; a token's better children come first.
    """
    inner = set(parents)
    best: dict[int, int] = {}
    for index, parent in enumerate(parents):
        best.setdefault(parent, index)
    first, at = [], best.get(-1)
    while at is not None:
        first.append(at)
        at = best.get(at)
    paths = [first] if first else []
    for leaf in range(len(parents)):
        if leaf not in inner and leaf != first[-1]:
            path, at = [], leaf
            while at >= 0:
                path.append(at)
                at = parents[at]
            paths.append(path[::-1])
    return paths


def extra_paths(
    forks: Sequence[Fork], seconds: Sequence[float], extra: float, others: float, most: int
) -> list[list[list[int]]]:
    """Return the paths to verify beside each fork's first, cut where their tokens stop paying.

    `seconds[k]` is the step's time with k drafted rows, to which every extra path adds `extra`; `others` is
    how many tokens the step generates without drafts, `most` how many extra paths there may be. The gain of a
    path is the sum of the chances of those of its tokens that no chosen path has. It must be `COST_FACTOR`
    times the tokens that the step would generate in the seconds that the path adds.
    """
    chosen: list[list[list[int]]] = [[] for _ in forks]
    held = [set(fork.paths[0][: fork.keep]) if fork.paths else set() for fork in forks]
    drafted = sum(map(len, held))
    gains = (fork.weight * sum(fork.chances[i] for i in kept) for fork, kept in zip(forks, held, strict=True))
    price = COST_FACTOR * (others + sum(gains)) / seconds[drafted]
    rooms = [fork.room for fork in forks]

    def cut(at: int, path: Sequence[int]) -> tuple[float, int]:
        """Return the highest value of a path's prefixes, and that prefix's length."""
        gain, best = 0.0, (0.0, 0)
        for length in range(1, min(len(path), rooms[at] - 1) + 1):
            token = path[length - 1]
            gain += 0.0 if token in held[at] else forks[at].weight * forks[at].chances[token]
            if drafted + 1 + length >= len(seconds):
                break
            worth = gain - price * (seconds[drafted + 1 + length] - seconds[drafted] + extra)
            best = max(best, (worth, length))
        return best

    ranked = sorted(
        (
            (cut(at, path)[0], at, place)
            for at, fork in enumerate(forks)
            for place, path in enumerate(fork.paths[1:], 1)
        ),
        key=lambda item: (-item[0], item[1:]),
    )
    for worth, at, place in ranked:
        if worth <= 0.0 or not most:
            break
        path = forks[at].paths[place]
        worth, length = cut(at, path)
        if worth > 0.0:
            chosen[at].append(list(path[:length]))
            held[at].update(path[:length])
            rooms[at] -= 1 + length
            drafted += 1 + length
            most -= 1
    return chosen
