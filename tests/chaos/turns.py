"""Rollouts that a virtual trainer runs in turns, and what it checks of them.

Agents have a journal, which outlives the trainer as its environments do: no environment may be asked again for
what it has answered. What it says differs with each call, so that a second answer is seen in the tokens.
What every turn must be is worked out from the documents alone (`expected.turn`), whatever happened to trainer,
buffer and engines in between. Others send whole contexts (`chaos.loops`).
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chaos import expected
from chaos.images import PLACEHOLDER, image
from chaos.loops import RETRY_SECONDS, Loop, together
from chaos.plan import InTurns, Roll
from chaos.roads import BACKOFF_SECONDS
from seer.client import Prompt, RolloutClient, SamplingParams
from seer.client.image_uploads import Placed
from seer.client.results import Response
from seer.client.turns import NoRoom, PrefixTrajectories, Trajectory, TrajectoryFailed, TrajectoryGroup
from seer.common.errors import Unreachable

if TYPE_CHECKING:
    from chaos.trainers import Trainer

PATIENCE = 20
"""Tries of what a full buffer refuses, each of all trajectories one after the other."""

TORN = b'{"call_id":"'
"""What an incarnation that was killed while it wrote may leave at the end of a journal."""

BLOCK = 32

ANEW = (
    r"cannot be used again: the context is not what it was|^has weights of version|: has weights of version"
)
"""Why a run of agents is over: it needs another journal, or other weights."""


@dataclass(slots=True)
class Turns:
    """A trainer's rollout in turns: `run` it."""

    trainer: Trainer
    place: int
    step: Roll
    whys: dict[tuple[str, int], str | None] = field(default_factory=dict)
    """Of trajectories that ended early, until their groups arrive."""

    @property
    def how(self) -> InTurns:
        """How it runs."""
        assert self.step.turns is not None
        return self.step.turns

    @property
    def most_context(self) -> int:
        """Tokens that a context may have."""
        longest = max(length for _, length in self.step.prompts)
        return min(longest + self.how.room, BLOCK * self.trainer.world.plan.kv_blocks - 10)

    @property
    def most_open(self) -> int:
        """Trajectories under way at most: a full buffer refuses some, and the others begin again with them."""
        return min(self.how.most_open, self.trainer.world.plan.max_requests // 4)

    @property
    def left(self) -> list[str]:
        """Prompts that have not ended."""
        return [name for name, _ in self.step.prompts if (self.place, name) not in self.trainer.ended]

    async def run(self, client: RolloutClient) -> None:
        """Run it until every trajectory has ended, with its tokens or for good reason."""
        beats = 0
        while self.left:
            if self.place in self.trainer.cut_short:
                for prompt in self.left:
                    self.trainer.end(self.place, prompt, None, "cut short")
                return
            if beats:
                await asyncio.sleep(RETRY_SECONDS)
            beats += 1
            self.trainer.begun[self.place] += 1
            try:
                async with asyncio.timeout(self.step.cancel):
                    await (self._loops(client, beats) if self.how.resent else self._agents(client, beats))
            except TimeoutError:
                self.trainer.cut_short.add(self.place)
            self._expect_nothing_away()

    def _expect_nothing_away(self) -> None:
        """Have it noted if the buffer goes on to wait for trajectories of a rollout that was left, undisturbed.

        What a fault may have lost, before this or since a trajectory left, is not told again.
        """
        world, name, began = self.trainer.world, self.trainer.name, self.trainer.world.loop.time()
        left = self.trainer.begun[self.place]
        if [step.rollout_id for step in world.plan.rolls].count(self.step.rollout_id) > 1:
            return  # they may be those of another use

        def check() -> None:
            process = world.processes.get("buffer")
            if process is None or process.service is None or world._disturbed(name, began - BACKOFF_SECONDS):
                return
            if self.trainer.begun[self.place] != left:
                return  # they were begun again
            for each in process.service.machine.registry.trajectories.away.values():
                if world._disturbed(name, each.since - BACKOFF_SECONDS):
                    continue  # that it ended may have been lost
                if each.key[0] == name and each.group_id.startswith(f"{self.step.rollout_id}/"):
                    world.problem(f"{name} left {each.group_id}, which is awaited still")

        world.loop.call_later(1.0 + 4 * (world.plan.latency + world.plan.jitter), check)

    def prompt(self, name: str) -> Prompt:
        """Return a prompt of this rollout."""
        return self.trainer.world.prompt(self.step, name)

    # --- agents --------------------------------------------------------------------------

    async def _agents(self, client: RolloutClient, beats: int) -> None:
        step, how = self.step, self.how
        journal = self._journal()
        seen = set()
        async with client.trajectories(
            [self.prompt(name) for name, _ in step.prompts], n=step.n,
            sampling=SamplingParams(max_tokens=step.max_tokens), max_context=self.most_context,
            idle_seconds=how.idle_seconds, max_open=self.most_open, journal=journal, seed=step.seed,
            rollout_number=step.number, rollout_id=step.rollout_id, repeat=True,
            weight_version=self.trainer.asked[self.place],
        ) as rollout:  # fmt: skip
            self.trainer.journals.add(rollout._journal)
            async for group in rollout.run(functools.partial(self._agent, beats=beats)):
                if group.prompt_id in seen:
                    self.trainer.world.doubled += step.n
                seen.add(group.prompt_id)
                self._arrived(rollout.run_id, group)

    def _journal(self) -> str:
        """Return the path of this run's journal, as an incarnation that was killed may have left it."""
        name = f"journal-{self.trainer.name}-{self.place}-{self.trainer.runs[self.place]}"
        path = self.trainer.world.home / name
        if path.exists():
            with path.open("ab") as file:
                file.write(TORN)
        return str(path)

    async def _agent(self, trajectory: Trajectory, beats: int) -> None:
        for number in range(self.how.turns):
            try:
                await self._take(trajectory, number)
            except NoRoom:
                return  # as an agent would whose environment said too much
            except Unreachable:
                raise  # the client is closed
            except Exception as error:
                name = f"{trajectory.prompt_id}#{trajectory.index}"
                self.whys[trajectory.prompt_id, trajectory.index] = self._judged(name, number, error, beats)
                raise

    async def _take(self, trajectory: Trajectory, number: int) -> None:
        """Take a turn, and have the environment answer it."""
        await trajectory.generate()
        if number < len(self.how.waits):
            call = functools.partial(self._environment, self.how.waits[number])
            said = await trajectory.once(call)
            trajectory.append(said, images=self._shown(said))

    def _shown(self, said: list[int]) -> list[Placed]:
        """Return what an environment shows in its answer."""
        return [image(said[1], 0)] if said[0] == PLACEHOLDER else []

    async def _environment(self, seconds: float, call_id: str) -> list[int]:
        trainer = self.trainer
        if call_id in trainer.said:
            trainer.world.problem(f"{trainer.name}: {call_id} was asked for again")
        await asyncio.sleep(seconds)
        trainer.calls += 1
        said = [trainer.calls % 90 + 1] * (1 + trainer.calls % 3)
        shows = self.step.images and trainer.calls % 2
        trainer.said[call_id] = [PLACEHOLDER, *said] if shows else said
        return trainer.said[call_id]

    def _arrived(self, run: str, group: TrajectoryGroup) -> None:
        whys, again = [], False
        for each in group.trajectories:
            if isinstance(each, Trajectory):
                self._compare(run, each)
            elif (why := self._failed(each)) is not None:
                whys.append(why)
            else:
                again = True
        if not again and (self.place, group.prompt_id) not in self.trainer.ended:
            self.trainer.end(self.place, group.prompt_id, None, "; ".join(whys))

    def _compare(self, run: str, found: Trajectory) -> None:
        """Compare a trajectory with what it must be, given what its environments said."""
        step, world = self.step, self.trainer.world
        prompt = self.prompt(found.prompt_id)
        context: list[int] = list(prompt.token_ids)  # type: ignore[arg-type]
        images = [(each.image.name, each.offset) for each in prompt.images]
        mask, logprobs, ends = list[bool](), list[float](), list[str]()
        for number in range(self.how.turns):
            most = min(step.max_tokens, self.most_context - len(context))
            tokens, said, finish = (
                self._expected(found.prompt_id, found.index, context, most, found.weight_version, images)
                if most > 0
                else ([], [], "length")
            )
            ends.append("context" if finish == "length" and most < step.max_tokens else finish)
            added: list[int] = []
            if number < len(self.how.waits):
                added = self.trainer.said[f"{run}/{found.prompt_id}/{found.index}/{number}"]
            ended = len(context) + len(tokens) + len(added) > self.most_context
            if ended:
                added = []
            images += [
                (each.image.name, len(context) + len(tokens)) for each in (added and self._shown(added))
            ]
            context += [*tokens, *added]
            mask += [True] * len(tokens) + [False] * len(added)
            logprobs += [*said, *([0.0] * len(added))]
            if ended:
                break
        got = found.context.tolist(), found.loss_mask.tolist(), found.logprobs.tolist()
        world.changed += (*got, [turn.finish_reason for turn in found.turns]) != (
            context, mask, logprobs, ends,
        )  # fmt: skip
        self._check_weights(found.prompt_id, found.weight_version, found.weights_digest)

    def _expected(
        self,
        group: str,
        index: int,
        context: Sequence[int],
        most: int,
        version: int,
        images: Sequence[tuple[str, int]] = (),
    ) -> expected.Answer:
        world = self.trainer.world
        digest = world.digest(version)
        return expected.turn(self.step, group, index, context, most, world.modelled, digest, images)

    def _check_weights(self, prompt: str, version: int, digest: str) -> None:
        world, wanted = self.trainer.world, self.trainer.asked[self.place]
        where = f"{self.trainer.name}: {self.step.rollout_id}/{prompt}"
        if wanted >= 0 and version != wanted:
            world.problem(f"{where} has weights {version}, not {wanted}")
        if digest and digest != world.digest(version):
            world.problem(f"{where} names digest {digest} for {version}")

    # --- failures ------------------------------------------------------------------------

    def _failed(self, failed: TrajectoryFailed) -> str | None:
        """Return why a trajectory ended; None: it is worth another try."""
        if isinstance(failed.__cause__, Unreachable):
            raise failed.__cause__
        return self.whys.pop((failed.prompt_id, failed.index))

    def _judged(self, name: str, begun: int, error: Exception, beats: int) -> str | None:
        """Judge what ended turn `begun` of a trajectory, as `_failed` says."""
        trainer, world, why = self.trainer, self.trainer.world, str(error)
        verdict = trainer._verdict(self.place, self.step, name, type(error), why, beats)
        if verdict == "again" and "takes at most" in why and beats > PATIENCE:
            verdict = "final"
        if re.search(ANEW, why):
            verdict = "again" if world.plan.updates and trainer.asked[self.place] < 0 else "problem"
            trainer.runs[self.place] += 1
        if begun and not self.how.resent and self._is_awaited(why):
            verdict = "problem"
        if verdict == "again":
            trainer.retries[why] += 1
            return None
        if verdict == "problem":
            world.problem(
                f"{trainer.name}: {self.step.rollout_id}/{name} in turn {begun} at {world.loop.time():.3f}"
                f" ended in {type(error).__name__}: {why}"
            )
        return why

    def _is_awaited(self, why: str) -> bool:
        """Say whether a trajectory that was away for a moment ended, though nothing but an update or a drain came."""
        world, slack = (
            self.trainer.world,
            1.0 + 4 * (self.trainer.world.plan.latency + self.trainer.world.plan.jitter),
        )
        calm = all(each.kind == "drain buffer" or each.at > world.loop.time() for each in world.inflicted)
        if not calm or max(self.how.waits, default=0.0) + slack > self.how.idle_seconds:
            return False
        aborts = any(getattr(step, "in_flight", "finish") != "finish" for step in world.plan.scripts[0])
        return "is past" in why and not aborts

    # --- loops that send whole contexts -----------------------------------------------------

    async def _loops(self, client: RolloutClient, beats: int) -> None:
        rollout = client.open_rollout(self.step.rollout_id, repeat=True)
        sessions = PrefixTrajectories(rollout, idle_seconds=self.how.idle_seconds)
        try:
            await together(*(self._loops_of(sessions, prompt, beats) for prompt in self.left))
        finally:
            await rollout.leave()
        if len(sessions):
            self.trainer.world.problem(f"{self.trainer.name}: {len(sessions)} sessions are known still")

    async def _loops_of(self, sessions: PrefixTrajectories, prompt: str, beats: int) -> None:
        loops = (Loop(self, sessions, prompt, index, beats) for index in range(self.step.n))
        whys = await together(*(loop.run() for loop in loops))
        self.trainer.end(self.place, prompt, None, "; ".join(filter(None, whys)))

    def check(
        self, name: str, index: int, context: list[int], most: int, found: tuple[int, str, Response]
    ) -> None:
        """Compare a turn with what it must be."""
        version, digest, response = found
        wanted = self._expected(name, index, context, most, version)
        got = response.token_ids.tolist(), response.logprobs.tolist(), response.finish_reason
        self.trainer.world.changed += got != wanted
        self._check_weights(name, version, digest)
