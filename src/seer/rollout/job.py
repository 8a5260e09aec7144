"""`seer rollout`: a file of prompts in, a file of responses out.

Invariants:
- nothing is started before the whole input was checked;
- OUT has all prompts or does not appear; finished prompts are kept in its journal for `--resume`, unfinished
  ones are listed and make the exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import platform
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from seer import __version__
from seer.client import RolloutClient
from seer.client.prompts import Prompt, check_request
from seer.client.rollout import Rollout
from seer.client.text import Tokenizer
from seer.common.config import Config
from seer.common.errors import InvalidField, RequestRefused, SeerError, Unreachable
from seer.common.net.keys import load_keys, name_under, security_of
from seer.common.policy.schedule import POLICIES
from seer.common.policy.tail import tail_seconds
from seer.common.process.scratch import Scratch
from seer.common.types import SamplingParams
from seer.common.wire import InstanceStatus
from seer.local.child import LaunchError
from seer.local.system import LocalSystem, run
from seer.report.engine_use import acceptance_length, draft_text, pool_text, pool_used, total
from seer.rollout.files import (
    ModelFacts,
    PromptLine,
    check_apart,
    check_fit,
    check_weights,
    check_writable,
    model_facts,
    read_prompts,
    tokenizer_of,
    with_length,
    write_report,
)
from seer.rollout.image_reader import ImageReader
from seer.rollout.progress import showing
from seer.rollout.rollout_journal import Journal, model_digest, prompts_digest

CONNECT_SECONDS = 30.0
"""Deadline for the buffer's first answer."""

ENGINE_SECONDS = 0.2
"""How often a rollout that needs the live weights looks for an engine."""


Roll = Callable[[str], Coroutine[object, object, None]]
"""Has the system at an endpoint do the work."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The command's options. `connect` is a running system's endpoint; empty: start a system with
    `config`. Without a `rollout_number` it follows from the live weights: other weights, other noise.
    """

    prompts: Path
    out: Path
    report: Path | None
    report_html: Path | None = None
    n: int
    sampling: SamplingParams
    seed: int
    rollout_number: int | None
    instances: int | None
    connect: str
    resume: bool
    config: Config

    @property
    def model(self) -> Path | None:
        """The model folder; None if none is given, which is possible with `--connect` and the replay
        backend.
        """
        return Path(self.config.shared.model) if self.config.shared.model else None


class Outcome(msgspec.Struct):
    """The result so far; `resumed` prompts were finished by an earlier run.

    `name` is the name of both trainer and rollout at the buffer. It is a function of the job: a run that
    resumes a killed one gets what the system has finished meanwhile. Seconds are wall time; `seconds` from
    submission to the last response. `efficiency` is what the buffer tells (`wire.RolloutEnd`); None: unknown.
    """

    name: str
    resumed: int
    rollout: Rollout | None = None
    error: SeerError | None = None
    startup_seconds: float = 0.0
    seconds: float = 0.0
    instances: list[InstanceStatus] = []
    efficiency: float | None = None
    restarts: int = 0


def perform(job: Job) -> int:
    """Run the job and return the exit code: 0, or 1 when any prompt failed.

    Raises `InvalidField` or `ConfigError` for bad input, other `SeerError`s when nothing ran.
    """
    check_request(job.n, job.sampling, job.seed, job.rollout_number or 0)
    outputs = {"--out": job.out, "--report": job.report, "--report-html": job.report_html}
    for option, file in outputs.items():
        check_writable(option, file)
    check_apart({"PROMPTS": job.prompts, **outputs})
    embedded = not job.connect
    if job.report_html is not None and not embedded:
        fix = "with --connect, the log is the running buffer's: `seer report` draws it"
        raise InvalidField("--report-html", str(job.report_html), fix)
    if embedded and job.model is None and job.config.engine.backend == "vllm":
        raise InvalidField("--model", "", "give a Hugging Face model folder")
    if job.resume and job.model is None and job.connect:
        raise InvalidField(
            "--resume", True, "with --connect, give --model: a run is identified by its model's bytes"
        )
    if embedded and job.config.buffer.policy not in POLICIES:
        raise InvalidField("--policy", job.config.buffer.policy, f"choose one of {', '.join(POLICIES)}")
    facts = ModelFacts() if job.model is None else model_facts(job.model)
    if embedded and job.model is not None and job.config.engine.backend == "vllm":
        check_weights(job.model)
    tokenizer = tokenizer_of(job.model)
    lines = read_prompts(job.prompts, tokenizer, ImageReader(job.prompts.parent, job.model))
    longest = check_fit(lines, job.sampling.max_tokens, facts)
    run_of_job = _run_of(job, lines)
    with contextlib.closing(Journal.open(job.out, run_of_job, resume=job.resume)) as journal:
        prompts = [
            Prompt(p.id, token_ids=p.token_ids, metadata=p.metadata, images=p.images)
            for p in (line.prompt for line in lines)
            if p.id not in journal.done
        ]
        if journal.done:
            _say(f"resuming: {len(journal.done)} of {len(lines)} prompts are done")
        outcome = Outcome(_name_of(job, run_of_job), len(journal.done))
        roll = partial(_roll, job, prompts, tokenizer, journal, outcome)
        try:
            if prompts and embedded:
                config = with_length(job.config, longest + job.sampling.max_tokens, facts)
                with _drawn(job, config, outcome) as config:
                    run(_embedded(job, config, roll, outcome))
            elif prompts:
                run(roll(job.connect))
        finally:
            if 0 < len(journal.done) < len(lines):
                _say(f"finished groups are in {journal.path}: the same command with --resume does the rest")
        return _finish(job, journal, [line.prompt.id for line in lines], outcome)


def _run_of(job: Job, lines: Sequence[PromptLine]) -> dict[str, str]:
    """Return everything that the job's tokens depend on, by name, for its journal."""
    parameters = msgspec.to_builtins(job.sampling, str_keys=True)
    return {
        "model": "" if job.model is None else model_digest(job.model),
        "prompts": prompts_digest(lines),
        "engine": f"{job.config.engine.backend} {job.config.engine.dtype}",
        "n": str(job.n),
        "seed": str(job.seed),
        "rollout_number": str(job.rollout_number),
        **{name: str(value) for name, value in parameters.items()},
    }


def _name_of(job: Job, run_of_job: Mapping[str, str]) -> str:
    out = os.fsencode(job.out.absolute()).decode(errors="backslashreplace")  # names of files are any bytes
    whose = [socket.gethostname(), out, *run_of_job.items()]
    return "rollout-" + hashlib.blake2b(msgspec.json.encode(whose), digest_size=12).hexdigest()


def _number_of(weights_digest: str) -> int:
    """Return the rollout number for weights; 0 for unknown weights."""
    digest = hashlib.blake2b(weights_digest.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") if weights_digest else 0


@contextlib.contextmanager
def _drawn(job: Job, config: Config, outcome: Outcome) -> Iterator[Config]:
    """Have the run keep a log, and draw it at its end, however that comes about."""
    if job.report_html is None:
        yield config
        return
    with Scratch("log") as scratch:
        log = config.buffer.log or str(scratch.path)
        try:
            yield replace(config, buffer=replace(config.buffer, log=log))
        finally:
            if outcome.rollout is not None:
                from seer.report.command import write_reports  # the buffer's, which a rollout does not need

                try:
                    write_reports(Path(log), html=job.report_html, rollout_id=outcome.name)
                except SeerError as error:  # no trouble with it may cost the responses
                    _say(f"no report: {error}")


async def _embedded(job: Job, config: Config, roll: Roll, outcome: Outcome) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    local = LocalSystem(config, job.instances, say=_say)
    _say(f"starting {local.instances} {config.engine.backend} engines")
    async with local as system:
        outcome.startup_seconds = loop.time() - started
        _say(f"ready in {outcome.startup_seconds:.1f} s")
        try:
            await system.run(roll(system.endpoint))
        except LaunchError as error:
            if outcome.rollout is None:
                raise
            outcome.error = error
        finally:
            outcome.restarts = sum(system.restarts.values())


async def _live_weights(client: RolloutClient, seconds: float) -> str:
    """Return the digest of the live weights; nobody knows it before a first engine is there.

    Raises `SeerError` if none is there within so many seconds.
    """
    status = await client.status()
    if not (status.weights_digest or status.instances):
        _say(f"waiting for an engine, which says what the weights are, for {seconds:g} s at most")
    try:
        async with asyncio.timeout(seconds):
            while not (status.weights_digest or status.instances):
                await asyncio.sleep(ENGINE_SECONDS)
                status = await client.status()
    except TimeoutError as error:
        fix = "start one, or give --rollout-number"
        raise SeerError(f"no engine registered within {seconds:g} s: {fix}") from error
    return status.weights_digest


async def _roll(
    job: Job,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    journal: Journal,
    outcome: Outcome,
    endpoint: str,
) -> None:
    loop = asyncio.get_running_loop()
    name = name_under(load_keys(security_of(os.environ)), outcome.name)
    async with RolloutClient(
        endpoint, name=name, tokenizer=tokenizer, connect_seconds=CONNECT_SECONDS
    ) as client:
        number = job.rollout_number
        if number is None:
            seconds = job.config.buffer.engine_wait_seconds  # as long as submitted work would wait
            number = _number_of(await _live_weights(client, seconds))
            _say(f"rollout number {number}, which follows from the weights")
        started = loop.time()
        outcome.rollout = rollout = await client.submit(
            prompts,
            n=job.n,
            sampling=job.sampling,
            seed=job.seed,
            rollout_number=number,
            rollout_id=outcome.name,
        )
        with showing(len(prompts) * job.n) as rollout.on_progress:
            try:
                async for group in rollout:
                    journal.add(group)
                    outcome.seconds = loop.time() - started
            except RequestRefused as error:
                outcome.error = error
        try:
            status = await client.status()
            outcome.instances, ended = status.instances, status.last_rollout
            if ended is not None and ended.rollout_id == outcome.name:
                outcome.efficiency = ended.efficiency
        except Unreachable as error:
            _say(f"the report has no instances: {error}")


def _finish(job: Job, journal: Journal, prompt_ids: Sequence[str], outcome: Outcome) -> int:
    report = _report(outcome)
    _say(
        "{prompts} prompts, {requests} responses, {tokens} tokens in {seconds:.1f} s: "
        "{tokens_per_second:.0f} tokens/s, tail {tail_seconds:.1f} s".format_map(report)
        + (", {efficiency:.0%} of what these engines can".format_map(report) if report["efficiency"] else "")
    )
    use = total([instance.stats for instance in outcome.instances])
    if pool_used(use) and not job.connect:  # a running system's counts include other runs
        _say(f"KV pool: {pool_text(use)}")
    if use.verifications and not job.connect:
        _say(f"drafts: {draft_text(use)}")
    missing = [prompt_id for prompt_id in prompt_ids if prompt_id not in journal.done]
    if missing:
        _say(f"error: {outcome.error}")
        _say(f"not finished ({len(missing)} of {len(prompt_ids)}): {' '.join(missing)}")
    else:
        journal.publish(prompt_ids)
    if job.report is not None:  # last, so that an error with it does not cost the responses
        write_report("--report", job.report, report)
    return int(bool(missing))


def _report(outcome: Outcome) -> dict[str, object]:
    """Return counts and timings of this run; they do not include `resumed` prompts."""
    rollout = outcome.rollout
    groups = rollout.groups if rollout else []
    tokens = sum(response.token_ids.size for group in groups for response in group.responses)
    efficiency = outcome.efficiency
    use = total([instance.stats for instance in outcome.instances])
    versions = {"seer": __version__, "python": platform.python_version()}
    for instance in outcome.instances:
        versions |= instance.versions
    return {
        "prompts": len(groups),
        "failed": len(rollout.prompts) - len(groups) if rollout else 0,
        "resumed": outcome.resumed,
        "seed": rollout.seed if rollout else None,
        "rollout_number": rollout.rollout_number if rollout else None,
        "requests": sum(len(group.responses) for group in groups),
        "tokens": tokens,
        "seconds": outcome.seconds,
        "tokens_per_second": tokens / outcome.seconds if outcome.seconds else 0.0,
        "tail_seconds": tail_seconds(rollout.finish_times) if rollout else 0.0,
        "bound_seconds": None if efficiency is None else efficiency * outcome.seconds,
        "efficiency": efficiency,
        "preemptions": sum(group.preemptions for group in groups),
        "chunks": sum(group.chunks for group in groups),
        "migrations": sum(group.migrations for group in groups),
        "acceptance_length": acceptance_length(use),
        "drafted_tokens": use.drafted_tokens,
        "accepted_tokens": use.accepted_tokens,
        "restarts": outcome.restarts,
        "startup_seconds": outcome.startup_seconds,
        "versions": versions,
        "instances": msgspec.to_builtins(outcome.instances),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
