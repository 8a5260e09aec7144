"""How the tokens of a step become rows of attention if its requests verify several draft paths.

A flat draft (`common/policy/draft_paths.py`) has its paths one after the other; each begins with the token before
the draft, in its separator's place. To attention each path is a row of its own.

Invariants (tests/property/test_path_layout.py asserts them):
- rows have all of a step's tokens, in their order, and a request's rows follow each other;
- a token of a further path stands where it would stand if its path were the only one;
- a request gets rows for all of its paths or for none: without them it verifies its first path alone, and what
  follows is computed as if it were drafted after it, and counts as rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from seer.common.policy.draft_paths import SEPARATOR

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PathLayout:
    """The rows of a step's requests, and its paths, which are rows of logits.

    `owners`, `lengths`, `shorter` [rows]: a row's request, its tokens, and by how much its context ends before that
    of all of its request's tokens. `shift` [tokens]: by how much a token's position is before that in one chain.
    `further` [paths besides first ones]: their rows. `drafts` [paths]: tokens of each; request i may keep the
    `choices[i]` paths from `firsts[i]` on. `dropped`: paths that no row verifies.
    """

    owners: Ints
    lengths: Ints
    shorter: Ints
    shift: Ints
    further: Ints
    drafts: Ints
    firsts: Ints
    choices: Ints
    dropped: int


def separators(drafts: Mapping[str, Sequence[int]], requests: Sequence[str]) -> dict[int, list[int]]:
    """Return the places of separators in the drafts of those requests, by index, whose drafts have any."""
    return {
        index: [place for place, token in enumerate(drafts[name]) if token == SEPARATOR]
        for index, name in enumerate(requests)
        if SEPARATOR in drafts.get(name, ())
    }


def lay_out(
    lengths: Sequence[int], logits: Sequence[int], places: Mapping[int, Sequence[int]], alone: Collection[int], room: int
) -> PathLayout:
    """Lay out requests with so many tokens, of which the last `logits` have logits.

    `places`: see `separators`. Those in `alone` verify one path; `room`: rows that there may be for further paths.
    """
    owners, sizes, shorter, further = [], [], [], []
    shift, drafts, firsts, choices, dropped = [], [], [], [], 0
    for request, (length, rows) in enumerate(zip(lengths, logits, strict=True)):
        starts = [0, *(place + 1 for place in places.get(request, ()))]
        paths = [end - start for start, end in pairwise([*starts, rows])]
        firsts.append(len(drafts))
        drafts += [path - 1 for path in paths]
        begun = length - rows
        if len(paths) > 1 and (request in alone or len(paths) - 1 > room):
            dropped += len(paths) - 1
            starts, paths = starts[:1], [rows]
        choices.append(len(paths))
        room -= len(paths) - 1
        further += range(len(owners) + 1, len(owners) + len(paths))
        owners += [request] * len(paths)
        sizes += [begun + paths[0], *paths[1:]]
        shorter += [rows - path for path in paths]
        shift += [0] * begun + [start for start, path in zip(starts, paths, strict=True) for _ in range(path)]
    return PathLayout(
        *(np.array(each, np.int64) for each in (owners, sizes, shorter, shift, further, drafts, firsts, choices)), dropped
    )
