"""Sends what chunks here generate to the dgds, and feeds drafts with what other engines' chunks generate.

Invariants (tests/unit/test_token_sharing.py asserts them):
- a step costs nothing here: tokens are read off the running chunks every `SHARE_SECONDS`, and as they leave;
- nothing here blocks but `run`, and generation never waits for the dgds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from seer.common import wire
from seer.common.clock import Clock
from seer.services.dgds.client import DgdsClient
from seer.services.engine.chunks import RunningChunk
from seer.services.engine.draft_groups import DraftGroups
from seer.services.engine.driver import Driver

SHARE_SECONDS = 0.2
"""Longest time that tokens of a chunk wait to be shared. Siblings that run here draft from them at once; for
others each sharing takes time of the event loop, in which the engine's steps wait for Python's lock."""


class TokenSharing:
    """See the module's docstring. `groups`: what this engine drafts for; None: it drafts nothing itself."""

    def __init__(
        self,
        dgds: DgdsClient,
        running: Mapping[str, RunningChunk],
        driver: Driver,
        clock: Clock,
        *,
        drafts: bool,
    ) -> None:
        self.groups = DraftGroups() if drafts else None
        self._dgds, self._running, self._driver, self._clock = dgds, running, driver, clock

    def begin(self, run: RunningChunk, order: wire.RunChunk) -> None:
        """Share a chunk from now on."""
        if self.groups is not None:
            self.groups.chunk_started(run.group_id, run.index)
        if order.draft_prompt or not order.draft_group:  # every engine must find the same dgds
            self._dgds.register(run.group_id, order.draft_prompt or order.tokens[: order.prompt_len])
        self._dgds.begin(run.group_id, run.index, run.attempt, order.tokens[order.prompt_len :])

    def leave(self, run: RunningChunk, *, finished: bool) -> None:
        """Share the rest of a chunk that ended or was dropped; `finished`: so did its response."""
        self._share(run)
        if self.groups is not None:
            self.groups.chunk_ended(run.group_id, run.index, finished, self._clock.now())

    def forget_all(self) -> None:
        """Forget all groups: the weights are about to change, or have."""
        if self.groups is not None:
            self._dgds.forget(self.groups.clear())

    async def run(self) -> None:
        """Share and fetch until cancelled, beside each other: one dgds may not answer."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._share_all())
            tasks.create_task(self._fetch_all())

    async def _share_all(self) -> None:
        while True:
            await self._clock.sleep(SHARE_SECONDS)
            for run in self._running.values():
                self._share(run)

    async def _fetch_all(self) -> None:
        while True:
            await self._clock.sleep(SHARE_SECONDS)
            if self.groups is not None:
                await self._fetch(self.groups)

    def _share(self, run: RunningChunk) -> None:
        new, run.shared = run.tokens[run.shared :], len(run.tokens)
        if new:
            self._dgds.append(run.group_id, run.index, run.attempt, run.length - len(new), new)
            if self.groups is not None:
                self.groups.add_tokens(run.group_id, len(new))

    async def _fetch(self, groups: DraftGroups) -> None:
        if gone := groups.evict():
            self._dgds.forget(gone)
            self._driver.forget(gone)
        own = groups.to_fetch(self._clock.now())
        deltas = await self._dgds.fetch(own, own) if own else []
        for delta in deltas:
            groups.add_tokens(delta.group_id, len(delta.tokens))
        if deltas:
            self._driver.feed(deltas)
