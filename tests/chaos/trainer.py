"""A trainer that can be killed: what it got is in a file, and its next life asks for the rest.

python trainer.py PARENT_PID JOB.json OUT.jsonl
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from seer.child import die_with
from seer.client import RolloutClient, SamplingParams
from seer.client.prompts import Prompt

Answer = tuple[list[int], list[float], str]


class Job(msgspec.Struct):
    """A rollout: token ids by prompt id."""

    endpoint: str
    prompts: dict[str, list[int]]
    n: int
    max_tokens: int
    number: int


class Line(msgspec.Struct):
    """A group that arrived."""

    id: str
    answers: list[Answer]


def lines(out: Path) -> list[Line]:
    """Return what was written so far; a line torn by a kill does not count."""
    whole = out.read_bytes().split(b"\n")[:-1] if out.exists() else []
    return [msgspec.json.decode(line, type=Line) for line in whole]


async def run(job: Job, out: Path) -> None:
    known = {line.id for line in lines(out)}
    left = [Prompt(key, token_ids=ids) for key, ids in job.prompts.items() if key not in known]
    if not left:
        return
    sampling = SamplingParams(max_tokens=job.max_tokens)
    file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    async with RolloutClient(job.endpoint, name="trainer") as client:
        rollout = await client.submit(left, n=job.n, sampling=sampling, rollout_number=job.number)
        async for group in rollout:
            answers = [
                (each.token_ids.tolist(), each.logprobs.tolist(), each.finish_reason)
                for each in group.responses
            ]
            os.write(file, msgspec.json.encode(Line(group.prompt_id, answers)) + b"\n")


if __name__ == "__main__":
    parent, job_file, out_file = sys.argv[1:]
    die_with(int(parent))
    asyncio.run(run(msgspec.json.decode(Path(job_file).read_bytes(), type=Job), Path(out_file)))
