"""Loops of somebody who knows nothing of trajectories: each turn sends the whole context.

They rewrite some contexts, and send one twice at once. Which group a turn's noise is of is worked out here,
from what docstrings and documents say of segments.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from seer.client import SamplingParams
from seer.client.turns import PrefixTrajectories
from seer.common.errors import RequestRefused

if TYPE_CHECKING:
    from chaos.turns import Turns

RETRY_SECONDS = 0.5


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return what all return; when one fails, none of the others goes on. A task group would cancel its task."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@dataclass(slots=True)
class Loop:
    """One session, by somebody who knows nothing of trajectories."""

    rollout: Turns
    sessions: PrefixTrajectories
    prompt: str
    index: int
    beats: int
    segments: Counter[str] = field(default_factory=Counter)
    name: str = ""
    known: list[int] = field(default_factory=list)

    @property
    def session(self) -> str:
        """Its name."""
        return f"{self.prompt}-{self.index}"

    async def run(self) -> str:
        """Take all turns; return why it ended early, if it did."""
        how, step = self.rollout.how, self.rollout.step
        context: list[int] = list(self.rollout.prompt(self.prompt).token_ids)  # type: ignore[arg-type]
        try:
            for number in range(how.turns):
                most = min(step.max_tokens, self.rollout.most_context - len(context))
                if most < 1:
                    break
                self.name = self._named(context)
                turn = self._turn(self.name, context, most)
                (tokens, why), *_ = await together(
                    turn, *([self._aside(context, most)] if number == 1 else [])
                )
                if why:
                    return why
                self.known = context + tokens
                context = [*self.known, number + 1, sum(tokens) % 90 + 1]
                if number < len(how.waits):
                    await asyncio.sleep(how.waits[number])
                if number in how.rewritten:
                    del context[0]
        finally:
            self.sessions.end(self.session)
        return ""

    def _named(self, context: list[int]) -> str:
        """Return the name of the group that a prompt's noise is of, as docs and docstrings have it."""
        if self.known and context[: len(self.known)] == self.known:
            return self.name
        words = np.asarray(context, "<i4").tobytes()
        digest = hashlib.blake2b(words, digest_size=6).hexdigest()
        name = f"{self.prompt}~{digest}.{self.segments[digest]}" if self.segments else self.prompt
        self.segments[digest] += 1
        return name

    async def _aside(self, context: list[int], most: int) -> None:
        """Send a prompt while the same is under way: a segment of its own, which is tried once."""
        self.known, known = [], self.known
        name, self.known = self._named(context), known
        try:
            await self._ask(name, context, most)
        except RequestRefused as error:
            self.rollout._judged(self.session, 0, error, 1)

    async def _turn(self, name: str, context: list[int], most: int) -> tuple[list[int], str]:
        while True:
            try:
                return await self._ask(name, context, most), ""
            except RequestRefused as error:
                why = self.rollout._judged(self.session, 0, error, self.beats)
                if why is not None:
                    return [], why
                self.beats += 1
                await asyncio.sleep(RETRY_SECONDS)

    async def _ask(self, name: str, context: list[int], most: int) -> list[int]:
        step, trainer = self.rollout.step, self.rollout.trainer
        group = await self.sessions.generate(
            self.session, np.asarray(context, np.int32), SamplingParams(max_tokens=most), group=self.prompt,
            index=self.index, seed=step.seed, rollout_number=step.number,
            weight_version=trainer.asked[self.rollout.place], max_context=self.rollout.most_context,
        )  # fmt: skip
        (response,) = group.responses
        weights = group.weight_version, group.weights_digest
        self.rollout.check(name, self.index, context, most, (*weights, response))
        return response.token_ids.tolist()
