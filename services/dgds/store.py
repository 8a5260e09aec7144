"""Token streams of all groups: appends from engines in, deltas for draft clients out.

Invariants (tests/property/test_dgds_store.py asserts them):
- a stream is what its newest attempt wrote, and beyond that what earlier attempts wrote, as long as
  the two agree: at the first differing token all that older attempts wrote from there on is cut;
- appends are idempotent: known tokens are skipped, equal re-sends change nothing, appends of
  older attempts are ignored; one that would leave a hole is refused with the length to resume from;
- a reader that applies every delta (cut to `previous` tokens, then append) holds exactly the
  stream, however it interleaves with writers; deltas never pass the bound they were asked with;
- the tokens held, with a charge per stream and group, never pass `max_tokens`: groups go whole,
  least recently touched first; a group also goes when nobody touched it for its time to live.

Cuts are told by revisions: each new stream and each cut takes the next number of the store, a
reader shows the revision it holds, and gets everything from the first position that was cut since.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

OVERHEAD_TOKENS = 128
"""Charge for a stream's and for a group's objects: about 500 bytes, in tokens of 4 bytes."""

MAX_CUTS = 8
"""Cuts remembered per stream; merging older ones only makes readers fetch more than they need."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Cut response `index` to `previous` tokens, then append `tokens`; you then hold `revision`."""

    index: int
    revision: int
    previous: int
    tokens: Tokens


@dataclass(slots=True)
class _Stream:
    """`attempt` is the newest writer, `written` how far it wrote; `cuts` are (revision, position).

    Both rise along `cuts`: a cut makes later ones at or behind its position irrelevant.
    """

    attempt: int
    cuts: list[tuple[int, int]]
    written: int = 0
    # array("i"), not numpy: amortised growth within 7 % of the size, in one C call.
    tokens: array[int] = field(default_factory=lambda: array("i"))

    def cut(self, position: int, revision: int) -> None:
        del self.tokens[position:]
        while self.cuts and self.cuts[-1][1] >= position:
            self.cuts.pop()
        self.cuts.append((revision, position))
        if len(self.cuts) > MAX_CUTS:
            self.cuts[1:3] = [(self.cuts[2][0], self.cuts[1][1])]

    def valid(self, revision: int, length: int) -> int:
        """Return how many of a reader's tokens are still the stream's."""
        for cut, position in self.cuts:
            if cut > revision:
                return min(length, position)
        return min(length, len(self.tokens))


@dataclass(slots=True)
class _Group:
    ttl_seconds: float
    touched: float
    streams: dict[int, _Stream] = field(default_factory=dict)

    @property
    def size(self) -> int:
        held = sum(len(stream.tokens) + OVERHEAD_TOKENS for stream in self.streams.values())
        return held + OVERHEAD_TOKENS


class Store:
    """See the module's docstring. `now` is monotonic seconds; `counters` are totals."""

    def __init__(self, max_tokens: int, ttl_seconds: float) -> None:
        self.counters: Counter[str] = Counter()
        self.held = 0
        self._max_tokens = max_tokens
        self._ttl_seconds = ttl_seconds
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._revision = 0

    def __len__(self) -> int:
        return len(self._groups)

    def register(self, group_id: str, ttl_seconds: float, now: float) -> None:
        """Keep a group's streams for `ttl_seconds` after they were last touched."""
        self._touch(group_id, now).ttl_seconds = ttl_seconds
        self._make_room()

    def append(
        self, group_id: str, index: int, attempt: int, previous: int, tokens: Tokens, now: float
    ) -> int | None:
        """Add int32 tokens from output position `previous`; an unknown group is registered.

        Returns None when they are held, or were ignored as an older attempt's; otherwise the
        number of tokens that can be built upon: send again from there.
        """
        group = self._touch(group_id, now)
        stream = group.streams.get(index)
        if stream is None:
            if previous > 0:
                self._make_room()
                return self._gap(0)
            stream = group.streams[index] = _Stream(attempt, [(self._next_revision(), 0)])
            self.held += OVERHEAD_TOKENS
        if attempt < stream.attempt:
            self.counters["stale"] += 1
            return None
        usable = stream.written if attempt == stream.attempt else len(stream.tokens)
        if previous > usable:
            return self._gap(usable)
        before = len(stream.tokens)
        self._write(stream, attempt, previous, tokens)
        self.held += len(stream.tokens) - before
        if self.held > self._max_tokens:
            self._make_room()
        return None

    def deltas(
        self, group_id: str, have: Mapping[int, tuple[int, int]], most_tokens: int, now: float
    ) -> tuple[list[Delta], bool] | None:
        """Return what a reader lacks, and whether `most_tokens` cut it short; None: unknown group.

        `have` is response index -> (revision, tokens) as of the deltas applied so far.
        """
        if group_id not in self._groups:
            return None
        found: list[Delta] = []
        for index, stream in self._touch(group_id, now).streams.items():
            revision = stream.cuts[-1][0]
            known, length = have.get(index, (0, 0))
            start = stream.valid(known, length)
            if start == len(stream.tokens) and (start == length or known == revision):
                continue
            if most_tokens <= 0:
                return found, True
            part = stream.tokens[start : start + most_tokens]
            most_tokens -= len(part)
            found.append(Delta(index, revision, start, np.frombuffer(part, dtype=np.int32)))
            if start + len(part) < len(stream.tokens):
                return found, True
        return found, False

    def tokens(self, group_id: str, index: int) -> list[int] | None:
        """Return a copy of one stream, None if there is none."""
        group = self._groups.get(group_id)
        stream = group.streams.get(index) if group else None
        return stream.tokens.tolist() if stream else None

    def expire(self, now: float) -> None:
        """Drop the groups whose time to live is over."""
        over = [name for name, group in self._groups.items() if now - group.touched > group.ttl_seconds]
        for group_id in over:
            self._drop(group_id)
        self.counters["expired"] += len(over)

    def _write(self, stream: _Stream, attempt: int, previous: int, tokens: Tokens) -> None:
        if attempt > stream.attempt:
            stream.attempt, stream.written = attempt, previous
        count = len(tokens)
        overlap = min(len(stream.tokens) - previous, count)
        if overlap:
            held = np.frombuffer(stream.tokens[previous : previous + overlap], dtype=np.int32)
            differs = held != tokens[:overlap]
            if differs.any():
                overlap = int(differs.argmax())
                stream.cut(previous + overlap, self._next_revision())
                stream.written = min(stream.written, previous + overlap)
                self.counters["cuts"] += 1
            self.counters["repeated_tokens"] += overlap
        stream.tokens.frombytes((tokens[overlap:] if overlap else tokens).tobytes())
        stream.written = max(stream.written, previous + count)
        self.counters["tokens"] += count - overlap

    def _gap(self, have: int) -> int:
        self.counters["gaps"] += 1
        return have

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def _touch(self, group_id: str, now: float) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group(self._ttl_seconds, now)
            self.held += OVERHEAD_TOKENS
        group.touched = now
        self._groups.move_to_end(group_id)
        return group

    def _make_room(self) -> None:
        while self.held > self._max_tokens:
            self._drop(next(iter(self._groups)))
            self.counters["evicted"] += 1

    def _drop(self, group_id: str) -> None:
        self.held -= self._groups.pop(group_id).size
