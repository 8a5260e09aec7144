"""Several draft paths of one request as one flat draft, which is all that vLLM's scheduler knows of.

Invariants (tests/property/test_draft_paths.py asserts them):
- `split(join(paths))` is `paths` without empty ones, and a flat draft cut off anywhere keeps whole
  paths but for the last;
- a flat draft has as many entries as verifying its paths takes rows beyond the first: each path after
  the first repeats the token before it, and its separator pays for that row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SEPARATOR = -2
"""Between two paths; no token, and not vLLM's -1, which pads drafts."""


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
