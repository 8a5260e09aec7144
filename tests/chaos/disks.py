"""Disks that fill, as small file systems in memory that only this process and its children see.

Invariants:
- weights that do not fit are refused by name, before or while they stream; all stay on the old version;
- rollouts go on meanwhile, and end with the right tokens;
- once there is space again, the next update, or `--resume`, works;
- a log and kept chunks end, and begin again once there is space: a buffer that is killed then goes on from all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
from cluster_harness import running
from msgspec.structs import replace
from virtual_time import eventually

from chaos.outcome import Outcome
from chaos.rollouts import Judge, Roll, job
from chaos.system import System, replay
from seer.client import RolloutClient, SamplingParams, WeightsRefused
from seer.client.tensor_stream import TensorStream
from seer.common.config import BufferConfig, Config, EngineConfig, ReplayConfig
from seer.services.buffer.log.log_folder import incarnations
from seer.services.buffer.log.outage import RETRY_SECONDS
from seer.services.buffer.log.replay import replay_incarnation

MIB = 2**20
DISK_MIB = 64
SECONDS = 120.0
"""Deadline of each step."""

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x4000, 0x40000, 2
_libc = ctypes.CDLL(None, use_errno=True)
_apart = False


def problem() -> str:
    """Say why no disk can be made here; empty when it can."""
    try:
        with disk(1):
            return ""
    except OSError as error:
        return f"no file system can be mounted here: {error}"


@contextlib.contextmanager
def disk(mib: int) -> Iterator[Path]:
    """Return a folder with a disk of its own, which ends with this process at the latest."""
    global _apart
    if not _apart:  # mounts of this process are its own from here on
        _call(_libc.unshare(_CLONE_NEWNS))
        _call(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
        _apart = True
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    try:
        size = f"size={mib}m".encode()
        _call(_libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", ctypes.c_ulong(0), size))
        try:
            yield folder
        finally:
            _call(_libc.umount2(str(folder).encode(), _MNT_DETACH))
    finally:
        folder.rmdir()


def _call(code: int) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def filled(folder: Path, left: int) -> Iterator[None]:
    """Leave only so many bytes of a disk."""
    ballast = folder / "ballast"
    fill(ballast, left)
    try:
        yield
    finally:
        ballast.unlink()


def fill(ballast: Path, left: int) -> None:
    """Have a file take all of its disk but so many bytes."""
    with ballast.open("wb") as file:
        while (size := shutil.disk_usage(ballast.parent).free - left) > 0:  # others write, too
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), file.tell(), size)
                file.seek(0, os.SEEK_END)


def weights(version: int, mib: int) -> dict[str, np.ndarray]:
    """Return tensors of so many MiB."""
    return {"w": np.full(mib * MIB // 4, version, dtype=np.float32)}


async def refused(client: RolloutClient, version: int, mib: int) -> str:
    """Update to weights that cannot be had; return what was said. Raises `AssertionError` if they can."""
    try:
        async with asyncio.timeout(SECONDS):
            await client.update_weights(version, weights(version, mib))
    except WeightsRefused as error:
        return str(error)
    raise AssertionError(f"version {version} of {mib} MiB was taken")


async def streams(where: str) -> list[str]:
    """Stream weights onto a disk that fills, at `buffer.spool` or in TMPDIR; return what went wrong."""
    with disk(DISK_MIB) as folder:
        config: Config = replay(step_seconds=0.02)
        if where == "spool":
            config = replace(config, buffer=replace(config.buffer, spool=str(folder / "spool")))
        system = System(config, tcp=True, trainers=("trainer", "updates"))
        if where == "TMPDIR":
            system.temporary.rmdir()
            system.temporary = folder / "tmp"
            system.temporary.mkdir()
        problems: list[str] = []
        async with system, system.client("updates") as client:
            try:
                problems += await _stream(system, client, folder)
            except AssertionError as error:
                problems.append(str(error))
            problems += system.leaks()
        return problems + system.leftovers()


async def _stream(system: System, client: RolloutClient, folder: Path) -> list[str]:
    problems: list[str] = []
    known, number = Judge(system), 0

    def live(version: int, mib: int) -> None:
        known.versions[version] = TensorStream(weights(version, mib)).digest()

    @contextlib.asynccontextmanager
    async def rolling() -> AsyncIterator[None]:
        nonlocal number
        number += 1
        roll, outcome = Roll(system, job(system, 20, number=number)), Outcome(number)
        running = asyncio.create_task(roll.run())
        try:
            await asyncio.wait_for(roll.first(), SECONDS)
            yield
            await asyncio.wait_for(running, SECONDS)
        finally:
            running.cancel()
            await asyncio.wait([running])
        roll.judge(outcome, known)
        outcome.count()
        problems.extend(outcome.problems)

    await client.update_weights(1, weights(1, 2))
    live(1, 2)
    async with rolling():
        with filled(folder, MIB):
            said = await refused(client, 2, 8)
            if "do not fit into" not in said or "buffer.spool" not in said:
                problems.append(f"weights that do not fit: {said}")
    async with rolling():  # it fills while they stream
        asked = asyncio.create_task(refused(client, 3, 40))
        while not _streaming(folder):
            if asked.done():
                problems.append("the stream was over too soon to be disturbed")
                break
            await asyncio.sleep(0)
        with filled(folder, 0):
            said = await asked
            if "No space left" not in said:
                problems.append(f"a disk that fills: {said}")
    with filled(folder, 0):  # all services start and work without a byte
        async with rolling():
            for name in ("context", "dgds", "engine-0"):
                system.signal(name, 9)
    status = await client.status()
    if status.weight_version != 1:
        problems.append(f"version {status.weight_version} is live, not 1")
    async with rolling():
        async with asyncio.timeout(SECONDS):
            live(4, 8)
            await client.update_weights(4, weights(4, 8))
    async with rolling():
        pass
    return problems


def _streaming(folder: Path) -> bool:
    return any(3 * MIB < file.stat().st_size < 40 * MIB for file in folder.rglob("*.safetensors"))


async def outputs() -> list[str]:
    """Have `seer rollout` write to a disk that is full; return what went wrong."""
    with disk(4) as folder, tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as other:
        prompts = Path(other) / "prompts.jsonl"
        ids = [{"id": f"p{i}", "prompt_token_ids": [i + 1] * (i + 1)} for i in range(40)]
        prompts.write_text("\n".join(map(json.dumps, ids)))
        out = folder / "out.jsonl"
        with filled(folder, 16 * 1024):
            code, said = await _rollout(prompts, out, Path(other))
            problems = (
                [] if code and "No space left" in said else [f"a full disk, code {code}: {said[-500:]}"]
            )
            problems += ["--out appeared"] if out.exists() else []
        code, said = await _rollout(prompts, out, Path(other), "--resume")
        problems += [f"--resume, code {code}: {said[-500:]}"] if code else []
        found = (
            sorted(json.loads(line)["id"] for line in out.read_text().splitlines()) if out.exists() else []
        )
        whole = sorted(each["id"] for each in ids)
        return problems + ([] if found == whole else [f"{len(found)} of {len(whole)} prompts are there"])


async def _rollout(prompts: Path, out: Path, other: Path, *options: str) -> tuple[int, str]:
    command = (sys.executable, "-m", "seer.cli.main", "rollout", str(prompts), "--out", str(out))
    quick = ("--backend", "replay", "--set", "engine.replay.mean_tokens=60", "--max-tokens", "200", "-n", "4")
    process = await asyncio.create_subprocess_exec(
        *command, *quick, *options, env={**os.environ, "TMPDIR": str(other)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(SECONDS):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return -1, "it did not end"
    return process.returncode or 0, said.decode(errors="replace")


async def log() -> None:
    """Fill the disk of a buffer's log in mid-rollout, make room, and kill the buffer. In virtual time."""
    engines = EngineConfig(
        backend="replay",
        kv_blocks=200,
        max_num_seqs=16,
        replay=ReplayConfig(mean_tokens=300, step_seconds=0.1),
    )
    prompts, sampling = [[1] * number for number in range(1, 13)], SamplingParams(max_tokens=600)

    async def roll(client: RolloutClient) -> list[list[int]]:
        groups = await (await client.submit(prompts, n=4, sampling=sampling, rollout_id="r")).result()
        return [response.token_ids.tolist() for group in groups for response in group.responses]

    async with running(engine=engines) as cluster, cluster.client() as client:
        expected = await roll(client)
    with disk(8) as folder:
        settings = BufferConfig(chunk_size=32, log=str(folder / "log"), keep_chunks=True)
        async with running(engine=engines, buffer=settings) as cluster, cluster.client() as client:
            machine = cluster.services["buffer"].machine

            def tokens() -> int:
                return machine.counters["tokens"]

            async def unwritten(*names: str) -> bool:
                seen = (await client.status()).unwritten
                assert all("No space left" in each.problem for each in seen.values())
                assert all(0 <= each.seconds < 60 for each in seen.values())
                return seen.keys() == set(names)

            rolling = asyncio.create_task(roll(client))
            await eventually(lambda: tokens() > 500)
            with filled(folder, 0):
                await eventually(lambda: unwritten("log", "chunks"))
                begun = tokens()
                await eventually(lambda: tokens() > begun + 1000)
            await eventually(unwritten, RETRY_SECONDS + 1.0)
            requests = list(machine.requests.values())
            requests += [each for group in machine.groups.values() for each in group.results]
            await cluster.kill("buffer")
            await cluster.start("buffer")
            assert await rolling == expected
            machine = cluster.services["buffer"].machine
            assert machine.counters["restored"] == sum(each.view.generated for each in requests) > 1500
        first, second = incarnations(folder / "log")
        for paths in (first, second):
            assert list(replay_incarnation(paths))
        numbers = [int(path.stem.rpartition("-")[2]) for path in first]
        assert numbers == [0, 2], "rows are missing between them"
