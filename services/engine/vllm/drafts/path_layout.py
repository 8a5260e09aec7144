"""How the tokens of a step become rows of attention if its requests verify several draft paths.

A flat draft (`common/policy/draft_paths.py`) has its paths one after the other; each begins with the token
before the draft, in its separator's place. To attention each path is a row of its own.

Invariants (tests/property/test_path_layout.py asserts them):
- rows have all of a step's tokens, in their order, and a request's rows follow each other;
- a token of a further path stands where it would stand if its path were the only one;
- a request gets rows for all of its paths or for none. Without rows the request verifies its first path
  alone; tokens of further paths are computed as if drafted after the first path, and count as rejected.
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
    """The rows of a step's requests, and the paths of their drafts, which are rows of logits.

    `owners`, `lengths`, `paths` [rows]: a row's request, its tokens, and the path that it verifies. `shorter`
    [rows]: by how many tokens the row's context ends before the context of the request's last token. `shifts`
    [rows]: how many tokens after the token before the draft the row begins; 0: the request's first row.
    `drafts` [paths]: a path's tokens; request i may keep the `choices[i]` paths from `firsts[i]` on.
    `dropped`: paths without a row.
    """

    owners: Ints
    lengths: Ints
    paths: Ints
    shorter: Ints
    shifts: Ints
    drafts: Ints
    firsts: Ints
    choices: Ints
    dropped: int

    @property
    def further(self) -> Ints:
        """The rows that are not their requests' first ones."""
        return np.flatnonzero(self.shifts)


def separators(drafts: Mapping[str, Sequence[int]], requests: Sequence[str]) -> dict[int, list[int]]:
    """Return the places of separators in the drafts of those requests, by index, whose drafts have any."""
    return {
        index: [place for place, token in enumerate(drafts[name]) if token == SEPARATOR]
        for index, name in enumerate(requests)
        if SEPARATOR in drafts.get(name, ())
    }


def lay_out(
    lengths: Sequence[int],
    logits: Sequence[int],
    places: Mapping[int, Sequence[int]],
    alone: Collection[int],
    room: int,
) -> PathLayout:
    """Lay out requests with so many tokens, of which the last `logits` have logits.

    `places`: see `separators`. Requests in `alone` verify one path. `room`: rows that further paths may have.
    """
    rows: list[tuple[int, int, int, int, int]] = []
    drafts: list[int] = []
    requests: list[tuple[int, int]] = []
    dropped = 0
    for request, (length, count) in enumerate(zip(lengths, logits, strict=True)):
        starts = [0, *(place + 1 for place in places.get(request, ()))]
        sizes = [end - start for start, end in pairwise([*starts, count])]
        first, others = len(drafts), len(sizes) - 1
        drafts += [size - 1 for size in sizes]
        if others and (request in alone or others > room):
            dropped += others
            starts, sizes, others = [0], [count], 0
        room -= others
        requests.append((first, 1 + others))
        for place, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            before = 0 if place else length - count
            rows.append((request, before + size, first + place, count - size, start))
    owners, sizes_of, paths, shorter, shifts = np.array(rows, np.int64).reshape(-1, 5).T
    firsts, choices = np.array(requests, np.int64).reshape(-1, 2).T
    return PathLayout(
        owners, sizes_of, paths, shorter, shifts, np.array(drafts, np.int64), firsts, choices, dropped
    )
