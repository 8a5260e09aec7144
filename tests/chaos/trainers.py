"""The trainers of a virtual run: scripts that go on where an earlier incarnation of theirs was killed.

A trainer takes nothing on trust: each group is compared with what `expected` works out, for the seed,
rollout number and weight version that it asked for. A prompt that fails must have a reason that this
trainer's own plan, or the state of the world, makes legitimate; every other failure is a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from chaos.expected import answers
from chaos.in_place import NO_BYTES, Planned
from chaos.parts import Part, Parts
from chaos.plan import Pause, Renew, Rest, Roll
from chaos.turns import Turns
from chaos.values import BEYOND
from seer.client import RolloutClient, SamplingParams, WeightsRefused
from seer.client.results import Group, Response
from seer.client.rollout import BufferLost, Rollout
from seer.client.turns import Journal
from seer.client.weight_update import Source
from seer.common.errors import DeadlineExceeded, RequestRefused, RolloutCancelled, SeerError, Unreachable
from seer.common.sleep import SleepLevel, SleepTag

if TYPE_CHECKING:
    from chaos.world import World

RETRY_SECONDS = 0.5
WATCH_SECONDS = 3.0
"""How often the first trainer looks whether the weights that it made live still are."""

RESTRAINT, PATIENCE = 20, 80
"""Tries of what somebody else's use, or a full buffer, stands in the way of."""

TOLD = Response(0, np.zeros(1, np.int32), np.zeros(1, np.float32), None, "stop", "")
"""A response of which a trainer says how far its logprobs are off: a message that nothing depends on."""

_PINS = "weight_version" in inspect.signature(RolloutClient.submit).parameters

REFUSALS = (
    r"updates to version \d+: wait for that",
    r"engines sleep: wake them first",
    r"must be above the live one",
    r"no engine is left",
    r"no engine is there to take weights",
    r"the trainer sent nothing for",
    r"the buffer sent nothing of it",
    r"is not in this buffer's spool",
    r"is no longer needed",
    r"did not answer in",
    r"requests of the old version went on for",
)
"""Why an update may be refused while its trainer, buffer or engines come and go; it is asked for again."""

DISK_REFUSALS = (
    r"cannot be stored",
    r"do not fit into",
    r"cannot be read",
    r"No space left",
    r"[Dd]isk",
    r"ENOSPC",
)

IN_PLACE_REFUSALS = (NO_BYTES, r"it ended while it loaded them", r"cannot be loaded again", r"did not load")
"""Why one in place fails when no engine gets it."""

OVERTAKEN = (r"open the stream first",)
"""What is refused only where messages overtake each other, as those of TCP never do."""


@dataclass(slots=True)
class Ended:
    """How a prompt of a rollout ended: with a group, or with a reason."""

    group: Group | None = None
    why: str = ""


@dataclass(slots=True, eq=False)
class Trainer:
    """What all incarnations of a trainer have together; `run` is one incarnation."""

    world: World
    name: str
    ended: dict[tuple[int, str], Ended] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    """By step: the weight version that its rollout asked for."""
    cut_short: set[int] = field(default_factory=set)
    """Steps whose rollout was cancelled by this trainer, or met its deadline."""
    done: set[int] = field(default_factory=set)
    parts: dict[tuple[int, Part], tuple[Group | None, str]] = field(default_factory=dict)
    """By step: how the parts of rollouts over open ones ended, as groups do."""
    feints: set[tuple[int, Part]] = field(default_factory=set)
    said: dict[str, list[int]] = field(default_factory=dict)
    """By call id: what environments answered, so far in `calls` calls."""
    calls: int = 0
    runs: Counter[int] = field(default_factory=Counter)
    """By step: how many journals were given up."""
    journals: set[Journal] = field(default_factory=set)
    """Those that this incarnation has open."""
    begun: Counter[int] = field(default_factory=Counter)
    """By step: how often its trajectories were begun."""
    version: int = 0
    resting: bool = False
    incarnations: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    _updating: asyncio.Lock = field(default_factory=asyncio.Lock)

    def died(self) -> None:
        """Close the files of this incarnation, as the system does."""
        while self.journals:
            self.journals.pop().close()

    async def run(self, transport: object) -> None:
        """Go through the script; `Unreachable` starts over, as a trainer that is run again."""
        self.incarnations += 1
        self._updating = asyncio.Lock()
        while True:
            try:
                await self._incarnation(transport)
            except* Unreachable as gone:
                self.world.excuse_silence(self.name, str(gone.exceptions[0]))
            else:
                return
            if asyncio.current_task().cancelling():  # before 3.13 a task group whose child failed forgets it
                raise asyncio.CancelledError
            await asyncio.sleep(RETRY_SECONDS)

    async def _incarnation(self, transport: object) -> None:
        world = self.world
        async with RolloutClient(
            world.trainers_at, name=self.name, transport=transport, connect_seconds=100, silence_seconds=100
        ) as client:
            watching = asyncio.create_task(self._watch(client)) if self.name == "t0" else None
            try:
                await self._steps(client)
                world.finish(self.name)
                if watching is not None:
                    await world.finished.wait()
            finally:
                if watching is not None:
                    watching.cancel()
                    await asyncio.wait([watching])

    async def _steps(self, client: RolloutClient) -> None:
        if self.resting:
            await self._rest(client, asleep=False)
        async with asyncio.TaskGroup() as aside:
            for place, step in enumerate(self.world.script(self.name)):
                if place in self.done:
                    continue
                match step:
                    case Roll() if step.aside:
                        aside.create_task(self._roll(client, place, step))
                        await asyncio.sleep(0)
                        continue
                    case Roll():
                        await self._roll(client, place, step)
                    case Renew():
                        await self._renew(client, step)
                    case Rest():
                        await self._rest(client, asleep=True, level=step.level if self.version else 1)
                        await asyncio.sleep(step.seconds)
                        if step.level > 1 or step.renews:
                            await self._rest(client, asleep=False, tags=["weights"])
                        if step.renews:
                            await self._renew(client, Renew(False, "finish"))
                        await self._rest(client, asleep=False)
                    case Pause():
                        await asyncio.sleep(step.seconds)
                self.done.add(place)

    # --- weights and sleep ---------------------------------------------------------------

    async def _renew(self, client: RolloutClient, step: Renew) -> None:
        world = self.world
        # An engine that a prompt kills loses weights in place, and the update that brings them back has to end
        # that prompt, so nobody would learn what it does.
        if step.in_place and self.version and self.version not in world.in_place and not world.plan.poison:
            world.in_place.add(self.version + 1)
        await self._update(client, self.version + 1, step.folder, step.in_flight)

    async def _update(self, client: RolloutClient, version: int, folder: bool, in_flight: str) -> None:
        world = self.world
        world.asked_version = max(world.asked_version, version)
        source: Source = world.folder(version) if folder else world.tensors(version)
        if version in world.in_place:
            source = Planned(version)
        async with self._updating:
            while True:
                try:
                    live = await client.update_weights(version, source, in_flight=in_flight)
                except WeightsRefused as refused:
                    self._refused(version, refused)
                    await asyncio.sleep(RETRY_SECONDS)
                    if world.plan.clocks and "engines sleep" in str(refused):
                        # An engine that was cut off has an older wish, of an incarnation whose clock was ahead.
                        await self._rest(client, asleep=False, tags=["weights"] if self.resting else None)
                else:
                    break
        if live.digest != world.digest(version):
            world.problem(f"{self.name}: version {version} is live with digest {live.digest}")
        self.version = max(self.version, version)

    def _refused(self, version: int, refused: WeightsRefused) -> None:
        for why in refused.reasons.values():
            patient = bool(
                self.world.plan.faults or self.world.plan.catches
            )  # else nothing stands in its way
            legitimate = (REFUSALS if patient else (r"updates to version \d+: wait for that",)) + (
                DISK_REFUSALS if self.world.disk_was_full else ()
            )
            legitimate += OVERTAKEN if self.world.noisy else ()
            legitimate += IN_PLACE_REFUSALS if version in self.world.in_place else ()
            if not any(re.search(pattern, why) for pattern in legitimate):
                self.world.problem(f"{self.name}: version {version} refused: {why}")
            self.retries[why] += 1

    async def _watch(self, client: RolloutClient) -> None:
        """Update again when all that had the weights are gone."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self.version == 0 or self._updating.locked() or self.resting:
                continue
            try:
                status = await client.status(30)
                stale = status.instances and status.weight_version < self.version
                failed = status.quarantined and not status.instances  # as with a spool that is gone
                if (stale or failed) and not self._updating.locked() and not self.resting:
                    await self._update(client, self.version, False, "abort")
            except SeerError:
                continue

    async def _rest(
        self,
        client: RolloutClient,
        *,
        asleep: bool,
        level: SleepLevel = 1,
        tags: list[SleepTag] | None = None,
    ) -> None:
        """Have engines sleep, or wake, until they do."""
        self.resting = True
        seconds = 200 + self.world.plan.turn_seconds
        while True:
            try:
                await (client.sleep(seconds, level=level) if asleep else client.wake(seconds, tags=tags))
            except Unreachable:
                raise
            except SeerError as error:
                if not re.search(
                    "a weight update is under way|wait for that|await that first|no engine is there",
                    str(error),
                ):
                    self.world.problem(f"{self.name}: sleep {asleep} failed: {error}")
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.resting = asleep or tags is not None
                return

    # --- rollouts ------------------------------------------------------------------------

    async def _roll(self, client: RolloutClient, place: int, step: Roll) -> None:
        """Submit until every prompt has ended, with a group or for good reason."""
        if place not in self.asked:
            self.asked[place] = self.version + step.ahead if step.pinned else -1
        if step.parts is not None:
            await Parts(self, place, step).run(client)
            self.done.add(place)
            return
        if step.turns is not None:
            await Turns(self, place, step).run(client)
            self.done.add(place)
            return
        beats = 0
        while left := [prompt for prompt, _ in step.prompts if (place, prompt) not in self.ended]:
            if place in self.cut_short:  # by an earlier incarnation
                for prompt in left:
                    self._end(place, prompt, Ended(why="cut short"))
                break
            if beats:
                await asyncio.sleep(RETRY_SECONDS)
            beats += 1
            rollout = await self._submit(client, place, step, left)
            try:
                await self._collect(place, step, rollout)
            finally:
                self._judge_failures(place, step, rollout, beats)
        self.done.add(place)

    async def _submit(self, client: RolloutClient, place: int, step: Roll, left: list[str]) -> Rollout:
        options = {"weight_version": self.asked[place]} if _PINS else {}
        if not _PINS:
            client.weight_version = self.asked[place]
        prompts = [self.world.prompt(step, prompt_id) for prompt_id in left]
        before = self.world.script(self.name)[:place]
        repeat = any(isinstance(each, Roll) and each.number == step.number for each in before)
        rollout = await client.submit(
            prompts, n=step.n, sampling=SamplingParams(max_tokens=step.max_tokens), seed=step.seed,
            rollout_number=step.number, rollout_id=step.rollout_id, deadline_seconds=step.deadline, repeat=repeat, **options,
        )  # fmt: skip
        rollout.weight_version = self.asked[place]
        await client.report_mismatch([TOLD], [TOLD.logprobs])
        if not step.images:
            with contextlib.suppress(Unreachable, RequestRefused):  # as of too many: nothing depends on it
                await client.next_prompts(
                    prompts, n=step.n, sampling=SamplingParams(max_tokens=step.max_tokens), seed=step.seed,
                    rollout_number=step.number + 1, timeout_seconds=RETRY_SECONDS,
                )  # fmt: skip
        return rollout

    async def _collect(self, place: int, step: Roll, rollout: Rollout) -> None:
        cancelling = None
        if step.cancel is not None:
            cancelling = asyncio.create_task(self._cancel(place, step.cancel, rollout))
        taken = 0
        try:
            while True:
                for group in rollout.groups[taken:]:
                    taken += 1
                    self._arrived(place, step, group)
                if not rollout.unfinished:
                    return
                await rollout.changed()
        finally:
            if cancelling is not None:
                cancelling.cancel()

    async def _cancel(self, place: int, seconds: float, rollout: Rollout) -> None:
        await asyncio.sleep(seconds)
        self.cut_short.add(place)
        await rollout.cancel()

    def _arrived(self, place: int, step: Roll, group: Group) -> None:
        world, wanted = self.world, self.asked[place]
        if (place, group.prompt_id) in self.ended:
            world.doubled += len(group.responses)
        where = f"{self.name}: {step.rollout_id}/{group.prompt_id}"
        if wanted >= 0 and group.weight_version != wanted:
            world.problem(f"{where} has weights {group.weight_version}, not {wanted}")
        if group.weights_digest != world.digest(group.weight_version):
            world.problem(f"{where} names digest {group.weights_digest} for {group.weight_version}")
        expected = world.expected(step, group.prompt_id, group.weight_version)
        world.changed += expected.changed(group.prompt_id, answers(group))
        self._end(place, group.prompt_id, Ended(group))

    def end(self, place: int, prompt_id: str, group: Group | None, why: str) -> None:
        """Note that all parts of a prompt ended."""
        self._end(place, prompt_id, Ended(group, why))

    def _end(self, place: int, prompt_id: str, ended: Ended) -> None:
        self.ended[place, prompt_id] = ended
        self.world.arrived()

    # --- failures ------------------------------------------------------------------------

    def _judge_failures(self, place: int, step: Roll, rollout: Rollout, beats: int) -> None:
        for prompt_id, (cls, why) in list(rollout._failures.items()):
            verdict = self._verdict(place, step, prompt_id, cls, why, beats)
            if verdict == "again":
                self.retries[why] += 1
                continue
            if verdict == "problem":
                self.world.problem(
                    f"{self.name}: {step.rollout_id}/{prompt_id} at {self.world.loop.time():.3f}"
                    f" ended in {cls.__name__}: {why}"
                )
            self._end(place, prompt_id, Ended(why=why))

    def _verdict(self, place: int, step: Roll, prompt_id: str, cls: type, why: str, beats: int) -> str:
        """Say whether a failure is legitimate (`final`, or `again`: worth another try) or a `problem`."""
        if issubclass(cls, BufferLost):
            self.world.excuse_silence(self.name, why)
            return "again"
        if "the client was closed" in why:
            return "again"  # by this incarnation's end
        if issubclass(cls, DeadlineExceeded) and step.deadline is not None:
            self.cut_short.add(place)
            return "final"
        if issubclass(cls, RolloutCancelled):
            return self._of_cancel(place, step, why, beats)
        if "already submitted with another" in why or "another trainer uses" in why:
            return self._of_use(place, step, why, beats)
        if step.images and any(re.search(reason, why) for reason in self.world.excuses_of_images(self.name)):
            return "again" if beats < PATIENCE else "final"
        return self._of_plan(place, step, prompt_id, why, beats)

    def _of_cancel(self, place: int, step: Roll, why: str, beats: int) -> str:
        if "cancelled by" in why:
            return "final" if place in self.cut_short and step.cancel is not None else "problem"
        if "given no sign of life" in why:
            return "again" if self.world.may_lapse(self.name) else "problem"
        aborted = "aborted by a weight update" in why and self.world.plan.updates
        return "again" if aborted and beats < PATIENCE else "problem"

    def _of_use(self, place: int, step: Roll, why: str, beats: int) -> str:
        """Another trainer has the id; or an earlier use, whose `Cancel` an incarnation may have died with."""
        if step.shared or self.world.is_shared(step.rollout_id):
            return "again" if beats < RESTRAINT else "final"
        earlier = any(
            isinstance(other, Roll) and other.rollout_id == step.rollout_id and other.seed != step.seed
            for other in self.world.script(self.name)[:place]
        )
        if earlier and beats < RESTRAINT:
            return "again"
        return "final" if earlier and self.incarnations > 1 else "problem"

    def _of_plan(self, place: int, step: Roll, prompt_id: str, why: str, beats: int) -> str:
        plan = self.world.plan
        if "takes at most" in why and plan.requests > plan.max_requests:
            return "final" if step.n > plan.max_requests or beats >= PATIENCE else "again"
        # What a rollout asked for, or began with, before somebody updated.
        past = re.search(r"weight version (\d+)(?: is past|, and version \d+ is live)", why)
        if past and int(past[1]) < self.world.asked_version:
            return "final"
        if "no engine that fits registered" in why and self.world.may_lack_weights:
            return "final"
        if "fits no instance" in why and prompt_id == BEYOND:
            return "final"
        if prompt_id == "poison":
            return "final" if re.search("engine|died|lost", why) else "problem"
        if "no token can be sampled" in why:
            return "final" if prompt_id == "mute" else "problem"
        return "problem"
