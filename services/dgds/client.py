"""An engine's client of the dgds: sends tokens as they come, fetches those of other engines.

Generation never waits for it.

Invariants (tests/unit/test_dgds_client.py asserts them):
- `register`, `begin`, `append` and `forget` never block, never fail and hold bounded memory: past
  `max_retained_tokens`, the request that was not appended to for longest is dropped whole, counted;
- one `AppendBatch` per flush and dgds has the new tokens of all requests, `flush_seconds` after the first;
- lost messages are sent again: at a request's next append the dgds says what it lacks (`AppendGaps`), and
  after a restart it is sent everything retained;
- while a dgds is absent, only the groups that it serves are affected; it is counted and logged once;
- all clients agree which dgds serves a group: the digest of its prompt decides, so that the next group
  of the same prompt finds the earlier one there; without a registration, the digest of the group's id;
  a group whose prompts may differ is registered with the digest that the buffer chose for all engines;
- a token id that cannot be packed is logged once, and only its response is given up.

Everything but `run` must be called on `run`'s event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from seer.common import wire
from seer.common.clock import Clock
from seer.common.endpoints import shards
from seer.common.net.identity import Identity
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.services.dgds.connection import MAX_GROUPS, DgdsConnection, StreamDelta
from seer.services.dgds.packing import TOKEN_IDS, group_digest, prompt_digest, unpackable

__all__ = ["DgdsClient", "StreamDelta"]

MAX_RETAINED_TOKENS = 16_000_000
"""Tokens kept for re-sending, 64 MiB: more than an engine's KV cache commonly holds."""

FLUSH_SECONDS = 0.05
"""How long new tokens wait to be sent: those of other requests go along, in one message."""

FETCH_SECONDS = 1.0
"""Default deadline of a fetch: drafts from older tokens cost less than waiting longer."""


class DgdsClient:
    """See the module's docstring. `endpoint` is `endpoints.dgds`; `counters` are totals."""

    def __init__(
        self,
        transport: Transport,
        endpoint: str,
        identity: Identity,
        clock: Clock,
        max_retained_tokens: int = MAX_RETAINED_TOKENS,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        self.counters: Counter[str] = Counter()
        each = shards(endpoint)
        bounds = max_retained_tokens // len(each), self.counters, flush_seconds
        self._connections = [DgdsConnection(transport, one, identity, clock, *bounds) for one in each]
        self._prompts: OrderedDict[str, int] = OrderedDict()
        self._log = get_logger()

    # --- writing -------------------------------------------------------------------------

    def register(self, group_id: str, prompt: wire.Tokens | int, ttl_seconds: float = 0.0) -> None:
        """Keep a group with this prompt (int32) for `ttl_seconds` after its last use; 0: the dgds's default.

        `prompt` may be its digest. Call it before the group's first `begin` or `fetch`; repeating it is
        harmless and cheap.
        """
        digest = prompt if isinstance(prompt, int) else self._prompts.get(group_id) or prompt_digest(prompt)
        self._prompts[group_id] = digest
        self._prompts.move_to_end(group_id)
        if len(self._prompts) > MAX_GROUPS:
            self._prompts.popitem(last=False)
        group, connection = self._place(group_id)
        connection.register(group, digest, ttl_seconds)

    def begin(self, group_id: str, index: int, attempt: int, output: wire.Tokens) -> None:
        """Start following one attempt of a response that has `output` (int32) so far.

        `output` is all that follows the prompt, also what was added between turns. It is kept to fill gaps,
        and not copied.
        """
        group, connection = self._place(group_id)
        if self._packable(index, output):
            connection.outputs.begin((group, index), attempt, output)
            if connection.outputs.unsent:
                connection.changed()

    def append(self, group_id: str, index: int, attempt: int, previous: int, tokens: Sequence[int]) -> None:
        """Add the tokens that follow the first `previous` output tokens of an attempt."""
        group, connection = self._place(group_id)
        if self._packable(index, tokens):
            connection.outputs.append((group, index), attempt, previous, tokens)
            connection.changed()

    # --- connection ----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep connected, flush and listen until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for connection in self._connections:
                tasks.create_task(connection.run())

    async def close(self, seconds: float) -> None:
        """Send what is unsent to each dgds that is connected, say goodbye and disconnect. Never raises."""
        await asyncio.gather(*(connection.close(seconds) for connection in self._connections))

    # --- reading -------------------------------------------------------------------------

    async def fetch(
        self,
        group_ids: Iterable[str],
        own: Mapping[str, Collection[int]] | None = None,
        seconds: float = FETCH_SECONDS,
    ) -> list[StreamDelta]:
        """Return what is new in these groups since the last fetch, in order of application.

        Responses of `own`, by group, are left out: those that run here. Indexes from
        `MAX_GROUP_SIZE` on are responses of an earlier group of the same prompt. Never raises:
        without an answer in `seconds`, what is known by then. The client remembers what it
        returned; `forget` groups that are no longer of interest.
        """
        asked: dict[DgdsConnection, dict[int, str]] = {}
        without: dict[int, Collection[int]] = {}
        for group_id in group_ids:
            group, connection = self._place(group_id)
            asked.setdefault(connection, {})[group] = group_id
            if own is not None and group_id in own:
                without[group] = own[group_id]
        found = await asyncio.gather(
            *(connection.fetch(names, without, seconds) for connection, names in asked.items())
        )
        return [delta for deltas in found for delta in deltas]

    def forget(self, group_ids: Iterable[str]) -> None:
        """Stop remembering what was fetched of these groups."""
        for group_id in group_ids:
            group, connection = self._place(group_id)
            connection.forget(group)

    # --- groups and shards ---------------------------------------------------------------

    def _place(self, group_id: str) -> tuple[int, DgdsConnection]:
        group = group_digest(group_id)
        return group, self._connections[self._prompts.get(group_id, group) % len(self._connections)]

    def _packable(self, index: int, tokens: Sequence[int] | wire.Tokens) -> bool:
        """Say whether all tokens can be packed; else what follows is a gap that is never filled."""
        wrong = unpackable(tokens)
        if wrong is None:
            return True
        if not self.counters["unpackable"]:
            self._log.warning(
                "a response is not shared: token id out of range",
                token=wrong, range=f"[0, {TOKEN_IDS.stop})", response=index,
            )  # fmt: skip
        self.counters["unpackable"] += 1
        return False
