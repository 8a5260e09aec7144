"""Updates in place of real engines: the tokens of a checked update, and what follows when one fails midway."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from in_place_trainer import BUCKET_BYTES
from shared_engines import MODEL, SharedEngines, tensors

from seer.client import Broadcast, RolloutClient, SamplingParams, SharedTensors, WeightsRefused
from seer.common.config import load
from seer.common.weights import broadcast_group
from seer.common.wire import Status
from seer.local.system import LocalSystem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAINER = Path(__file__).parents[1] / "in_place_trainer.py"
SCALE = 1.02
SECONDS = 3.0
"""For each step of a broadcast that is to fail."""


async def roll(client: RolloutClient) -> tuple[list[list[int]], tuple[int, str]]:
    """Return tokens, and the weights that all groups name."""
    sampling = SamplingParams(max_tokens=40)
    prompts = [[1, 5, 9], [4, 4, 4]]
    rollout = await client.submit(prompts, n=2, sampling=sampling, rollout_number=0, repeat=True)
    groups = await rollout.result()
    (weights,) = {(group.weight_version, group.weights_digest) for group in groups}
    return [response.token_ids.tolist() for group in groups for response in group.responses], weights


async def all_there(client: RolloutClient, count: int = 2) -> Status:
    """Wait until so many engines have the live weights, and no update is under way."""
    async with asyncio.timeout(120):
        while len((status := await client.status()).instances) < count or status.quarantined:
            await asyncio.sleep(0.1)
        return status


async def rolled_by_all(client: RolloutClient) -> tuple[list[list[int]], tuple[int, str]]:
    await all_there(client)
    return await roll(client)


@pytest.fixture(scope="module")
def expected(pair: SharedEngines) -> dict[float, list[list[int]]]:
    """By scale, what engines say that were sent such weights in the checked way."""

    async def checked() -> dict[float, list[list[int]]]:
        async with RolloutClient(pair.anew(chunk_size=32)) as client:
            before, (version, _) = await roll(client)
            await client.update_weights(version + 1, tensors(SCALE))
            return {1.0: before, SCALE: (await roll(client))[0]}

    found = asyncio.run(checked())
    assert found[1.0] != found[SCALE]
    return found


def test_engines_listen_on_loopback_alone(pair: SharedEngines) -> None:
    """Groups of ranks have no keys, and an engine of one rank has them, too."""
    for name in ("engine-0", "engine-1"):
        connections = psutil.Process(pair.system.pids[name]).net_connections("inet")
        listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}, name


NAMED = """
import psutil, sys, torch.distributed
from seer.common.config import EngineConfig
from seer.services.engine.vllm import env

env.prepare(EngineConfig())
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
connections = psutil.Process().net_connections("inet")
print({each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN})
"""


def test_a_machine_with_a_name_in_the_network_is_not_where_ranks_listen(tmp_path: Path) -> None:
    """Gloo listens at the address of the machine's name, which is another one on most machines than on this."""
    command = ["unshare", "--uts", "sh", "-c", 'hostname 127.0.0.2 && exec "$@"', "sh", sys.executable, "-c"]
    done = subprocess.run(
        [*command, NAMED, str(tmp_path / "group")], capture_output=True, text=True, timeout=120, check=False
    )
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.strip() == "{'127.0.0.1'}", done.stderr


@pytest.fixture
def at_bucket(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Have this process, as a trainer, call something before it sends a bucket."""
    send, sent = broadcast_group.BroadcastGroup.broadcast, []

    def install(number: int, call: Callable[[], None]) -> None:
        def broadcast(self: Any, data: torch.Tensor, stopped: Callable[[], bool]) -> None:
            sent.append(1)
            if len(sent) == number:
                call()
            send(self, data, stopped)

        monkeypatch.setattr(broadcast_group.BroadcastGroup, "broadcast", broadcast)

    return install


def broadcast(scale: float, **fields: Any) -> Broadcast:
    return Broadcast(tensors(scale), bucket_bytes=BUCKET_BYTES, **fields)


async def test_colocated_trainers_update_in_place_while_kv_sleeps(
    pair: SharedEngines, expected: dict[float, list[list[int]]]
) -> None:
    """The order of colocated trainers, twice: the second time engines drop weights that came in place."""
    async with RolloutClient(pair.anew(chunk_size=32)) as client:
        version = (await client.status()).weight_version
        for number, scale in enumerate((SCALE, 1.0), start=1):
            await client.sleep(level=2)
            await client.wake(tags=["weights"])
            live = await client.update_weights(version + number, SharedTensors(tensors(scale)))
            assert not live.quarantined
            await client.wake(tags=["kv_cache"])
            assert await roll(client) == (expected[scale], (version + number, live.digest))
        await client.update_weights(version + 3, tensors())  # whoever comes next may drop and wake


async def test_weights_in_place_are_as_good_as_checked_ones(
    pair: SharedEngines, expected: dict[float, list[list[int]]]
) -> None:
    async with RolloutClient(pair.anew(chunk_size=32)) as client:
        version, digests = (await client.status()).weight_version, set()
        for number, (scale, make) in enumerate([
            (SCALE, SharedTensors), (1.0, Broadcast), (SCALE, broadcast_of), (1.0, SharedTensors),
        ]):  # fmt: skip
            live = await client.update_weights(version + 1 + number, make(tensors(scale)))
            assert not live.quarantined
            assert await roll(client) == (expected[scale], (version + 1 + number, live.digest))
            digests.add(live.digest)
        assert len(digests) == 4
        for name in ("engine-0", "engine-1"):  # no engine keeps memory that the trainer shared
            assert "/dev/shm/psm_" not in of_process(pair.system.pids[name], "maps")
        wrong = tensors()
        name = min(wrong)
        with pytest.raises(WeightsRefused, match=rf"engine-[01]: .*tensor {name} has shape"):
            await client.update_weights(version + 9, SharedTensors(wrong | {name: wrong[name][:-1]}))
        assert (await roll(client))[0] == expected[1.0]


def broadcast_of(given: dict[str, torch.Tensor]) -> Broadcast:
    return Broadcast(given, bucket_bytes=BUCKET_BYTES)


async def ended(endpoint: str, point: str, how: str) -> asyncio.subprocess.Process:
    """Run a trainer until it has died or stopped at a point of its update in place."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(TRAINER), endpoint, str(MODEL), str(SCALE), point, how, str(SECONDS)
    )
    async with asyncio.timeout(60):
        while process.returncode is None and state(process.pid) != "T":
            await asyncio.sleep(0.05)
    return process


def of_process(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_text()


def state(pid: int) -> str:
    try:
        return of_process(pid, "stat").rpartition(")")[2].split()[0]
    except FileNotFoundError:  # it has ended since
        return ""


@pytest.mark.parametrize(
    ("point", "how"),
    [
        pytest.param("before", "SIGKILL", marks=pytest.mark.breadth),
        ("middle", "SIGKILL"),
        ("after", "SIGKILL"),
        pytest.param("middle", "SIGSTOP", marks=pytest.mark.breadth),
        pytest.param("before", "SIGSTOP", marks=pytest.mark.breadth),  # engines hang, end, and come back
    ],
)
async def test_a_trainer_that_dies_or_stops_leaves_engines_with_the_weights_that_they_name(
    pair: SharedEngines, expected: dict[float, list[list[int]]], point: str, how: str
) -> None:
    endpoint = pair.anew(chunk_size=32)
    async with RolloutClient(endpoint) as client:
        before = (await client.status()).weight_version
        process = await ended(endpoint, point, how)
        try:
            tokens, (version, _) = await rolled_by_all(client)
            assert version == before + (point == "after")
            assert tokens == expected[SCALE if point == "after" else 1.0]
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await all_there(client)
        live = await client.update_weights(before + 5, broadcast(SCALE))
        assert await rolled_by_all(client) == (expected[SCALE], (before + 5, live.digest))


async def test_a_bucket_that_never_comes_ends_the_update_and_nothing_else(
    pair: SharedEngines, expected: dict[float, list[list[int]]], at_bucket: Any
) -> None:
    async with RolloutClient(pair.anew(chunk_size=32)) as client, RolloutClient(client.endpoint) as other:
        loop, version = asyncio.get_running_loop(), (await client.status()).weight_version
        seconds, refused = 1.0, []

        async def update_too() -> None:
            with pytest.raises(WeightsRefused, match=f"updates to version {version + 1}: wait for that"):
                await other.update_weights(version + 2, SharedTensors(tensors()))
            refused.append(1)

        def stall() -> None:
            asyncio.run_coroutine_threadsafe(update_too(), loop).result()
            raise RuntimeError("the tensors are gone")

        at_bucket(3, stall)
        with pytest.raises(WeightsRefused, match=r"engine-0: bucket 3.*the tensors are gone") as failed:
            await client.update_weights(version + 1, broadcast(SCALE, step_seconds=seconds))
        assert set(failed.value.reasons) == {"engine-0", "engine-1", ""}
        assert refused
        assert await rolled_by_all(client) == (
            expected[1.0],
            (version, (await client.status()).weights_digest),
        )
        await client.update_weights(version + 1, tensors(SCALE))  # the checked way
        assert (await rolled_by_all(client))[0] == expected[SCALE]


async def test_an_engine_that_came_too_late_gets_work_with_the_next_update(
    pair: SharedEngines, expected: dict[float, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RolloutClient(pair.anew(chunk_size=32)) as client:
        version, gather = (await client.status()).weight_version, broadcast_group.gather
        with monkeypatch.context() as patched:
            patched.setattr(
                broadcast_group, "gather", lambda store, engines, *rest: gather(store, engines[:1], *rest)
            )
            live = await client.update_weights(version + 1, broadcast(SCALE))
        assert list(live.quarantined) == ["engine-1"]
        assert "came too late" in live.quarantined["engine-1"]
        assert await roll(client) == (expected[SCALE], (version + 1, live.digest))
        live = await client.update_weights(version + 2, broadcast(1.0))
        assert not live.quarantined
        assert await rolled_by_all(client) == (expected[1.0], (version + 2, live.digest))


@pytest.mark.breadth
@pytest.mark.parametrize(
    "how", ["SIGKILL", "SIGSTOP"]
)  # a stopped one is silent for 20 s until it counts as lost
async def test_an_engine_that_dies_or_stops_midway_fails_the_update_and_comes_back(
    pair: SharedEngines, expected: dict[float, list[list[int]]], at_bucket: Any, how: str
) -> None:
    async with RolloutClient(pair.anew(chunk_size=32)) as client:
        version, pid = (await client.status()).weight_version, pair.system.pids["engine-1"]
        at_bucket(3, lambda: os.kill(pid, signal.Signals[how]))
        with pytest.raises(WeightsRefused) as failed:
            source = Broadcast(
                tensors(SCALE), bucket_bytes=1, step_seconds=SECONDS
            )  # a bucket for each tensor
            await client.update_weights(version + 1, source)
        assert failed.value.reasons.keys() >= {"engine-0", "engine-1"}
        if how == "SIGSTOP":
            os.kill(pid, signal.SIGCONT)
        assert (await rolled_by_all(client))[0] == expected[1.0]
        live = await client.update_weights(version + 2, broadcast(SCALE))
        assert await rolled_by_all(client) == (expected[SCALE], (version + 2, live.digest))


@pytest.mark.breadth
@pytest.mark.ranks
async def test_two_ranks_take_weights_in_place_too(expected: dict[float, list[list[int]]]) -> None:
    settings = {"shared.model": MODEL, "engine.max_model_len": 400, "engine.kv_blocks": 200}
    settings |= {"engine.tensor_parallel": 2, "engine.in_place_updates": "true"}
    config = load(None, {}, [f"{key}={value}" for key, value in settings.items()])
    async with LocalSystem(config, 1) as started, RolloutClient(started.endpoint) as client:
        for version, (scale, make) in enumerate([(SCALE, SharedTensors), (1.0, broadcast_of)], 1):
            assert not (await client.update_weights(version, make(tensors(scale)))).quarantined
            assert (await roll(client))[0] == expected[scale]
