"""The real system as processes, with replay engines: what a user of the command line relies on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from living import wait_for

from seer.client import RolloutClient, RolloutFailed, SamplingParams
from seer.common.config import Config, load
from seer.common.process.service import SAME_SECONDS
from seer.local.system import FAILED_SECONDS, LocalSystem

PROMPTS = 12
MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"
SEER = (sys.executable, "-m", "seer.cli.main")
QUICK = ("--backend", "replay", "--set", "engine.replay.mean_tokens=60", "--max-tokens", "200", "-n", "4")
SLOW = ("--set", "engine.replay.step_seconds=0.02", "--chunk-size", "32")
"""Long enough to kill something meanwhile."""

Tokens = list[tuple[str, int, list[int]]]
"""By prompt and index."""


@contextlib.contextmanager
def prompts_folder() -> Iterator[Path]:
    """Have prompts, and a place for temporary files; short, for its sockets."""
    path = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    lines = [{"id": f"p{i}", "prompt_token_ids": [i + 1] * (i + 1), "i": i} for i in range(PROMPTS)]
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (path / "t").mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Prompts, and a place for temporary files that must end up empty."""
    with prompts_folder() as path:
        monkeypatch.setenv("TMPDIR", str(path / "t"))
        yield path


@pytest.fixture(scope="module")
def undisturbed() -> Tokens:
    """What the prompts come to."""
    with prompts_folder() as path:
        subprocess.run(command(path), capture_output=True, timeout=120, check=True)
        return tokens_of(outputs(path))


def command(folder: Path, *options: str) -> list[str]:
    out, report = folder / "out.jsonl", folder / "report.json"
    files = ("--out", str(out), "--report", str(report))
    return [*SEER, "rollout", str(folder / "prompts.jsonl"), *files, *QUICK, *options]


def outputs(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def tokens_of(records: list[dict]) -> Tokens:
    return [(r["id"], a["index"], a["token_ids"]) for r in records for a in r["responses"]]


def test_the_contract_of_the_rollout_command(folder: Path) -> None:
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    records = outputs(folder)
    assert [record["id"] for record in records] == [f"p{i}" for i in range(PROMPTS)]
    for i, record in enumerate(records):
        assert record["prompt_token_ids"] == [i + 1] * (i + 1)
        assert record["metadata"] == {"i": i}
        assert record["weight_version"] == 0
        assert [answer["index"] for answer in record["responses"]] == [0, 1, 2, 3]
        for answer in record["responses"]:
            assert set(answer) == {"index", "token_ids", "logprobs", "text", "finish_reason"}
            assert 1 <= len(answer["token_ids"]) == len(answer["logprobs"]) <= 200
            assert answer["finish_reason"] == ("length" if len(answer["token_ids"]) == 200 else "stop")
    report = json.loads((folder / "report.json").read_text())
    assert report["requests"] == 4 * PROMPTS
    assert report["tokens"] == sum(len(tokens) for _, _, tokens in tokens_of(records))
    assert report["tokens_per_second"] == pytest.approx(report["tokens"] / report["seconds"])
    assert 0 <= report["tail_seconds"] <= report["seconds"]
    assert report["chunks"] >= report["requests"]
    assert {"preemptions", "migrations", "bound_seconds", "efficiency"} <= set(report)
    assert {"seer", "python"} <= set(report["versions"])
    assert list((folder / "t").iterdir()) == []


def test_what_finished_beside_a_refused_prompt_is_kept_and_resumed(folder: Path) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(folder, *options), capture_output=True, text=True, timeout=120, check=False
        )

    short = ("--set", "engine.max_model_len=210")  # p10 and p11 do not fit
    done = run(*short)
    assert done.returncode == 1
    assert "not finished (2 of 12): p10 p11" in done.stderr
    assert "with --resume does the rest" in done.stderr
    assert json.loads((folder / "report.json").read_text())["failed"] == 2
    assert not (folder / "out.jsonl").exists()
    refused = run()
    assert refused.returncode == 2
    assert "give --resume" in refused.stderr
    other = run("--resume", "--seed", "1")
    assert other.returncode == 2
    assert "seed 1, there 0" in other.stderr

    done = run("--resume")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert (report["resumed"], report["prompts"]) == (10, 2)
    resumed = (folder / "out.jsonl").read_bytes()
    assert not (folder / "out.jsonl.journal").exists()
    assert run().returncode == 0
    assert (folder / "out.jsonl").read_bytes() == resumed


# --- losses ----------------------------------------------------------------------------------


class Running:
    """A `seer rollout` in the background."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.log = folder / "stderr"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command(folder, *SLOW, *options), stderr=log)
        try:
            wait_for(lambda: "ready in" in self.log.read_text() or self.process.poll() is not None)
            time.sleep(0.5)  # chunks are out
        except BaseException:
            self.process.kill()
            raise

    def children(self) -> dict[str, int]:
        return {name.removesuffix(".toml"): pid for pid, name in orphans(self.folder)}

    def end(self) -> int:
        return self.process.wait(timeout=120)


def orphans(folder: Path) -> list[tuple[int, str]]:
    """Living services whose configuration lies under `folder`: (pid, file name)."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        configs = [a for a in arguments if a.startswith(str(folder / "t"))]
        if entry.name.isdecimal() and configs:
            found.append((int(entry.name), Path(configs[0]).name))
    return found


@pytest.mark.parametrize("victims", [("engine-0", "engine-1", "context", "dgds"), ("buffer",)])
def test_killed_services_cost_no_response(
    folder: Path, victims: tuple[str, ...], undisturbed: Tokens
) -> None:
    running = Running(folder)
    children = running.children()
    for victim in victims:
        os.kill(children[victim], signal.SIGKILL)
    assert running.end() == 0, running.log.read_text()
    assert tokens_of(outputs(folder)) == undisturbed
    assert json.loads((folder / "report.json").read_text())["restarts"] == len(victims)
    for victim in victims:
        assert f"{victim} was killed by SIGKILL" in running.log.read_text()
        assert f"{victim} starts again in" in running.log.read_text()
    assert orphans(folder) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_no_signal_leaves_an_orphan(folder: Path, number: signal.Signals, code: int) -> None:
    running = Running(folder)
    assert len(running.children()) == 5
    running.process.send_signal(number)
    assert running.end() == code, running.log.read_text()
    wait_for(lambda: not orphans(folder), 10)
    assert not (folder / "out.jsonl").exists()


def test_a_killed_rollout_is_resumed(folder: Path, undisturbed: Tokens) -> None:
    running = Running(folder)
    journal = folder / "out.jsonl.journal"
    wait_for(lambda: len(journal.read_bytes().splitlines()) > 2)
    running.process.kill()
    running.end()
    wait_for(lambda: orphans(folder) == [])
    assert not (folder / "out.jsonl").exists()
    done = subprocess.run(
        command(folder, "--resume"), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "report.json").read_text())["resumed"] >= 2
    assert [record["id"] for record in outputs(folder)] == [f"p{i}" for i in range(PROMPTS)]
    assert tokens_of(outputs(folder)) == undisturbed


# --- a system that outlives a rollout -----------------------------------------------------------


@pytest.fixture
def ports(folder: Path) -> list[str]:
    names = ("trainers", "engines", "events", "event_snapshots", "estimates", "estimate_snapshots", "dgds")
    return [part for name in names for part in ("--set", f"endpoints.{name}=ipc://{folder}/{name}")]


def test_up_serves_rollouts_until_it_is_told_to_drain(folder: Path, ports: list[str]) -> None:
    settings = [*ports, "--set", "engine.backend=replay", "--set", "engine.replay.mean_tokens=60"]
    settings += ["--set", "engine.replay.step_seconds=0.01", "--set", "buffer.chunk_size=32"]
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [*SEER, "up", "--instances", "2", *settings], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert up.stdout is not None
        lines = iter(up.stdout.readline, "")
        endpoint = next(line for line in lines if line.startswith("trainers")).split(" = ")[1].strip()
        wait_for(lambda: "ready: trainers" in (folder / "up.log").read_text())
        connect = ("--connect", endpoint)
        seen = []
        for options in ((), ("--seed", "1"), ("--rollout-number", "1"), ()):
            whole = command(folder, *connect, *options)
            subprocess.run(whole, capture_output=True, timeout=120, check=True)
            seen.append(tokens_of(outputs(folder)))
        assert seen[0] == seen[3]
        assert seen[0] != seen[1] != seen[2] != seen[0]
        assert json.loads((folder / "report.json").read_text())["startup_seconds"] == 0
        shown = subprocess.run([*SEER, "status", *connect], capture_output=True, text=True, check=True)
        assert "engine-0: 0 chunks" in shown.stdout
        children = dict(map(reversed, orphans(folder)))
        os.kill(children["engine-0.toml"], signal.SIGKILL)
        wait_for(lambda: "engine-0 is back" in (folder / "up.log").read_text())
        os.kill(children["dgds.toml"], signal.SIGSTOP)
        shown = subprocess.run([*SEER, "status", "--json", *connect], capture_output=True, check=False)
        assert shown.returncode == 1
        status = json.loads(shown.stdout)
        assert {s["name"]: bool(s["error"]) for s in status["services"]} == {
            "buffer": False,
            "context": False,
            "dgds": True,
        }
        assert {i["name"]: i["restarts"] for i in status["buffer"]["instances"]} == {
            "engine-0": 1,
            "engine-1": 0,
        }
        os.kill(children["dgds.toml"], signal.SIGCONT)
        _kill_and_resume(folder, connect, seen[0])
        up.send_signal(signal.SIGTERM)
        assert up.wait(timeout=60) == 0
    finally:
        up.kill()
        up.wait()
    assert orphans(folder) == []


def _kill_and_resume(
    folder: Path, connect: tuple[str, ...], expected: list[tuple[str, int, list[int]]]
) -> None:
    """A rollout killed while the system goes on is resumed with what was done meanwhile."""
    command_line = [*command(folder, *connect), "--model", str(MODEL)]
    killed = subprocess.Popen(command_line, stderr=subprocess.DEVNULL)
    journal = folder / "out.jsonl.journal"
    wait_for(lambda: journal.exists() and len(journal.read_bytes().splitlines()) > 2)
    killed.kill()
    killed.wait()
    (folder / "out.jsonl").unlink()
    subprocess.run([*command_line, "--resume"], capture_output=True, timeout=120, check=True)
    assert tokens_of(outputs(folder)) == expected


async def test_a_local_system_in_a_program(folder: Path) -> None:
    config = load(None, {}, ["engine.backend=replay", "engine.replay.mean_tokens=20"])
    assert isinstance(config, Config)
    async with LocalSystem(config, 1) as system, RolloutClient(system.endpoint) as client:
        rollout = await client.submit([[1], [2]], n=3, sampling=SamplingParams(max_tokens=30))
        assert [len(group.responses) for group in await rollout.result()] == [3, 3]
        too_long = await client.submit([[1]], sampling=SamplingParams(max_tokens=2**24))
        with pytest.raises(Exception, match="fits no instance") as info:
            await too_long.result()
        assert not isinstance(info.value, RolloutFailed)


async def test_a_system_that_fails_ends_though_work_is_open(folder: Path) -> None:
    config = load(None, {}, ["engine.backend=replay", "engine.replay.mean_tokens=5000", SLOW[1]])
    assert isinstance(config, Config)
    said: list[str] = []
    async with AsyncExitStack() as stack:
        with pytest.raises(ZeroDivisionError):
            async with LocalSystem(config, 1, say=said.append) as system:
                client = await stack.enter_async_context(RolloutClient(system.endpoint))
                await client.submit([[1], [2]], n=3, sampling=SamplingParams(max_tokens=10_000))
                await asyncio.sleep(1)
                raise ZeroDivisionError
    assert not [line for line in said if "did not end" in line], said
    assert FAILED_SECONDS > SAME_SECONDS


async def test_what_runs_ahead_changes_no_token_and_ends_when_requests_or_weights_come(folder: Path) -> None:
    config = load(None, {}, ["engine.backend=replay", "engine.replay.mean_tokens=200", SLOW[1]])
    assert isinstance(config, Config)
    sampling = SamplingParams(max_tokens=300)
    coming = [[1, 2], [3], [4]]
    found = []
    async with LocalSystem(config, 2) as system, RolloutClient(system.endpoint) as client:

        async def ahead() -> tuple[int, int]:
            """Return the tokens generated ahead so far, and those of requests."""
            await asyncio.sleep(2.5)  # engines tell every second
            status = await client.status()
            return sum(each.stats.ahead_tokens for each in status.instances), status.counters["tokens"]

        for named in (False, True):
            for number, prompts in enumerate(([[5]], coming)):
                rollout = await client.submit(
                    prompts, n=4, sampling=sampling, rollout_number=number, repeat=True
                )
                if named:
                    await client.next_prompts([[1] * 9, *coming], n=4, sampling=sampling, rollout_number=1)
                groups = await rollout.result()
                found.append([each.token_ids.tolist() for group in groups for each in group.responses])
                if named:
                    before = await ahead()
                    assert before[0] > 0
                    assert before[1] == sum(len(tokens) for turn in found for tokens in turn)
        await client.next_prompts(coming, n=4, sampling=SamplingParams(max_tokens=100_000, ignore_eos=True))
        assert (await ahead())[0] > before[0]
        begun = time.monotonic()
        await client.sleep()
        assert time.monotonic() - begun < 20, "some would have run for half an hour"
        slept = await ahead()
        assert await ahead() == slept
    assert found[:2] == found[2:]
