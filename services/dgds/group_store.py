"""Token streams of all groups: engines append to streams, and fetch as deltas what other engines appended.

Invariants (tests/property/test_dgds_store.py asserts them):
- a stream holds what its newest attempt wrote, followed by what earlier attempts wrote beyond that, as long
  as the two agree: from the first token on that differs, what older attempts wrote is cut;
- appends are idempotent: known tokens are skipped, equal re-sends change nothing, appends of older attempts
  are ignored; an append that would leave a gap is refused with the length to resume from;
- a reader that applies every delta (cut to `previous` tokens, then append) holds exactly the
  stream, however it interleaves with writers; deltas never exceed the bound that was asked for;
- the tokens held, plus an overhead per stream and group, never exceed `max_tokens`: the least recently used
  groups are dropped, and those that nobody used for their time to live;
- with a `PastGroups`, a group's streams move there when it is dropped, or when another group of its prompt is
  registered; readers of a group also get those of its prompt, as streams from `MAX_GROUP_SIZE` on.

A revision tells a reader of cuts: each new stream and each cut takes the next number of the store; a reader
sends the revision it holds, and gets everything from the first position that was cut since.

Streams are packed (see `packing`): they are stored and sent as they arrived.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from seer.common.wire import MAX_GROUP_SIZE, TOKEN_BYTES
from seer.services.dgds.packing import unpack
from seer.services.dgds.past_groups import OVERHEAD_TOKENS, PastGroups

IN_USE_SECONDS = 10.0
"""A group that was read or appended to within so long is being generated: dropping it costs drafts."""

Packed = bytes | bytearray | memoryview

MAX_CUTS = 8
"""Cuts remembered per stream; merging older ones only makes readers fetch more than they need."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Cut stream `index` to `previous` tokens, then append `tokens`; you then hold `revision`."""

    index: int
    revision: int
    previous: int
    tokens: bytes

    @property
    def count(self) -> int:
        """How many tokens are appended."""
        return len(self.tokens) // TOKEN_BYTES


class GroupDeltas(NamedTuple):
    """The deltas that a reader of a group lacks; not `complete` if the bound cut them short.

    `visited`: how many streams were read for it, plus one for the group.
    """

    deltas: list[Delta]
    complete: bool
    visited: int


@dataclass(slots=True)
class _Stream:
    """`attempt` is the newest writer's, `written` how far it wrote; `cuts` are (revision, position).

    Both rise along `cuts`: a cut replaces earlier ones at its position or behind it.
    """

    attempt: int
    cuts: list[tuple[int, int]]
    written: int = 0
    tokens: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def revision(self) -> int:
        return self.cuts[-1][0]

    def cut(self, position: int, revision: int) -> None:
        del self.tokens[position * TOKEN_BYTES :]
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
        return min(length, len(self))


@dataclass(slots=True)
class _Group:
    ttl_seconds: float
    touched: float
    prompt: int = 0
    streams: dict[int, _Stream] = field(default_factory=dict)

    @property
    def size(self) -> int:
        held = sum(len(stream) + OVERHEAD_TOKENS for stream in self.streams.values())
        return held + OVERHEAD_TOKENS


class Store:
    """See the module's docstring. Groups and prompts are digests (see `packing`).

    `now` is monotonic seconds; `counters` are totals.
    """

    def __init__(self, max_tokens: int, ttl_seconds: float, past: PastGroups | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self.held = 0
        self._max_tokens = max_tokens
        self._ttl_seconds = ttl_seconds
        self._past = past
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        self._newest: dict[int, int] = {}  # the live group that was last registered for a prompt
        self._touched = -1  # the group that is the last of `_groups`
        self._revision = 0
        self._dropped_in_use = 0

    def __len__(self) -> int:
        return len(self._groups)

    def register(self, group: int, ttl_seconds: float, now: float, prompt: int = 0) -> None:
        """Keep a group for `ttl_seconds` (0: the default) after it was last touched; `prompt` 0: unknown."""
        held = self._touch(group, now)
        held.ttl_seconds = ttl_seconds or self._ttl_seconds
        if self._past is not None and prompt and not held.prompt:
            if (earlier := self._newest.get(prompt)) is not None:
                self._remember(self._groups[earlier])
            held.prompt, self._newest[prompt] = prompt, group
        self._make_room(now)

    def append(
        self, group: int, index: int, attempt: int, previous: int, tokens: Packed, now: float
    ) -> int | None:
        """Add packed tokens from output position `previous`; an unknown group is registered.

        Returns None when they are held, or were ignored as an older attempt's; otherwise the
        number of tokens that can be built upon: send again from there.
        """
        held = self._groups.get(group)
        if held is None or group != self._touched or held.touched != now:
            held = self._touch(group, now)
        stream = held.streams.get(index)
        have = None
        if (
            stream is not None
            and stream.attempt == attempt
            and stream.written == previous
            and len(stream.tokens) == previous * TOKEN_BYTES
        ):  # the hot path: what comes next, and nothing else
            stream.tokens += tokens
            count = len(tokens) // TOKEN_BYTES
            stream.written += count
            self.held += count
        else:
            have = self._merge(held, index, attempt, previous, tokens)
        if self.held > self._max_tokens:
            self._make_room(now)
        return have

    def deltas(
        self,
        group: int,
        have: Mapping[int, tuple[int, int]],
        most_tokens: int,
        now: float,
        exclude: Collection[int] = (),
    ) -> GroupDeltas | None:
        """Return what a reader lacks, at most `most_tokens` of it; None: unknown group.

        `have` is stream index -> (revision, tokens) as of the deltas applied so far. Responses in
        `exclude` are not wanted.
        """
        if group not in self._groups:
            return None
        held = self._touch(group, now)
        found = GroupDeltas([], True, len(held.streams) + 1)
        for index, stream in held.streams.items():
            if index in exclude:
                continue
            known, length = have.get(index, (0, 0))
            start, end = stream.valid(known, length), len(stream)
            if start == end and (start == length or known == stream.revision):
                continue
            if most_tokens <= 0:
                return found._replace(complete=False)
            end = min(end, start + most_tokens)
            most_tokens -= end - start
            part = bytes(stream.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
            found.deltas.append(Delta(index, stream.revision, start, part))
            if end < len(stream):
                return found._replace(complete=False)
        return self._add_past(held.prompt, have, most_tokens, found)

    def tokens(self, group: int, index: int) -> list[int] | None:
        """Return a copy of one stream, None if there is none."""
        held = self._groups.get(group)
        stream = held.streams.get(index) if held else None
        return unpack(stream.tokens).tolist() if stream is not None else None

    def expire(self, now: float) -> None:
        """Drop the groups whose time to live is over."""
        over = [name for name, group in self._groups.items() if now - group.touched > group.ttl_seconds]
        for group in over:
            self._drop(group)
        self.counters["expired"] += len(over)

    def remember_all(self) -> None:
        """Put all groups' streams into the `PastGroups`."""
        for group in self._groups.values():
            self._remember(group)

    def restore(self, prompt: int, streams: tuple[bytes, ...]) -> None:
        """Put in the `PastGroups` what was saved before a restart."""
        if self._past is not None:
            self._past.put(prompt, streams, self._next_revision())

    def _merge(self, group: _Group, index: int, attempt: int, previous: int, tokens: Packed) -> int | None:
        stream = group.streams.get(index)
        if stream is None:
            if previous > 0:
                return self._gap(0)
            stream = group.streams[index] = _Stream(attempt, [(self._next_revision(), 0)])
            self.held += OVERHEAD_TOKENS
        elif attempt < stream.attempt:
            self.counters["stale"] += 1
            return None
        before = len(stream)
        usable = stream.written if attempt == stream.attempt else before
        if previous > usable:
            return self._gap(usable)
        self._write(stream, attempt, previous, tokens)
        self.held += len(stream) - before
        return None

    def _write(self, stream: _Stream, attempt: int, previous: int, tokens: Packed) -> None:
        if attempt > stream.attempt:
            stream.attempt, stream.written = attempt, previous
        count = len(tokens) // TOKEN_BYTES
        overlap = min(len(stream) - previous, count)
        if overlap:
            overlap = self._agreed(stream, previous, tokens[: overlap * TOKEN_BYTES])
            tokens = tokens[overlap * TOKEN_BYTES :]
        stream.tokens += tokens
        stream.written = max(stream.written, previous + count)

    def _agreed(self, stream: _Stream, previous: int, tokens: Packed) -> int:
        """Return how many of `tokens` the stream holds already; cut the stream where a token differs."""
        start = previous * TOKEN_BYTES
        held, count = stream.tokens[start : start + len(tokens)], len(tokens) // TOKEN_BYTES
        if held != tokens:
            differs = np.frombuffer(held, dtype=np.uint8) != np.frombuffer(tokens, dtype=np.uint8)
            count = int(differs.argmax()) // TOKEN_BYTES
            stream.cut(previous + count, self._next_revision())
            stream.written = min(stream.written, previous + count)
            self.counters["cuts"] += 1
        self.counters["repeated_tokens"] += count
        return count

    def _remember(self, group: _Group) -> None:
        if self._past is not None and group.prompt:
            streams = [bytes(stream.tokens) for stream in group.streams.values() if stream.tokens]
            self._past.put(group.prompt, streams, self._next_revision())

    def _add_past(
        self, prompt: int, have: Mapping[int, tuple[int, int]], most_tokens: int, found: GroupDeltas
    ) -> GroupDeltas:
        """Add what a reader lacks of the streams of its prompt's earlier group."""
        past = self._past.get(prompt) if self._past is not None and prompt else None
        if past is None:
            return found
        for index, stream in enumerate(past.streams, MAX_GROUP_SIZE):
            known, length = have.get(index, (0, 0))
            start = length if known == past.revision else 0
            part = stream[start * TOKEN_BYTES : (start + max(0, most_tokens)) * TOKEN_BYTES]
            if part:
                most_tokens -= len(part) // TOKEN_BYTES
                found.deltas.append(Delta(index, past.revision, start, part))
            if start * TOKEN_BYTES + len(part) < len(stream):
                return found._replace(complete=False)
        return found._replace(visited=found.visited + len(past.streams))

    def _gap(self, have: int) -> int:
        self.counters["gaps"] += 1
        return have

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def _touch(self, group: int, now: float) -> _Group:
        held = self._groups.get(group)
        if held is None:
            held = self._groups[group] = _Group(self._ttl_seconds, now)
            self.held += OVERHEAD_TOKENS
        held.touched = now
        self._groups.move_to_end(group)
        self._touched = group
        return held

    def crowded(self, now: float) -> str:
        """Return what is wrong with the room, if groups in use were dropped since this was last asked."""
        dropped, self._dropped_in_use = self._dropped_in_use, 0
        if not dropped:
            return ""
        streams = sum(len(it.streams) for it in self._groups.values() if now - it.touched < IN_USE_SECONDS)
        each = f"{self._max_tokens // max(1, streams)} tokens to each of {streams} responses in use"
        return f"dgds.max_tokens = {self._max_tokens} leaves {each}: {dropped} groups of theirs were dropped"

    def _make_room(self, now: float) -> None:
        while self.held > self._max_tokens:
            oldest, held = next(iter(self._groups.items()))
            self._dropped_in_use += now - held.touched < IN_USE_SECONDS
            self._drop(oldest)
            self.counters["evicted"] += 1

    def _drop(self, group: int) -> None:
        dropped = self._groups.pop(group)
        self.held -= dropped.size
        self._remember(dropped)
        if self._newest.get(dropped.prompt) == group:
            del self._newest[dropped.prompt]
