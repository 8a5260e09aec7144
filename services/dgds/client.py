"""What an engine embeds to feed and read the dgds. Generation never waits for it.

Invariants (tests/unit/test_dgds_client.py asserts them):
- `begin`, `append`, `register` and `forget` never block, never fail and hold bounded memory: past
  `max_retained_tokens`, the request that was not appended to for longest is dropped whole, counted;
- one `AppendBatch` per flush carries the new tokens of all requests; a flush happens when a request
  has `flush_tokens` new ones, and at most `flush_seconds` after the first;
- what was lost on the way is sent again: the dgds says what it lacks (`AppendGap`) at a request's
  next append, and a new life of it is sent everything retained;
- an absent dgds costs a counter and a log line.

Everything but `run` must be called on `run`'s event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from seer.common.channel import Channel, Identity
from seer.common.clock import Clock
from seer.common.config import EngineConfig
from seer.common.errors import SeerError, Unreachable
from seer.common.log import get_logger
from seer.common.transport.base import Transport
from seer.common.wire import messages as m
from seer.services.dgds.outputs import Outputs

MAX_RETAINED_TOKENS = 16_000_000
"""64 MiB of outputs kept for re-sending: more than an engine's KV cache commonly holds."""

MAX_BATCH_TOKENS = 2**18
"""Tokens in one message: 1 MiB; only re-sends come near."""

MAX_REGISTERING = 10_000
"""Groups that wait to be registered; older ones keep the dgds's default time to live."""

OPEN_SECONDS = 10.0
"""Longest handshake before the dgds counts as absent for now."""

RETRY_SECONDS = 1.0
"""Pause before an absent dgds is tried again."""

FETCH_SECONDS = 1.0
"""Default deadline of a fetch: stale drafts cost less than waiting longer."""


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """Cut response `index`'s stream to `previous` tokens, then append `tokens`."""

    group_id: str
    index: int
    previous: int
    tokens: m.Tokens


class DgdsClient:
    """See the module's docstring. `counters` are totals."""

    def __init__(
        self,
        transport: Transport,
        endpoint: str,
        identity: Identity,
        clock: Clock,
        config: EngineConfig,
        max_retained_tokens: int = MAX_RETAINED_TOKENS,
    ) -> None:
        self._outputs = Outputs(max_retained_tokens)
        self.counters: Counter[str] = self._outputs.counters
        self._channel: Channel[m.EngineToDgds, m.DgdsToEngine] = Channel(
            transport, endpoint, identity, m.DgdsToEngine, clock
        )
        self._clock = clock
        self._config = config
        self._log = get_logger()
        self._registering: dict[str, float] = {}
        self._some, self._urgent = asyncio.Event(), asyncio.Event()
        self._present = False
        self._life: int | None = None
        self._have: dict[str, dict[int, tuple[int, int]]] = {}
        self._fresh: list[StreamDelta] = []
        self._fetching, self._answered = asyncio.Lock(), asyncio.Event()
        self._truncated = False

    # --- writing -------------------------------------------------------------------------

    def register(self, group_ids: Iterable[str], ttl_seconds: float) -> None:
        """Have these groups kept for `ttl_seconds` after they were last touched."""
        self._registering.update(dict.fromkeys(group_ids, ttl_seconds))
        while len(self._registering) > MAX_REGISTERING:
            self._registering.pop(next(iter(self._registering)))
            self.counters["dropped_registrations"] += 1
        self._some.set()

    def begin(self, group_id: str, index: int, attempt: int, output: m.Tokens) -> None:
        """Start following one attempt of a response that has `output` (int32) so far.

        `output` is kept to fill gaps, and not copied.
        """
        self._outputs.begin((group_id, index), attempt, output)
        if self._outputs.unsent:
            self._some.set()

    def append(self, group_id: str, index: int, attempt: int, previous: int, tokens: Sequence[int]) -> None:
        """Add the tokens that follow the first `previous` output tokens of an attempt."""
        unsent = self._outputs.append((group_id, index), attempt, previous, tokens)
        self._some.set()
        if unsent >= self._config.flush_tokens:
            self._urgent.set()

    # --- connection ----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep connected, flush and listen until cancelled."""
        while True:
            try:
                self._join(await self._channel.open(OPEN_SECONDS))
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._listen())
                    tasks.create_task(self._flush_for_ever())
            except* SeerError as group:
                if not self.counters["absences"]:
                    self._log.warning("dgds absent, running on without it", error=str(group.exceptions[0]))
                self.counters["absences"] += 1
            self._present = False
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # A task group that fails while it is cancelled reports the failure alone (before 3.13).
                raise asyncio.CancelledError
            await self._clock.sleep(RETRY_SECONDS)

    async def close(self, seconds: float) -> None:
        """Send what is unsent if the dgds is there, say goodbye and disconnect. Never raises."""
        try:
            async with asyncio.timeout(seconds):
                if self._present:
                    await self._flush()
                    await self._channel.send(m.Goodbye())
        except (TimeoutError, Unreachable):
            self.counters["absences"] += 1
        self._present = False
        self._channel.close()

    def _join(self, welcome: m.Welcome) -> None:
        self._present = True
        if welcome.incarnation == self._life:
            return
        self._have.clear()
        if self._life is not None:
            self._outputs.rewind_all()
            self._some.set()
        self._life = welcome.incarnation

    async def _listen(self) -> None:
        while True:
            match await self._channel.recv():
                case m.AppendGap() as gap:
                    self._outputs.rewind((gap.group_id, gap.index), gap.attempt, gap.have, self._clock.now())
                    self._some.set()
                    self._urgent.set()
                case m.Deltas() as deltas:
                    self._take(deltas)
                case m.Welcome() as welcome:
                    self._join(welcome)
                case m.Refused():
                    self.counters["refused"] += 1

    async def _flush_for_ever(self) -> None:
        while True:
            await self._some.wait()
            try:
                async with asyncio.timeout(self._config.flush_seconds):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            await self._flush()

    async def _flush(self) -> None:
        self._some.clear()
        self._urgent.clear()
        registering, self._registering = self._registering, {}
        for ttl_seconds in set(registering.values()):
            group_ids = [name for name, ttl in registering.items() if ttl == ttl_seconds]
            await self._channel.send(m.RegisterGroups(group_ids=group_ids, ttl_seconds=ttl_seconds))
        while parts := self._outputs.batch(MAX_BATCH_TOKENS):
            tokens = np.concatenate([part.tokens for part in parts])
            appends = [m.Append(*part.key, part.attempt, part.previous, len(part.tokens)) for part in parts]
            self.counters["batches"] += 1
            self.counters["tokens"] += len(tokens)
            await self._channel.send(m.AppendBatch(appends=appends, tokens=tokens))

    # --- reading -------------------------------------------------------------------------

    async def fetch(self, group_ids: Iterable[str], seconds: float = FETCH_SECONDS) -> list[StreamDelta]:
        """Return what is new in these groups since the last fetch, in order of application.

        Never raises: without an answer in `seconds`, what is known by then. The client remembers
        what it returned; `forget` groups that are no longer of interest.
        """
        async with self._fetching:
            names = list(group_ids)
            try:
                async with asyncio.timeout(seconds):
                    self._truncated = self._present
                    while self._truncated:
                        self._answered.clear()
                        await self._channel.send(self._question(names))
                        await self._answered.wait()
            except (TimeoutError, Unreachable):
                self.counters["unanswered_fetches"] += 1
            fresh, self._fresh = self._fresh, []
            return fresh

    def forget(self, group_ids: Iterable[str]) -> None:
        """Stop remembering what was fetched of these groups."""
        for group_id in group_ids:
            self._have.pop(group_id, None)

    def _question(self, group_ids: list[str]) -> m.Fetch:
        return m.Fetch(groups=[m.FetchGroup(name, self._have.get(name, {})) for name in group_ids])

    def _take(self, deltas: m.Deltas) -> None:
        start = 0
        for item in deltas.appends:
            tokens = deltas.tokens[start : start + item.count]
            start += item.count
            have = self._have.setdefault(item.group_id, {})
            revision, length = have.get(item.index, (0, 0))
            # A late answer may repeat what an earlier one brought; a revision only ever grows.
            known = length - item.previous if item.attempt == revision else 0
            repeated = item.attempt == revision and item.count <= known
            if repeated or item.attempt < revision or item.previous > length:
                continue
            have[item.index] = (item.attempt, item.previous + item.count)
            delta = StreamDelta(item.group_id, item.index, item.previous + known, tokens[known:])
            self._fresh.append(delta)
        for group_id in deltas.missing:
            self._have.pop(group_id, None)
        self._truncated = deltas.truncated
        self._answered.set()
