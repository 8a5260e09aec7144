"""`make ray-test`: `seer.integrations.ray` in a real Ray on this machine, with replay engines.

Not collected by `make test`: Ray is not in its environment.
"""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import ray

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.common.config import Config, EngineConfig, ReplayConfig, SecurityConfig
from seer.common.errors import ConfigError, InvalidField
from seer.integrations.ray import start
from seer.local.child import LaunchError

REPLAY = Config(engine=EngineConfig(backend="replay", replay=ReplayConfig(step_seconds=0.005)))
PROMPTS = [Prompt(id=str(i), token_ids=[1, 2, i]) for i in range(8)]
SECONDS = 60.0

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(
        num_cpus=8, num_gpus=2, include_dashboard=False, _node_ip_address="127.0.0.1",
        log_to_driver=False, object_store_memory=100 * 2**20,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def system(cluster):
    """One for all tests that disturb it: its actors come back."""
    with start(2, 1, REPLAY) as started:
        yield started
    gone()


def gone():
    """Assert that a system left neither a process nor a claim on the cluster."""
    assert not children()
    until(lambda: ray.available_resources().get("GPU") == 2)


def until(condition, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
    return value


def children():
    """Return the services' processes on this machine that a system of this test started, by id."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
            if "seer.cli.main" in line and any("/seer-ray-" in part for part in line):
                found[int(entry.name)] = line
    return found


def environ(pid):
    parts = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(part.split("=", 1) for part in parts if "=" in part)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def pid(system, name):
    return ray.get(system.actors[name].pid.remote(), timeout=SECONDS)


async def ask(system, work):
    with system.connection.security() as security:
        async with RolloutClient(system.endpoint, security=security) as client:
            return await work(client)


async def rollout(system, between=None, max_tokens=256):
    async def work(client):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        submitted = await client.submit(PROMPTS, n=4, sampling=sampling, rollout_number=0)
        if between is not None:
            await asyncio.to_thread(between)
        return {
            group.prompt_id: [each.token_ids.tolist() for each in group.responses]
            async for group in submitted
        }

    return await ask(system, work)


async def names(system):
    async def work(client):
        return sorted(each.name for each in (await client.status()).instances)

    return await ask(system, work)


def test_no_room_is_an_error_that_leaves_nothing():
    with pytest.raises(LaunchError, match="no room for 3 engines"):
        start(3, 1, REPLAY, place_seconds=2)
    gone()


def test_an_engine_that_cannot_start_says_why():
    wrong = Config(engine=EngineConfig(backend="replay", replay=ReplayConfig(trace="/not/there")))
    with pytest.raises(LaunchError, match=r"ray-0 cannot start.*/not/there"):
        start(1, 0, wrong)
    gone()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0,), "engines = 0"),
        ((1, 2), "gpus_per_engine = 2"),
        ((1, 0, Config(engine=EngineConfig(nodes=2))), "engine.nodes = 2"),
        ((1, 0, Config(security=SecurityConfig(insecure=True))), "security"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, says):
    with pytest.raises((ConfigError, InvalidField), match=says):
        start(*arguments)


async def test_engines_are_placed_and_a_rollout_runs(system):
    assert await names(system) == ["ray-0", "ray-1"]
    gpus = [environ(pid(system, name))["CUDA_VISIBLE_DEVICES"] for name in ("ray-0", "ray-1")]
    assert sorted(gpus) == ["0", "1"]
    assert len(children()) == 5
    found = await rollout(system)
    assert set(found) == {each.id for each in PROMPTS}
    assert all(len(tokens) == 256 for group in found.values() for tokens in group)


def test_keys_are_on_no_command_line_and_in_no_log(system):
    secret = system.connection.keys.secret.split()[1]
    for process, line in children().items():
        assert not any(secret in part for part in line)
        folder = Path(line[line.index("--config") + 1]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        own = (folder / "key").read_text().split()[1]
        assert not any(own in text for text in environ(process).values())
        for log in Path(ray._private.worker._global_node.get_logs_dir_path()).rglob("*"):
            assert not (log.is_file() and own.encode() in log.read_bytes()), log


async def test_a_stranger_is_refused(system):
    with pytest.raises(Exception, match="keys are used at one end alone"):
        async with RolloutClient(system.endpoint, security=SecurityConfig(), connect_seconds=5):
            pass


@pytest.mark.parametrize("victim", ["engine", "actor", "ray.kill", "buffer"])
async def test_what_is_killed_comes_back_with_the_same_tokens(system, victim):
    name = "buffer" if victim == "buffer" else "ray-0"
    undisturbed = await rollout(system, max_tokens=400)
    old = pid(system, name)
    parent = parent_of(old)

    def kill():
        time.sleep(0.5)
        if victim == "ray.kill":
            ray.kill(system.actors[name], no_restart=False)
        else:
            os.kill(parent if victim == "actor" else old, signal.SIGKILL)

    assert await rollout(system, kill, max_tokens=400) == undisturbed
    until(lambda: old not in children())
    until(lambda: back(system, name, old))
    until(lambda: len(children()) == 5)
    for _ in range(100):
        if await names(system) == ["ray-0", "ray-1"]:
            break
        time.sleep(0.1)
    assert await names(system) == ["ray-0", "ray-1"]


def back(system, name, old):
    with contextlib.suppress(ray.exceptions.RayError):
        return pid(system, name) != old
    return False
