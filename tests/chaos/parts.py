"""Rollouts that a virtual trainer asks for in parts, over an open rollout, and what it checks of them.

A part is some responses of a group under an id of its own. They must be those of the whole group; what was
streamed of them must be how they begin, also if the part fails. A feint asks for other responses under a
part's id, and is cancelled before the part itself is asked for: no answer to it may count as one to the part.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chaos.expected import Answer, answers
from chaos.plan import Roll
from seer.client import RolloutClient, SamplingParams
from seer.client.open_rollout import OpenRollout, PromptInFlight
from seer.client.results import Group
from seer.common.errors import RequestRefused

if TYPE_CHECKING:
    from chaos.trainers import Trainer

RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Part:
    """Responses `first` to `first + size - 1` of a prompt's group."""

    prompt: str
    first: int
    size: int

    @property
    def id(self) -> str:
        """Its id in the open rollout."""
        return f"{self.prompt}+{self.first}" if self.first else self.prompt


def parts_of(step: Roll) -> list[Part]:
    """Return all parts of a rollout."""
    assert step.parts is not None
    size = min(step.parts.size, step.n)
    return [
        Part(prompt, first, min(size, step.n - first))
        for prompt, _ in step.prompts
        for first in range(0, step.n, size)
    ]


@dataclass(slots=True)
class Parts:
    """A trainer's rollout in parts: `run` it."""

    trainer: Trainer
    place: int
    step: Roll

    async def run(self, client: RolloutClient) -> None:
        """Ask until every part has ended, with its responses or for good reason."""
        rollout = client.open_rollout(self.step.rollout_id, repeat=True)
        left = [part for part in parts_of(self.step) if not self._ended(part)]
        try:
            async with asyncio.TaskGroup() as asking:
                cancelling = asking.create_task(self._cancel(rollout))
                await asyncio.gather(*(asking.create_task(self._end(rollout, part)) for part in left))
                cancelling.cancel()
        finally:
            rollout.close()
        if client._task is not None and rollout in client._active:
            self.trainer.world.problem(f"{self.trainer.name}: {rollout.id} stays though it is closed")

    def _ended(self, part: Part) -> bool:
        return (self.place, part) in self.trainer.parts

    async def _cancel(self, rollout: OpenRollout) -> None:
        if self.step.cancel is not None:
            await asyncio.sleep(self.step.cancel)
            self.trainer.cut_short.add(self.place)
            for prompt in list(rollout._in_flight.values()):
                await prompt.cancel()

    async def _end(self, rollout: OpenRollout, part: Part) -> None:
        """Ask for a part until it has ended."""
        trainer, how = self.trainer, self.step.parts
        assert how is not None
        beats = 0
        if part.first + part.size == self.step.n:
            await asyncio.sleep(how.late)
        if how.feint is not None and (self.place, part) not in trainer.feints:
            trainer.feints.add((self.place, part))
            await self._feint(rollout, part, how.feint)
        while not self._ended(part):
            if self.place in trainer.cut_short:
                self._note(part, "cut short")
                return
            if beats:
                await asyncio.sleep(RETRY_SECONDS)
            beats += 1
            asked = self._ask(rollout, part, self.step.seed)
            try:
                group = await self._read(asked, part)
            except RequestRefused as error:
                self._failed(part, error, beats)
            else:
                self._arrived(part, group)

    def _ask(self, rollout: OpenRollout, part: Part, seed: int) -> PromptInFlight:
        step, how = self.step, self.step.parts
        assert how is not None
        prompt = self.trainer.world.prompt(step, part.prompt)
        whole = part.size == step.n and not how.prefix
        return rollout.submit(
            replace(prompt, id=part.id), n=part.size, sampling=SamplingParams(max_tokens=step.max_tokens),
            seed=seed, rollout_number=step.number, weight_version=self.trainer.asked[self.place],
            group="" if whole else how.prefix + part.prompt, first_index=part.first, stream=how.stream,
        )  # fmt: skip

    async def _feint(self, rollout: OpenRollout, part: Part, seconds: float) -> None:
        asked = self._ask(rollout, part, self.step.seed + 1)
        try:
            async with asyncio.timeout(seconds):
                self._compare(part, await asked.result(), self.step.seed + 1)
        except TimeoutError:
            await asked.cancel()
        except RequestRefused as error:
            self.trainer.retries[str(error)] += 1

    async def _read(self, asked: PromptInFlight, part: Part) -> Group:
        """Return the group, after its stream if it has one."""
        read: dict[int, list[int]] = {index: [] for index in range(part.size)}
        if asked.request.stream:
            try:
                async for delta in asked.tokens():
                    read[delta.index] += delta.token_ids.tolist()
            except RequestRefused:
                self._begins(part, read, self._expected(part, asked.weight_version, self.step.seed))
                raise
        group = await asked.result()
        if asked.request.stream and [*read.values()] != [tokens for tokens, _, _ in answers(group)]:
            self._problem(part, f"was streamed as {read}")
        return group

    def _expected(self, part: Part, version: int, seed: int) -> list[Answer]:
        if version < 0:  # nothing was streamed
            return [([], [], "")] * part.size
        how = self.step.parts
        assert how is not None
        name = how.prefix + part.prompt
        expected = self.trainer.world.expected(self.step, part.prompt, version, name=name, seed=seed)
        return expected.answers[name][part.first : part.first + part.size]

    def _begins(self, part: Part, read: dict[int, list[int]], expected: list[Answer]) -> None:
        for (index, got), (tokens, _, _) in zip(read.items(), expected, strict=True):
            if got != tokens[: len(got)]:
                self._problem(part, f"streamed {got} of response {index}, which begins otherwise")

    # --- the end of a part ---------------------------------------------------------------

    def _arrived(self, part: Part, group: Group) -> None:
        wanted = self.trainer.asked[self.place]
        if wanted >= 0 and group.weight_version != wanted:
            self._problem(part, f"has weights {group.weight_version}, not {wanted}")
        self._compare(part, group, self.step.seed)
        self._note(part, "", group)

    def _compare(self, part: Part, group: Group, seed: int) -> None:
        world = self.trainer.world
        if group.weights_digest != world.digest(group.weight_version):
            self._problem(part, f"names digest {group.weights_digest} for {group.weight_version}")
        expected = self._expected(part, group.weight_version, seed)
        got = answers(group)
        world.changed += sum(mine != theirs for mine, theirs in zip(got, expected, strict=True))

    def _failed(self, part: Part, error: RequestRefused, beats: int) -> None:
        trainer, why = self.trainer, str(error)
        verdict = trainer._verdict(self.place, self.step, part.id, type(error), why, beats)
        if verdict == "again":
            trainer.retries[why] += 1
            return
        if verdict == "problem":
            self._problem(part, f"ended at {trainer.world.loop.time():.3f} in {type(error).__name__}: {why}")
        self._note(part, why)

    def _note(self, part: Part, why: str, group: Group | None = None) -> None:
        """Note how a part ended; the last of a group's ends that."""
        trainer = self.trainer
        if (self.place, part) in trainer.parts:
            world = trainer.world
            world.doubled += part.size
        trainer.parts[self.place, part] = (group, why)
        ends = [
            trainer.parts.get((self.place, each))
            for each in parts_of(self.step)
            if each.prompt == part.prompt
        ]
        if None in ends:
            trainer.world.arrived()
            return
        groups = [group for group, _ in ends if group is not None]  # type: ignore[misc]
        whys = [why for _, why in ends if why]  # type: ignore[misc]
        whole = (
            None
            if whys
            else replace(groups[0], responses=tuple(r for each in groups for r in each.responses))
        )
        trainer.end(self.place, part.prompt, whole, "; ".join(whys))

    def _problem(self, part: Part, what: str) -> None:
        self.trainer.world.problem(f"{self.trainer.name}: {self.step.rollout_id}/{part.id} {what}")
