"""Rollouts on a system of real processes, watched from outside and judged by what was written down."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence

import msgspec

from chaos import trainer
from chaos.expected import Answer, Expected, difference, request_key, response
from chaos.outcome import Outcome
from chaos.system import System
from chaos.trainer import Job, Line, Use
from seer.client import SamplingParams

WATCH_SECONDS = 0.01

MOST_CACHED = 64
"""Rollouts whose answers a judge remembers: a long run has thousands."""

REPORT_BYTES = 1_500
"""Of the last words of a trainer that failed."""

_SAID = 5
"""Groups of a rollout of which is said how they changed."""


def job(
    system: System, prompts: int, *, n: int = 4, max_tokens: int = 160, number: int = 0, name: str = "trainer"
) -> Job:
    """Return one plain rollout; each `number` has noise of its own."""
    return Job(
        endpoint=system.config.endpoints.trainers, name=name, rollout_id=f"{name}-{number}",
        prompts={f"p{i}": [3 + i % 90, *range(3, 4 + i % 24)] for i in range(prompts)},
        n=n, max_tokens=max_tokens, uses=[Use(0, number)],
        security=system.security(f"trainer-{name}"),
    )  # fmt: skip


class Roll:
    """One job of one trainer on a system: `run` it, then `judge` it."""

    def __init__(self, system: System, asked: Job) -> None:
        self.system, self.job = system, asked
        self.place = system.trainers[asked.name]
        self.arrivals: list[float] = []
        """When something arrived, in the loop's time."""
        self.failed = ""
        """What the trainer said when it ended other than by a kill."""
        self.buffer_lost = 0
        """How often it gave up on a silent buffer, and came back."""
        self._first = asyncio.Event()

    async def run(self) -> None:
        """Run the trainer, incarnation after incarnation, until one is done."""
        self.place.out.unlink(missing_ok=True)
        self.place.job.write_bytes(msgspec.json.encode(self.job))
        watching = asyncio.create_task(self._watch())
        try:
            while not await self._incarnation():
                pass
            await asyncio.sleep(2 * WATCH_SECONDS)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            for journal in self.system.folder.glob(f"{self.job.name}.journal-*"):
                journal.unlink()

    async def first(self) -> None:
        """Wait for the first arrival."""
        await self._first.wait()

    async def _incarnation(self) -> bool:
        command = (
            sys.executable,
            trainer.__file__,
            str(os.getpid()),
            str(self.place.job),
            str(self.place.out),
        )
        file = self.system.folder / f"{self.job.name}.log"
        with file.open("ab") as log:
            said = log.tell()
            async with self.system.place(self.job.name):
                process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        self.place.process = process
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if code == trainer.BUFFER_LOST:
            self.buffer_lost += 1
            return False
        if code > 0:  # it failed: another incarnation would hide that
            self.failed = file.read_bytes()[said:].decode(errors="replace")[-REPORT_BYTES:]
        self.system.note_death(self.job.name, code or -9)
        return code >= 0

    async def _watch(self) -> None:
        seen = 0
        while True:
            size = self.place.out.stat().st_size if self.place.out.exists() else 0
            if size > seen:
                seen = size
                self.arrivals.append(asyncio.get_running_loop().time())
                if not self._first.is_set() and any(line.id for line in trainer.lines(self.place.out)):
                    self._first.set()
            await asyncio.sleep(WATCH_SECONDS)

    # --- judging -------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        """Return the groups that arrived."""
        return [line for line in trainer.lines(self.place.out) if line.id]

    def judge(self, outcome: Outcome, known: Judge) -> None:
        """Add what arrived, and what should have, to an outcome."""
        asked, lines = self.job, self.lines()
        arrived = {(line.use, line.id) for line in lines}
        whole = {
            (number, key) for number, use in enumerate(asked.uses) if not use.cut for key in asked.prompts
        }
        times = Counter((line.use, line.incarnation, line.id) for line in lines)
        outcome.responses += asked.n * len(lines)
        outcome.lost += asked.n * len(whole - arrived)
        outcome.doubled += asked.n * sum(count - 1 for count in times.values())
        changed = [(count, line) for line in lines if (count := known.changed(asked, line))]
        outcome.changed += sum(count for count, _ in changed)
        outcome.problems += [known.why(asked, line) for _, line in changed[:_SAID]]
        if self.failed:
            outcome.problems.append(f"{asked.name} failed: {self.failed}")


class Judge:
    """What replay engines answer, or what others answered without any fault; by use and weights."""

    def __init__(self, system: System, undisturbed: Sequence[Line] = ()) -> None:
        self._engine = system.config.engine
        self._cache: dict[tuple[str | int, ...], Expected] = {}
        self._undisturbed: dict[tuple[bool, str], dict[str, list[Answer]]] = {}
        self.versions = {0: trainer.digest(0)}
        """Digests of the weights that engines began with, and of those that anybody asked for."""
        self.knows(undisturbed)

    def knows(self, undisturbed: Sequence[Line], *, agents: bool = False) -> None:
        """Take these lines for what rollouts, or agents, answer with the weights of these lines."""
        for line in undisturbed:
            if not line.version:
                self.versions[0] = line.digest
            self._undisturbed.setdefault((agents, line.digest), {})[line.id] = line.answers

    def asked(self, version: int, model: str = "") -> None:
        """Somebody will update to a version."""
        self.versions[version] = trainer.digest(version, model)

    def changed(self, asked: Job, line: Line) -> int:
        """Count the responses of a group that are not what they must be."""
        use = asked.uses[line.use]
        versions = {use.version} if use.version else self.versions
        if line.version not in versions or self.versions[line.version] != line.digest:
            return asked.n
        return self._expected(asked, use, line.digest).changed(line.id, line.answers)

    def why(self, asked: Job, line: Line) -> str:
        """Say how a group is not what it must be."""
        use = asked.uses[line.use]
        where = f"{asked.name}, use {line.use} ({use.version}), {line.id} of version {line.version}"
        if self.versions.get(line.version) != line.digest or use.version not in (0, line.version):
            return f"{where}: of weights that nobody asked for"
        return (
            f"{where}: {difference(line.answers, self._expected(asked, use, line.digest).answers[line.id])}"
        )

    def _expected(self, asked: Job, use: Use, digest: str) -> Expected:
        if self._undisturbed:
            return Expected(self._undisturbed[bool(asked.turns), digest])
        key = (asked.name, use.seed, use.number, digest, asked.images, asked.turns)
        if key not in self._cache:
            if len(self._cache) > MOST_CACHED:
                self._cache.clear()
            self._cache[key] = self._replayed(asked, use, digest)
        return self._cache[key]

    def _replayed(self, asked: Job, use: Use, digest: str) -> Expected:
        if asked.turns:
            return Expected({key: self._agents(asked, use, digest, key) for key in asked.prompts})
        prompts = [asked.prompt(name) for name in asked.prompts]
        sampling = SamplingParams(max_tokens=asked.max_tokens)
        return Expected.of_replay(prompts, asked.n, sampling, self._engine, use.number, digest, use.seed)

    def _agents(self, asked: Job, use: Use, digest: str, prompt: str) -> list[Answer]:
        found, modelled = [], self._engine.replay
        for index in range(asked.n):
            key = request_key(use.seed, use.number, prompt, index, digest)
            context, logprobs, ends = list(asked.prompts[prompt]), list[float](), list[str]()
            for number in range(asked.turns):
                sizes = asked.max_tokens, modelled.vocab_size, modelled.mean_tokens
                tokens, likely, end = response(key, context, *sizes)
                added = trainer.said(tokens) if number < asked.turns - 1 else []
                context += [*tokens, *added]
                logprobs += [*likely, *([0.0] * len(added))]
                ends.append(end)
            found.append((context, logprobs, " ".join(ends)))
        return found
