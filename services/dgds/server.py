"""The dgds's server: batches of appends in, gaps and deltas out.

Invariants:
- a message is checked as a whole before any of it is stored: a malformed one is counted, logged once per
  peer and changes nothing; one that decodes but is inconsistent is also answered with the reason;
- answers never block: at most `QUEUE_ANSWERS` are queued for a peer that does not read, further ones are
  dropped, and the peer asks again;
- one `Deltas` holds at most `MAX_DELTA_TOKENS`, from at most `MAX_VISITED` groups and streams; `done` says
  how many groups it covers, and the peer asks again for the rest.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np

from seer.common import wire
from seer.common.clock import Clock
from seer.common.config import Config, DgdsConfig
from seer.common.endpoints import shards
from seer.common.errors import ConfigError, InvalidField
from seer.common.net.hub import Hub
from seer.common.net.identity import this_process
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.common.process.memory_bounds import dgds_bounds
from seer.common.process.memory_limit import bounds, limit_bytes
from seer.common.process.tasks import serve_until
from seer.common.process.threads import until_ended
from seer.services.dgds import past_groups_file
from seer.services.dgds.group_store import Delta, Store
from seer.services.dgds.past_groups import PastGroups

MAX_DELTA_TOKENS = 2**16
"""Most tokens in one answer: 192 KiB, so that no peer delays the others for long."""

MAX_VISITED = 4096
"""Most groups and streams read, or gaps reported, for one answer, but for its last group: about 1 ms."""

QUEUE_ANSWERS = 32
"""Most messages queued for one peer: 6 MiB of deltas, twice that if all are gaps."""

MAX_POSITION = 2**24
"""Bound on a stream's length, that of `SamplingParams.max_tokens`."""

ROLES = frozenset({"engine", "status", "ping"})
"""Roles that may connect; the last two only ask how it is."""

TTL_SECONDS = 600.0
"""How long a group is kept after its last use, unless the engine says otherwise: requests may wait long."""

SWEEP_SECONDS = 1.0
"""How often groups past their time to live are dropped."""

WARN_SECONDS = 60.0
"""How often it is said, at most, that groups in use were dropped."""

SAVE_SECONDS = 60.0
"""How often past groups are saved if they changed: a dgds that is killed loses what came since."""


def make(config: Config, transport: Transport, clock: Clock) -> DgdsServer:
    """Build the service for `service.run_process`."""
    return DgdsServer(config, transport, clock)


class DgdsServer:
    """One grouped draft server: one shard of them, if `endpoints.dgds` names several."""

    def __init__(self, config: Config, transport: Transport, clock: Clock) -> None:
        settings, endpoints = config.dgds, shards(config.endpoints.dgds)
        if settings.shard >= len(endpoints):
            raise ConfigError(
                f"dgds.shard = {settings.shard}: endpoints.dgds names {len(endpoints)}; count from 0"
            )
        self._endpoint = endpoints[settings.shard]
        name = f"dgds-{settings.shard}" if len(endpoints) > 1 else "dgds"
        max_tokens, remember_tokens = bounds(dgds_bounds(settings), limit_bytes())
        if settings.remember_path and not remember_tokens:
            raise ConfigError(
                f"dgds.remember_path = {settings.remember_path!r}: nothing is remembered;"
                " set dgds.remember_tokens, too"
            )
        self._past = PastGroups(remember_tokens) if remember_tokens else None
        self._file = _file_of(settings, len(endpoints)) if self._past is not None else None
        self._saved = 0
        self.store = Store(max_tokens, TTL_SECONDS, self._past)
        self._transport = transport
        self._clock = clock
        self._me = this_process("dgds", name, config)
        self._shared = self._me.config_hash
        self._log = get_logger()
        self._drained = asyncio.Event()

    async def start(self) -> dict[str, str]:
        """Bind; return the endpoint bound."""
        router = await self._transport.router(self._endpoint, QUEUE_ANSWERS)
        self._hub: Hub[wire.DgdsToEngine, wire.EngineToDgds] = Hub(
            router,
            self._me,
            wire.EngineToDgds,
            require_config_hash=True,
            roles=ROLES,
        )
        if self._file is not None:
            await self._load(self._file)
        return {"dgds": router.endpoint}

    async def run(self) -> None:
        """Serve until drained."""
        await serve_until(self._drained.wait(), self._serve(), self._sweep(), self._keep_saved())
        self.store.remember_all()
        await self._save()
        self._log.info("served", **self._hub.counters)

    def drain(self) -> None:
        """Stop at once: nothing depends on the streams but speed."""
        self._drained.set()

    async def _sweep(self) -> None:
        quiet_until = 0.0
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            now = self._clock.now()
            self.store.expire(now)
            if now >= quiet_until and (problem := self.store.crowded(now)):
                quiet_until = now + WARN_SECONDS
                fix = "give the dgds more memory or dgds.max_tokens, or name further ones in endpoints.dgds"
                self._log.warning("too little room for drafts", problem=problem, fix=fix)

    async def _serve(self) -> None:
        while True:
            identity, message = await self._hub.recv()
            try:
                match message:
                    case wire.AppendBatch():
                        if gaps := self._append(message):
                            await self._hub.reply(identity, wire.AppendGaps(gaps=gaps))
                    case wire.Fetch():
                        await self._hub.reply(identity, self._fetch(message))
                    case wire.RegisterGroups():
                        self._register(message)
                    case wire.StatusRequest():
                        await self._hub.reply(identity, self._status())
                    case wire.Hello() | wire.Goodbye():
                        pass
            except InvalidField as error:
                self._hub.refuse(identity, error)
                await self._hub.reply(identity, wire.MessageRejected(problem=str(error)))

    def _status(self) -> wire.ServiceStatus:
        store = self.store
        figures: dict[str, float] = {"tokens": store.held, "groups": len(store)}
        figures |= {name: store.counters[name] for name in ("evicted", "expired", "gaps")}
        return wire.ServiceStatus(figures=figures, messages=self._hub.counters)

    def _append(self, batch: wire.AppendBatch) -> list[wire.Gap]:
        _check(batch)
        append, now, tokens = self.store.append, self._clock.now(), batch.tokens.data
        gaps: list[wire.Gap] = []
        start = 0
        for item in batch.appends:
            end = start + item.count * wire.TOKEN_BYTES
            have = append(item.group, item.index, item.attempt, item.previous, tokens[start:end], now)
            start = end
            if have is not None and len(gaps) < MAX_VISITED:  # further ones are reported at their next append
                gaps.append(wire.Gap(item.group, item.index, item.attempt, have))
        return gaps

    def _fetch(self, fetch: wire.Fetch) -> wire.Deltas:
        now, room, visits, done = self._clock.now(), MAX_DELTA_TOKENS, MAX_VISITED, 0
        found: list[tuple[int, Delta]] = []
        missing = []
        for group in fetch.groups:
            if visits <= 0:
                break
            news = self.store.deltas(group.group, group.have, room, now, group.exclude)
            if news is None:
                missing.append(group.group)
                visits -= 1
            else:
                found += ((group.group, delta) for delta in news.deltas)
                room -= sum(delta.count for delta in news.deltas)
                visits -= news.visited
                if not news.complete:
                    break
            done += 1
        return wire.Deltas(
            deltas=[wire.Delta(group, it.index, it.revision, it.previous, it.count) for group, it in found],
            tokens=np.frombuffer(b"".join(delta.tokens for _, delta in found), dtype=np.uint8),
            missing=missing,
            call_id=fetch.call_id,
            done=done,
        )

    def _register(self, message: wire.RegisterGroups) -> None:
        seconds = message.ttl_seconds
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidField("ttl_seconds", seconds, "give a number of seconds, or 0 for the default")
        for entry in message.groups:
            self.store.register(entry.group, seconds, self._clock.now(), entry.prompt)

    # --- past groups ---------------------------------------------------------------------

    async def _load(self, path: Path) -> None:
        try:
            entries = await asyncio.to_thread(past_groups_file.load, path, self._shared)
        except ConfigError as error:
            self._log.warning("starting without the groups of earlier runs", error=str(error))
            return
        for prompt, streams in entries:
            self.store.restore(prompt, streams)

    async def _keep_saved(self) -> None:
        while self._file is not None:
            await self._clock.sleep(SAVE_SECONDS)
            await self._save()

    async def _save(self) -> None:
        past, path = self._past, self._file
        if past is None or path is None or past.changes == self._saved:
            return
        changes = past.changes
        try:
            # The end of this process saves once more: two at once would write into one file.
            await until_ended(past_groups_file.save, path, self._shared, list(past.items()))
            self._saved = changes
        except ConfigError as error:
            self._log.warning("the groups of this run are not saved", error=str(error))
            self._file = None


def _file_of(settings: DgdsConfig, count: int) -> Path | None:
    """Return this shard's file: which prompts it serves depends on how many shards there are."""
    if not settings.remember_path:
        return None
    return Path(settings.remember_path + (f".{settings.shard}-of-{count}" if count > 1 else ""))


def _check(batch: wire.AppendBatch) -> None:
    """Raise `InvalidField` unless every append can be applied; the decoder has checked the ranges."""
    total = 0
    for number, item in enumerate(batch.appends):
        if item.previous + item.count > MAX_POSITION:
            raise InvalidField(f"appends[{number}]", item, f"must end within {MAX_POSITION} tokens")
        total += item.count
    if total * wire.TOKEN_BYTES != len(batch.tokens):
        raise InvalidField(
            "tokens", len(batch.tokens), f"its appends count {total} tokens of {wire.TOKEN_BYTES} bytes"
        )
