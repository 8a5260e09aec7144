"""A trainer that can be killed: what it got is in a file, and its next incarnation goes on from there.

python trainer.py PARENT_PID JOB.json OUT.jsonl

It comes back under its name and rollout id, and asks for the rest, or for everything again. Before that it
may use the same rollout id for something else, cut short by a deadline or a cancel, and update weights. Agents
have a journal beside the file; their tool answers by the turn alone.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import sys
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import load_file

from seer.client import (
    BufferLost,
    DeadlineExceeded,
    Placed,
    RequestRefused,
    RolloutCancelled,
    RolloutClient,
    SamplingParams,
    WeightsRefused,
    prepared_image,
)
from seer.client.prompts import Prompt
from seer.client.tensor_stream import TensorStream
from seer.client.turns import Trajectory, TrajectoryFailed, TrajectoryGroup
from seer.common.config import SecurityConfig
from seer.common.prepared_image import PreparedImage
from seer.common.process.children import die_with

UPDATE_SECONDS = 60.0
"""A stream that a killed trainer left is given up after 30 s; until then no other update can begin."""

OVERTAKEN = r"weight version \d+ is past|submit what is left under another rollout id"
"""Why a rollout cannot go on under its id: the buffer died, and an update came before its trainer did."""

IMAGE_LOST = r"is not in this buffer: submit it again|is not the name of these bytes"
"""Why prompts fail whose images were damaged on the buffer's disk; they are submitted again, with their images."""

NO_ROOM = r"do not fit: images in use (of trainer '\w+' )?have"
"""Why prompts fail while other rollouts use all room for images."""

ROOM_SECONDS = 2.0
"""For others to end; then these prompts are submitted again."""

IMAGE_NUMBERS = 700_000
"""Numbers in an image, 2.8 MB: two parts."""

TRIES, AGAIN_SECONDS = 40, 1.0
"""Of agents whose trajectories a fault ended."""

MAX_CONTEXT = 400

BUFFER_LOST = 3
"""Exit code: the buffer was silent for too long; a trainer's next incarnation goes on with what is left."""

Answer = tuple[list[int], list[float], str]


class Use(msgspec.Struct):
    """One use of the rollout id, whose seed and number make the noise; cut short after `seconds`, if any.

    `version`: weights to update to before it; 0: none.
    """

    seed: int
    number: int
    cut: str = ""
    """`deadline` or `cancel`."""
    seconds: float = 0.0
    version: int = 0


class Job(msgspec.Struct):
    """Token ids by prompt id, and what to do with them, in order. The last use is not cut short."""

    endpoint: str
    name: str
    rollout_id: str
    prompts: dict[str, list[int]]
    n: int
    max_tokens: int
    uses: list[Use]
    model: str = ""
    """A folder of model.safetensors: what weights are made from, for engines that need real ones."""
    turns: int = 0
    """Responses are agents' trajectories of so many turns."""
    diverged: str = ""
    """A folder of model.safetensors, of which one value in a tensor is NaN: sent first, to be refused."""
    updates: bool = True
    """No other trainer updates weights."""
    everything: bool = False
    """A later incarnation asks for everything again, not for what is left."""
    security: SecurityConfig = SecurityConfig()
    images: int = -1
    """Prompts show images, each another one, from this number on; -1: none."""

    def prompt(self, key: str) -> Prompt:
        """Return a prompt."""
        tokens = self.prompts[key]
        images = [] if self.images < 0 else [Placed(image(self.images + int(key[1:])), 0, 1)]
        return Prompt(key, token_ids=tokens, images=images)


def image(number: int) -> PreparedImage:
    """Return an image by its number."""
    pixels = np.full((1, IMAGE_NUMBERS), number, np.float32)
    return prepared_image("image", pixel_values=pixels, image_grid_thw=np.array([[1, 2, 2]]))


class Line(msgspec.Struct):
    """A group that arrived in an incarnation (a process id), or, without `id`, the end of a use."""

    use: int
    incarnation: int
    id: str = ""
    digest: str = ""
    version: int = 0
    answers: list[Answer] = []


CONTENTS = 3
"""Kinds of real weights: so many versions, one after the other, differ in their content."""


def tensors(version: int, model: str = "") -> dict[str, np.ndarray]:
    """Return the weights of a version: clients send few elements of them, as a delta, or all."""
    if model:
        weights = load_file(Path(model) / "model.safetensors")
        norm = next(name for name in weights if name.endswith("norm.weight") and "layers" not in name)
        weights[norm] *= 1 + 0.1 * (version % CONTENTS)
        return weights
    weights = np.ones((64, 64), dtype=np.float32)
    weights[0] = version
    return {"w": weights}


def digest(version: int, model: str = "") -> str:
    """Return their digest; none for the first ones, that replay engines start with."""
    return TensorStream(tensors(version, model)).digest() if version else ""


def said(tokens: list[int]) -> list[int]:
    """Return what a tool answers to a turn."""
    return [3 + sum(tokens) % 60] * (1 + len(tokens) % 3)


def lines(out: Path) -> list[Line]:
    """Return what was written so far; a line torn by a kill does not count."""
    whole = out.read_bytes().split(b"\n") if out.exists() else [b""]
    decoded = []
    for line in whole[:-1]:
        try:
            decoded.append(msgspec.json.decode(line, type=Line))
        except msgspec.DecodeError:  # torn, and gone on after by the next incarnation
            continue
    return decoded


class Trainer:
    """One incarnation."""

    def __init__(self, job: Job, out: Path) -> None:
        self._job, self._out = job, out
        self._before = lines(out)
        torn = out.exists() and not out.read_bytes().endswith(b"\n") and out.stat().st_size
        self._file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if torn:
            os.write(self._file, b"\n")

    async def run(self) -> None:
        """Do what is left of the job."""
        job = self._job
        last = len(job.uses) - 1
        ended = {line.use for line in self._before if not line.id}
        known = {line.id for line in self._before if line.use == last and line.id}
        if known == set(job.prompts):
            return
        async with RolloutClient(job.endpoint, name=job.name, security=job.security) as client:
            for number, use in enumerate(job.uses):
                if number in ended:
                    continue
                if number == last and job.diverged:
                    await _send_diverged(client, Path(job.diverged))
                if use.version:
                    await _update(client, use.version, job.model)
                if job.turns:
                    await self._agents(client, number, use)
                    continue
                left = job.prompts if job.everything or number < last else job.prompts.keys() - known
                await self._use(client, number, use, [key for key in job.prompts if key in left])

    async def _use(self, client: RolloutClient, number: int, use: Use, keys: list[str]) -> None:
        """Roll out `keys`; where an update came first, or images are lost, go on under another rollout id."""
        for rollout_id in (self._job.rollout_id, *(f"{self._job.rollout_id}+{each}" for each in range(9))):
            try:
                await self._roll(client, number, use, rollout_id, keys)
            except RequestRefused as error:
                lost = self._job.images >= 0 and re.search(f"{IMAGE_LOST}|{NO_ROOM}", str(error))
                if re.search(NO_ROOM, str(error)):
                    await asyncio.sleep(ROOM_SECONDS)
                if not lost and (self._job.updates or not re.search(OVERTAKEN, str(error))):
                    raise
                arrived = {line.id for line in lines(self._out) if line.use == number}
                keys = [key for key in keys if key not in arrived]
                if not keys:  # an earlier incarnation of this trainer has them all
                    break
            else:
                break
        self._note(Line(number, os.getpid()))

    async def _roll(
        self, client: RolloutClient, number: int, use: Use, rollout_id: str, keys: list[str]
    ) -> None:
        job = self._job
        rollout = await client.submit(
            [job.prompt(key) for key in keys], n=job.n,
            sampling=SamplingParams(max_tokens=job.max_tokens), seed=use.seed, rollout_number=use.number,
            rollout_id=rollout_id, deadline_seconds=use.seconds if use.cut == "deadline" else None,
            repeat=bool(job.model),
        )  # fmt: skip
        cancelling = None
        if use.cut == "cancel":
            cancelling = asyncio.create_task(_cancel(rollout, use.seconds))
        try:
            async for group in rollout:
                answers = [
                    (each.token_ids.tolist(), each.logprobs.tolist(), each.finish_reason)
                    for each in group.responses
                ]
                where = (group.weights_digest, group.weight_version)
                self._note(Line(number, os.getpid(), group.prompt_id, *where, answers))
        except (DeadlineExceeded, RolloutCancelled) as error:
            expected = {"deadline": DeadlineExceeded, "cancel": RolloutCancelled}.get(use.cut)
            if type(error) is not expected:
                raise
        finally:
            if cancelling is not None:
                cancelling.cancel()

    async def _agents(self, client: RolloutClient, number: int, use: Use) -> None:
        """Run agents until each has ended; those that a fault ended begin again, with what tools have said."""
        job, noted = self._job, set[str]()
        whys: list[str] = []
        for _ in range(TRIES):
            async with client.trajectories(
                [job.prompt(key) for key in job.prompts], n=job.n, max_context=MAX_CONTEXT,
                sampling=SamplingParams(max_tokens=job.max_tokens), seed=use.seed, rollout_number=use.number,
                rollout_id=job.rollout_id, journal=self._out.with_suffix(f".journal-{number}"), repeat=True,
            ) as rollout:  # fmt: skip
                async for group in rollout.run(self._agent):
                    failed = [each for each in group.trajectories if isinstance(each, TrajectoryFailed)]
                    whys += [str(each) for each in failed]
                    if not failed and group.prompt_id not in noted:
                        noted.add(group.prompt_id)
                        self._note(trajectories(number, os.getpid(), group))
            if noted == job.prompts.keys():
                self._note(Line(number, os.getpid()))
                return
            await asyncio.sleep(AGAIN_SECONDS)
        raise RuntimeError(f"agents failed {TRIES} times: {whys[-5:]}")

    async def _agent(self, trajectory: Trajectory) -> None:
        for number in range(self._job.turns):
            turn = await trajectory.generate()
            if number < self._job.turns - 1:
                trajectory.append(await trajectory.once(functools.partial(_answer, turn.token_ids.tolist())))

    def _note(self, line: Line) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")


def trajectories(number: int, incarnation: int, group: TrajectoryGroup) -> Line:
    """Return the line of a group of which no trajectory failed."""
    each: list[Trajectory] = list(group.trajectories)
    answers = [
        (one.context.tolist(), one.logprobs.tolist(), " ".join(turn.finish_reason for turn in one.turns))
        for one in each
    ]
    where = (each[0].weights_digest, each[0].weight_version)
    return Line(number, incarnation, group.prompt_id, *where, answers)


async def _answer(tokens: list[int], _: str) -> list[int]:
    return said(tokens)


async def _update(client: RolloutClient, version: int, model: str) -> None:
    """Update, again where an earlier incarnation's stream still stands."""
    deadline = asyncio.get_running_loop().time() + UPDATE_SECONDS
    while True:
        try:
            await client.update_weights(version, tensors(version, model))
        except WeightsRefused as error:
            if asyncio.get_running_loop().time() > deadline:
                raise
            print(f"trying again: {error}", file=sys.stderr)
            await asyncio.sleep(0.5)
        else:
            return


async def _send_diverged(client: RolloutClient, folder: Path) -> None:
    """Send weights of which one value is NaN until they are refused for that, by the tensor's name."""
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[os.getpid() % len(weights)]
    weights[name].flat[-1] = np.nan
    deadline = asyncio.get_running_loop().time() + UPDATE_SECONDS
    while True:
        try:
            await client.update_weights(1, weights)
        except WeightsRefused as error:
            if re.search(rf"{re.escape(name)}.* not finite", str(error)):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise
            print(f"trying again: {error}", file=sys.stderr)
            await asyncio.sleep(0.5)
        else:
            raise AssertionError(f"weights with NaN in {name} went live")


async def _cancel(rollout: object, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await rollout.cancel()


if __name__ == "__main__":
    parent, job_file, out_file = sys.argv[1:]
    die_with(int(parent))
    trainer = Trainer(msgspec.json.decode(Path(job_file).read_bytes(), type=Job), Path(out_file))
    try:
        asyncio.run(trainer.run())
    except BufferLost as error:
        print(f"the next incarnation goes on: {error}", file=sys.stderr)
        sys.exit(BUFFER_LOST)
