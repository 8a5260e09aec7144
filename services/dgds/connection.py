"""One engine's connection to one dgds process. A `DgdsClient` has one per shard; its invariants hold here.

Groups are named by their digests (see `packing`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from seer.common import wire
from seer.common.clock import Clock
from seer.common.errors import SeerError, Unreachable
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.services.dgds.packing import pack, unpack
from seer.services.dgds.resend_buffer import ResendBuffer

MAX_BATCH_TOKENS = 2**18
"""Most tokens in one message: 768 KiB; only re-sends reach it."""

MAX_FETCH_GROUPS = 1000
"""Groups asked for in one message; a larger fetch asks several times."""

MAX_GROUPS = 10_000
"""Groups whose registration is remembered, to repeat it to a dgds that was restarted."""

OPEN_SECONDS = 10.0
"""Longest handshake; after that the dgds counts as absent until the next try."""

RETRY_SECONDS = 1.0
"""Pause before an absent dgds is tried again."""

SHARE = 0.02
"""Share of the time that flushes take at most: with many short responses at once one takes milliseconds, of
the interpreter that the engine's steps need."""

LONGEST_PAUSE = 0.5
"""Seconds after a flush that took long, be it that the dgds is slow."""


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """Cut stream `index` of a group to `previous` tokens, then append `tokens` (int32)."""

    group_id: str
    index: int
    previous: int
    tokens: wire.Tokens


class DgdsConnection:
    """Sends what `outputs` holds, and fetches deltas. `counters` may be shared with other connections."""

    def __init__(
        self,
        transport: Transport,
        endpoint: str,
        identity: Identity,
        clock: Clock,
        max_retained_tokens: int,
        counters: Counter[str],
        flush_seconds: float,
    ) -> None:
        self.outputs = ResendBuffer(max_retained_tokens, counters)
        self._counters = counters
        self._channel: Channel[wire.EngineToDgds, wire.DgdsToEngine] = Channel(
            transport, endpoint, identity, wire.DgdsToEngine, clock
        )
        self._clock = clock
        self._flush_seconds = flush_seconds
        self._log = get_logger()
        self._groups: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._registering: dict[int, None] = {}
        self._to_send = asyncio.Event()
        self._connected = False
        self._incarnation: int | None = None
        self._names: dict[int, str] = {}
        self._fetched: dict[int, dict[int, tuple[int, int]]] = {}
        self._deltas: list[StreamDelta] = []
        self._fetching, self._answered = asyncio.Lock(), asyncio.Event()
        self._call_id = self._groups_answered = 0

    # --- writing -------------------------------------------------------------------------

    def register(self, group: int, prompt: int, ttl_seconds: float) -> None:
        """Register a group; repeated whenever the dgds was restarted."""
        if self._groups.get(group) == (prompt, ttl_seconds):
            self._groups.move_to_end(group)
            return
        self._groups[group] = (prompt, ttl_seconds)
        self._registering[group] = None
        if len(self._groups) > MAX_GROUPS:
            dropped, _ = self._groups.popitem(last=False)
            self._registering.pop(dropped, None)
            self._counters["dropped_registrations"] += 1
        self._to_send.set()

    def changed(self) -> None:
        """Flush `outputs` soon."""
        self._to_send.set()

    # --- connection ----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep connected, flush and listen until cancelled."""
        absent = False
        while True:
            try:
                self._welcomed(await self._channel.open(OPEN_SECONDS))
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._listen())
                    tasks.create_task(self._flush_for_ever())
            except* SeerError as group:
                if not absent:
                    self._log.warning("dgds absent, running on without it", error=str(group.exceptions[0]))
                absent = True
                self._counters["absences"] += 1
            self._connected = False
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # A task group that fails while it is cancelled reports the failure alone (before 3.13).
                raise asyncio.CancelledError
            await self._clock.sleep(RETRY_SECONDS)

    async def close(self, seconds: float) -> None:
        """Send what is unsent if the dgds is there, say goodbye and disconnect. Never raises."""
        try:
            async with asyncio.timeout(seconds):
                if self._connected:
                    await self._flush()
                    await self._channel.send(wire.Goodbye())
        except (TimeoutError, Unreachable):
            self._counters["absences"] += 1
        self._connected = False
        self._channel.close()

    def _welcomed(self, welcome: wire.Welcome) -> None:
        self._connected = True
        if welcome.incarnation == self._incarnation:
            return
        self._fetched.clear()
        if self._incarnation is not None:
            self._registering.update(dict.fromkeys(self._groups))
            self.outputs.rewind_all()
            self._to_send.set()
        self._incarnation = welcome.incarnation

    async def _listen(self) -> None:
        while True:
            match await self._channel.recv():
                case wire.AppendGaps() as found:
                    self._resend(found.gaps)
                case wire.Deltas() as deltas:
                    self._add_deltas(deltas)
                case wire.Welcome() as welcome:
                    self._welcomed(welcome)
                case wire.MessageRejected() as refusal:
                    if not self._counters["refused"]:
                        self._log.warning("the dgds refused a message", problem=refusal.problem)
                    self._counters["refused"] += 1

    def _resend(self, gaps: Iterable[wire.Gap]) -> None:
        for gap in gaps:
            self.outputs.rewind((gap.group, gap.index), gap.attempt, gap.have, self._clock.now())
            if gap.have == 0 and gap.group in self._groups:  # it may have dropped the whole group
                self._registering[gap.group] = None
        self._to_send.set()

    async def _flush_for_ever(self) -> None:
        while True:
            await self._to_send.wait()
            await self._clock.sleep(self._flush_seconds)
            began = self._clock.now()
            await self._flush()
            await self._clock.sleep(min((self._clock.now() - began) / SHARE, LONGEST_PAUSE))

    async def _flush(self) -> None:
        self._to_send.clear()
        registering = [(group, *self._groups[group]) for group in self._registering]
        self._registering = {}
        for seconds in {ttl for _, _, ttl in registering}:
            groups = [wire.GroupEntry(group, prompt) for group, prompt, ttl in registering if ttl == seconds]
            await self._channel.send(wire.RegisterGroups(groups=groups, ttl_seconds=seconds))
        while parts := self.outputs.batch(MAX_BATCH_TOKENS):
            tokens = np.concatenate([part.tokens for part in parts])
            appends = [
                wire.Append(*part.key, part.attempt, part.previous, len(part.tokens)) for part in parts
            ]
            self._counters["batches"] += 1
            self._counters["tokens"] += len(tokens)
            await self._channel.send(wire.AppendBatch(appends=appends, tokens=pack(tokens)))

    # --- reading -------------------------------------------------------------------------

    async def fetch(
        self, names: Mapping[int, str], own: Mapping[int, Collection[int]], seconds: float
    ) -> list[StreamDelta]:
        """As `DgdsClient.fetch`; `names` are the groups by digest."""
        async with self._fetching:
            self._names.update(names)
            try:
                async with asyncio.timeout(seconds):
                    await self._send_fetches(list(names), own)
            except (TimeoutError, Unreachable):
                self._counters["unanswered_fetches"] += 1
            deltas, self._deltas = self._deltas, []
            return deltas

    def forget(self, group: int) -> None:
        """Stop remembering what was fetched of this group."""
        self._fetched.pop(group, None)
        name = self._names.pop(group, None)
        self._deltas = [delta for delta in self._deltas if delta.group_id != name]

    async def _send_fetches(self, groups: list[int], own: Mapping[int, Collection[int]]) -> None:
        while groups and self._connected:
            self._answered.clear()
            self._call_id += 1
            await self._channel.send(
                wire.Fetch(
                    groups=[
                        wire.FetchGroup(group, self._fetched.get(group, {}), sorted(own.get(group, ())))
                        for group in groups[:MAX_FETCH_GROUPS]
                    ],
                    call_id=self._call_id,
                )
            )
            await self._answered.wait()
            groups = groups[self._groups_answered :]

    def _add_deltas(self, answer: wire.Deltas) -> None:
        tokens, start = unpack(answer.tokens), 0
        for item in answer.deltas:
            part = tokens[start : start + item.count]
            start += item.count
            if item.group in self._names and len(part) == item.count:
                self._add_delta(item, part)
        for group in answer.missing:
            self._fetched.pop(group, None)
        if answer.call_id == self._call_id:
            self._groups_answered = answer.done
            self._answered.set()

    def _add_delta(self, item: wire.Delta, tokens: wire.Tokens) -> None:
        have = self._fetched.setdefault(item.group, {})
        revision, length = have.get(item.index, (0, 0))
        # A late answer may repeat an earlier one; revisions only grow.
        known = length - item.previous if item.revision == revision else 0
        repeated = item.revision == revision and item.count <= known
        if repeated or item.revision < revision or item.previous > length:
            return
        have[item.index] = (item.revision, item.previous + item.count)
        name = self._names[item.group]
        self._deltas.append(StreamDelta(name, item.index, item.previous + known, tokens[known:]))
