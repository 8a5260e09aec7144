"""The chunks that run, by engine, and about how many tokens they have by now.

A chunk's tokens come when it ends, which may take a minute. But engines report every second how many tokens
they have generated in all. What an engine has not returned of them is in the chunks that run there, split by
how long each has run since it last returned tokens: requests of one batch are about equally fast.

Invariants (tests/unit/test_running_chunks.py):
- an estimate is from 0 to what the chunk may still generate;
- all of an engine's estimates together are at most what it generated and did not return;
- nothing is left over from chunks that are gone: where none runs, there are no tokens.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from seer.common.policy.length import Estimate

RATE_REPORTS = 6
"""Reports of an engine over which its rate is taken: five seconds."""


@dataclass(slots=True)
class RunningChunk:
    """One placement since `started`. It may generate `left` more tokens since it returned some at `since`.

    `estimate` is its group's as it began; `context` the tokens that its request has, prompt and all, without
    those that are not returned.
    """

    attempt: int
    started: float
    since: float
    left: int
    estimate: Estimate | None = None
    context: int = 0


class Stretch(NamedTuple):
    """What an engine did between two reports: `tokens` in so many `seconds`.

    `requests` ran there, which had `kv_tokens` all together: means of both ends.
    """

    seconds: float
    tokens: int
    requests: float
    kv_tokens: float


@dataclass(slots=True)
class _Engine:
    """`elsewhere`: of the tokens that it generated, those that no chunk which runs there has.

    `contexts`: the sum over its chunks; `load`: its requests and their KV tokens at the last report.
    """

    chunks: dict[str, RunningChunk] = field(default_factory=dict)
    reports: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_REPORTS))
    elsewhere: int | None = None
    contexts: int = 0
    load: tuple[int, int] = (0, 0)

    @property
    def unreturned(self) -> int:
        """Tokens of the chunks that run, as of the last report."""
        if not self.reports or self.elsewhere is None:
            return 0
        return max(0, self.reports[-1][1] - self.elsewhere)

    def pop(self, request_id: str) -> RunningChunk | None:
        """Forget a chunk, and return it."""
        if chunk := self.chunks.pop(request_id, None):
            self.contexts -= chunk.context
        return chunk


class RunningChunks:
    """See the module's docstring. Times are seconds of the buffer's clock; chunks are named by request."""

    def __init__(self) -> None:
        self._engines: defaultdict[str, _Engine] = defaultdict(_Engine)

    @property
    def engines(self) -> list[str]:
        """Engines that something is known of."""
        return list(self._engines)

    def requests(self, engine: str) -> list[str]:
        """Return the requests whose chunks run on an engine."""
        return list(self._engines[engine].chunks) if engine in self._engines else []

    def of(self, engine: str, request_id: str) -> RunningChunk | None:
        """Return a chunk that runs."""
        return self._engines[engine].chunks.get(request_id) if engine in self._engines else None

    def began(self, engine: str, request_id: str, chunk: RunningChunk) -> None:
        """Note a chunk."""
        known = self._engines[engine]
        if not known.chunks:
            known.reports.clear()  # an engine's rate is that of work
        known.pop(request_id)
        known.chunks[request_id] = chunk
        known.contexts += chunk.context

    def returned(self, engine: str, request_id: str, attempt: int, count: int, now: float) -> None:
        """Note that tokens of a chunk came; those of a chunk that was dropped are counted already."""
        chunk = self.of(engine, request_id)
        if chunk is None or chunk.attempt != attempt:
            return
        count = max(0, count)
        chunk.since, chunk.left = now, max(0, chunk.left - count)
        known = self._engines[engine]
        chunk.context += count
        known.contexts += count
        if known.elsewhere is not None:
            known.elsewhere += count

    def ended(self, engine: str, request_id: str) -> RunningChunk | None:
        """Forget a chunk whose tokens came, and return it."""
        known = self._engines.get(engine)
        return known.pop(request_id) if known else None

    def dropped(self, engine: str, request_id: str, seen: InFlight) -> RunningChunk | None:
        """Forget a chunk whose tokens will not come, and return it.

        Chunks that end at once share what is `seen`: to look at all of an engine's for each takes seconds.
        """
        known = self._engines.get(engine)
        if known is None or request_id not in known.chunks:
            return None
        if known.elsewhere is not None:
            known.elsewhere += int(seen.tokens(engine, request_id))
        return known.pop(request_id)

    def gone(self, engine: str) -> list[str]:
        """Forget an engine, and return the requests whose chunks ran there."""
        known = self._engines.pop(engine, None)
        return list(known.chunks) if known else []

    def reported(self, engine: str, generated: int, now: float) -> Stretch | None:
        """Take an engine's count of all tokens that it has generated; return what it did since the last.

        None: it had no work, or it is not known since when it has some.
        """
        known = self._engines[engine]
        last = known.reports[-1] if known.reports else None
        known.reports.append((now, generated))
        if known.elsewhere is None or not known.chunks:
            known.elsewhere = generated  # what it made before it was known, or for chunks that were dropped
        known.elsewhere = min(known.elsewhere, generated)
        (rows, kv), known.load = known.load, (len(known.chunks), known.contexts + known.unreturned)
        if last is None or not known.chunks:
            return None
        seconds, tokens = now - last[0], generated - last[1]
        return Stretch(seconds, tokens, (rows + known.load[0]) / 2, (kv + known.load[1]) / 2)

    def rate(self, engine: str) -> float:
        """Return an engine's tokens/s over its last reports; 0: unknown."""
        known = self._engines.get(engine)
        if known is None or len(known.reports) < 2:
            return 0.0
        (first, before), (last, after) = known.reports[0], known.reports[-1]
        return max(0, after - before) / max(last - first, 1e-3)

    def spread(self, engine: str, now: float) -> float:
        """Return the tokens of an engine's chunks per second for which they ran since they returned some."""
        known = self._engines[engine]
        if not known.unreturned:
            return 0.0
        seconds = sum(max(0.0, now - each.since) for each in known.chunks.values())
        return known.unreturned / seconds if seconds > 0 else 0.0


class InFlight:
    """About how many tokens the chunks that run at `now` have, which they have not returned."""

    def __init__(self, running: RunningChunks, now: float) -> None:
        self._running, self._now = running, now
        self._spread: dict[str, float] = {}

    def tokens(self, engine: str, request_id: str) -> float:
        """Return the tokens of a request's chunk; 0 if none runs there."""
        chunk = self._running.of(engine, request_id)
        if chunk is None:
            return 0.0
        if engine not in self._spread:
            self._spread[engine] = self._running.spread(engine, self._now)
        return min(self._spread[engine] * max(0.0, self._now - chunk.since), float(chunk.left))
