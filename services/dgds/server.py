"""The dgds's socket: batches of appends in, gaps and deltas out.

Invariants:
- a message is checked whole before any of it is stored: a malformed one is counted, logged once per
  peer and changes nothing;
- an answer waits for nobody: one that finds no room is lost, and asked for again;
- one `Deltas` holds at most `MAX_DELTA_TOKENS`; `truncated` tells the asker to ask again.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np

from seer.common import ids
from seer.common.channel import Hub, Identity
from seer.common.clock import Clock
from seer.common.config import Config, shared_hash
from seer.common.errors import InvalidField
from seer.common.log import get_logger
from seer.common.transport.base import Transport
from seer.common.wire import messages as m
from seer.services.dgds.store import Store

MAX_DELTA_TOKENS = 2**18
"""Tokens in one answer: 1 MiB, so that no asker holds up the others for long."""

MAX_POSITION = 2**24
"""Bound on a stream's length, that of `SamplingParams.max_tokens`."""

MAX_ID = m.MAX_ID
"""Bound on group ids, as in `messages.ShortStr` (hot Structs are not checked by the decoder)."""

SWEEP_SECONDS = 1.0
"""How often groups past their time to live are dropped."""


def make(config: Config, transport: Transport, clock: Clock) -> DgdsServer:
    """Build the service for `service.run_process`."""
    return DgdsServer(config, transport, clock)


class DgdsServer:
    """One grouped draft server."""

    def __init__(self, config: Config, transport: Transport, clock: Clock) -> None:
        self.store = Store(config.dgds.max_tokens, config.dgds.ttl_seconds)
        self._endpoint = config.endpoints.dgds
        self._transport = transport
        self._clock = clock
        self._me = Identity(
            role="dgds",
            name="dgds",
            incarnation=ids.new_incarnation(),
            config_hash=shared_hash(config.shared),
        )
        self._log = get_logger()
        self._drained = asyncio.Event()

    async def start(self) -> dict[str, str]:
        """Bind; return the endpoint bound."""
        router = await self._transport.router(self._endpoint)
        self._hub: Hub[m.DgdsToEngine, m.EngineToDgds] = Hub(
            router, self._me, m.EngineToDgds, require_config_hash=True
        )
        return {"dgds": router.endpoint}

    async def run(self) -> None:
        """Serve until drained."""
        async with asyncio.TaskGroup() as tasks:
            serving = [tasks.create_task(self._serve()), tasks.create_task(self._sweep())]
            await self._drained.wait()
            for task in serving:
                task.cancel()
        self._log.info("served", **self._hub.counters)

    def drain(self) -> None:
        """Stop at once: streams only speed engines up."""
        self._drained.set()

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            self.store.expire(self._clock.now())

    async def _serve(self) -> None:
        while True:
            identity, message = await self._hub.recv()
            try:
                match message:
                    case m.AppendBatch():
                        for gap in self._append(message):
                            await self._hub.reply(identity, gap)
                    case m.Fetch():
                        await self._hub.reply(identity, self._fetch(message))
                    case m.RegisterGroups():
                        self._register(message)
                    case m.Hello() | m.Goodbye():
                        pass
            except InvalidField as error:
                self._hub.refuse(identity, error)

    def _append(self, batch: m.AppendBatch) -> list[m.AppendGap]:
        _check(batch)
        now, gaps, start = self._clock.now(), [], 0
        for item in batch.appends:
            tokens = batch.tokens[start : start + item.count]
            start += item.count
            have = self.store.append(item.group_id, item.index, item.attempt, item.previous, tokens, now)
            if have is not None:
                gap = m.AppendGap(group_id=item.group_id, index=item.index, attempt=item.attempt, have=have)
                gaps.append(gap)
        return gaps

    def _fetch(self, fetch: m.Fetch) -> m.Deltas:
        for number, group in enumerate(fetch.groups):
            if any(min(held) < 0 for held in group.have.values()):
                raise InvalidField(f"groups[{number}].have", group.have, "give revisions and lengths >= 0")
        now, room, truncated = self._clock.now(), MAX_DELTA_TOKENS, False
        appends: list[m.Append] = []
        parts: list[m.Tokens] = []
        missing = []
        for group in fetch.groups:
            found = self.store.deltas(group.group_id, group.have, room, now)
            if found is None:
                missing.append(group.group_id)
                continue
            for delta in found[0]:
                count = len(delta.tokens)
                # To a reader, a stream's revision takes the place of an attempt.
                appends.append(m.Append(group.group_id, delta.index, delta.revision, delta.previous, count))
                parts.append(delta.tokens)
                room -= count
            truncated = truncated or found[1]
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        return m.Deltas(appends=appends, tokens=tokens, missing=missing, truncated=truncated)

    def _register(self, message: m.RegisterGroups) -> None:
        if not (math.isfinite(message.ttl_seconds) and message.ttl_seconds > 0):
            raise InvalidField("ttl_seconds", message.ttl_seconds, "must be a positive number of seconds")
        for group_id in message.group_ids:
            self.store.register(group_id, message.ttl_seconds, self._clock.now())


def _check(batch: m.AppendBatch) -> None:
    """Raise `InvalidField` unless every append can be applied."""
    where, total = "appends[{}]".format, 0  # formatted for a complaint only: this is the hot path
    for number, item in enumerate(batch.appends):
        if not 0 < len(item.group_id) <= MAX_ID:
            raise InvalidField(f"{where(number)}.group_id", item.group_id, f"give 1 to {MAX_ID} characters")
        if not 0 <= item.index < m.MAX_GROUP_SIZE:
            raise InvalidField(f"{where(number)}.index", item.index, f"must be in [0, {m.MAX_GROUP_SIZE})")
        count, previous = item.count, item.previous
        if item.attempt < 0 or previous < 0 or not 0 <= count <= MAX_POSITION - previous:
            raise InvalidField(where(number), item, f"must be >= 0 and end within {MAX_POSITION} tokens")
        total += count
    if total != len(batch.tokens):
        raise InvalidField("tokens", len(batch.tokens), f"must have the {total} entries its appends count")
