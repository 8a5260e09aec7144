"""The local supervisor with scripted children, and how a machine is divided."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from seer.common.config import BufferConfig, Config, Endpoints, EngineConfig, load
from seer.common.endpoints import shards
from seer.common.errors import ConfigError, InvalidField
from seer.common.policy.device_defaults import Device
from seer.local import child, pool_plan, restarts
from seer.local import system as launch
from seer.local.child import LaunchError
from seer.local.hardware import Hardware, plan_engines, share_cores
from seer.local.system import LocalSystem

CHILD = """
import os, signal, subprocess, sys, time
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
name = options["--config"].rpartition("/")[2].removesuffix(".toml")
what = os.environ.get("CHILD_" + name.replace("-", "_"), "")
print("hello from", name, flush=True)
if what == "refuse":
    print("no such model", flush=True)
    sys.exit(2)
if what.startswith("{"):
    os.write(int(options["--ready-fd"]), what.encode() + b"\\n")
    sys.exit(2)
if what == "once":  # its first life works
    first = options["--config"] + ".first"
    if os.path.exists(first):
        print("out of luck", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    open(first, "w").close()
    what = "die"
if what == "hang":
    time.sleep(600)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["HELPER"], "w").write(str(helper.pid))
os.write(int(options["--ready-fd"]), b"{}\\n")
if what == "die":
    time.sleep(0.3)
    print("out of luck", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""

REPLAY = Config(engine=EngineConfig(backend="replay"))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(child, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(restarts, "PAUSES", (0.01,) * restarts.LIMIT)
    monkeypatch.setattr(launch, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(launch, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(launch, "_MAX_IPC_DIR", 1000)  # nothing binds there
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def names_in(folder: str) -> set[str]:
    return {file.name for file in Path(folder).iterdir()}


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def gone(pids: list[int]) -> bool:
    async with asyncio.timeout(20):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.01)
    return True


async def test_several_dgds_each_serve_their_own_endpoint() -> None:
    config = replace(REPLAY, endpoints=Endpoints(dgds="tcp://127.0.0.1:1,tcp://127.0.0.1:2"))
    async with LocalSystem(config, 1) as system:
        assert set(system.pids) == {"buffer", "context", "dgds-0", "dgds-1", "engine-0"}
        folder = Path(system.endpoint.removeprefix("ipc://")).parent
        served = [load(folder / f"dgds-{shard}.toml") for shard in range(2)]
        assert [config.dgds.shard for config in served] == [0, 1]
        for config in (*served, load(folder / "engine-0.toml")):
            assert shards(config.endpoints.dgds) == [f"ipc://{folder}/dgds-0", f"ipc://{folder}/dgds-1"]


@pytest.mark.parametrize("told", ["", "/elsewhere"])
async def test_the_buffer_logs_into_the_run_s_folder_unless_told(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv("CHILD_engine_0", "refuse")
    said: list[str] = []
    system = LocalSystem(replace(REPLAY, buffer=replace(REPLAY.buffer, log=told)), 1, say=said.append)
    start = system._start

    async def with_a_log() -> None:
        (system._dir / "log").mkdir()
        (system._dir / "log" / "row.jsonl").write_text("")
        await start()

    monkeypatch.setattr(system, "_start", with_a_log)
    with pytest.raises(LaunchError):
        await system.__aenter__()
    folder = Path(said[-1].removeprefix("logs are kept in "))
    assert load(folder / "buffer.toml").buffer.log == (told or str(folder / "log"))
    assert (folder / "log" / "row.jsonl").exists()


async def test_all_children_run_and_none_is_left() -> None:
    async with LocalSystem(REPLAY, 2) as system:
        assert set(system.pids) == {"buffer", "context", "dgds", "engine-0", "engine-1"}
        folder = Path(system.endpoint.removeprefix("ipc://")).parent
        assert {file.name for file in folder.glob("*.toml")} == {f"{name}.toml" for name in system.pids}
        assert load(folder / "engine-1.toml").engine.name == "engine-1"
        assert load(folder / "engine-1.toml").endpoints == system.config.endpoints
        pids = list(system.pids.values())
        assert all(map(alive, pids))
        assert await system.run(asyncio.sleep(0, "done")) == "done"
    assert await gone(pids)
    assert not folder.exists()


async def test_another_buffer_leaves_everything_else_as_it_is() -> None:
    async with LocalSystem(REPLAY, 2) as system:
        before = system.pids
        folder = Path(system.endpoint.removeprefix("ipc://")).parent
        kept = {name: getattr(system.config.buffer, name) for name in ("spool", "media", "log")}
        await system.restart_buffer(BufferConfig(chunk_size=7))
        assert {name for name, pid in system.pids.items() if pid != before[name]} == {"buffer"}
        assert not alive(before["buffer"])
        assert (
            system.config.buffer == load(folder / "buffer.toml").buffer == BufferConfig(chunk_size=7, **kept)
        )
        os.kill(system.pids["buffer"], signal.SIGKILL)
        async with asyncio.timeout(20):
            while not system.restarts["buffer"]:
                await asyncio.sleep(0.01)
        assert load(folder / "buffer.toml").buffer.chunk_size == 7


async def test_the_environment_is_not_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEER_ENGINE__NAME", "mine")
    monkeypatch.setenv("CHILD_engine_0", "")
    async with LocalSystem(REPLAY, 1) as system:
        environ = environ_of(system.pids["engine-0"])
    assert b"SEER_ENGINE__NAME" not in environ
    assert b"CHILD_engine_0" in environ


async def test_a_log_keeps_what_earlier_lives_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD_dgds", "die")
    async with LocalSystem(REPLAY, 1) as system:
        log = Path(system.endpoint.removeprefix("ipc://")).parent / "dgds.log"
        async with asyncio.timeout(20):
            while system.restarts["dgds"] < 3:
                await asyncio.sleep(0.01)
        assert log.read_text().count("hello from dgds\nout of luck\n") >= 3


async def test_what_a_killed_run_left_is_gone_once_the_next_one_starts(tmp_path: Path) -> None:
    parent = tmp_path / "t"
    parent.mkdir()
    launch.tempfile.tempdir = str(parent)
    left = launch.Scratch("run")
    (left.path / "buffer.log").write_text("x")
    async with LocalSystem(REPLAY, 1) as system:
        mine = Path(system.endpoint.removeprefix("ipc://")).parent
        assert left.path.exists()  # it is still held
        left.keep()
        (left.path / ".seer-scratch").write_text("")  # now it is not
        async with LocalSystem(REPLAY, 1):
            assert not left.path.exists()
            assert (mine / "buffer.log").exists()
        assert environ_of(system.pids["engine-0"]).count(f"TMPDIR={mine}\0".encode()) == 1
    assert names_in(str(parent)) == set()


async def test_a_child_that_refuses_shows_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD_engine_1", "refuse")
    said: list[str] = []
    system = LocalSystem(REPLAY, 2, say=said.append)
    with pytest.raises(LaunchError, match=r"engine-1 ended with exit code 2;(.|\n)*no such model"):
        await system.__aenter__()
    assert await gone(list(system.pids.values()))
    assert names_in(said[-1].removeprefix("logs are kept in ")) >= {"engine-1.log", "buffer.log"}


@pytest.mark.parametrize(("code", "cls"), [("config", ConfigError), ("engine", LaunchError)])
async def test_a_child_that_says_why_it_refuses(
    monkeypatch: pytest.MonkeyPatch, code: str, cls: type[Exception]
) -> None:
    monkeypatch.setenv("CHILD_dgds", json.dumps({"error": "x = 1: give 2", "code": code}))
    said: list[str] = []
    system = LocalSystem(REPLAY, 1, say=said.append)
    with pytest.raises(cls, match=r"^dgds cannot start: x = 1: give 2$") as info:
        await system.__aenter__()
    assert isinstance(info.value, LaunchError)
    assert isinstance(info.value, ConfigError) == (cls is ConfigError)
    assert await gone(list(system.pids.values()))
    assert said == []
    assert not Path(system.endpoint.removeprefix("ipc://")).parent.exists()


async def test_a_child_that_is_never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD_dgds", "hang")
    monkeypatch.setattr(launch, "SERVICE_START_SECONDS", 1.0)
    system = LocalSystem(REPLAY, 1)
    with pytest.raises(LaunchError, match=r"dgds was not ready in 1 s(.|\n)*hello from dgds"):
        await system.__aenter__()
    assert await gone(list(system.pids.values()))


async def test_a_lost_child_is_started_again() -> None:
    said: list[str] = []
    async with LocalSystem(REPLAY, 1, say=said.append) as system:
        before = system.pids
        for name in before:
            os.kill(before[name], signal.SIGKILL)

        async def back() -> None:
            while sum(line.endswith("is back") for line in said) < len(before):
                await asyncio.sleep(0.01)

        async with asyncio.timeout(20):
            await system.run(back())
        after = system.pids
        assert set(system.restarts.values()) == {1}
        assert not set(after.values()) & set(before.values())
    assert "buffer was killed by SIGKILL" in "\n".join(said)
    assert await gone([*before.values(), *after.values()])


async def test_a_child_that_dies_while_stopping_stays_dead() -> None:
    async with LocalSystem(REPLAY, 1) as system:
        pids = system.pids
        os.kill(pids["dgds"], signal.SIGKILL)
    assert await gone(list(system.pids.values()))


@pytest.mark.parametrize("name", ["engine-0", "context", "dgds"])
async def test_one_that_always_dies_is_given_up_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("CHILD_" + name.replace("-", "_"), "once" if name == "engine-0" else "die")
    said: list[str] = []
    async with LocalSystem(REPLAY, 2, say=said.append) as system:

        async def told() -> str:
            while not said or "given up" not in said[-1]:
                await asyncio.sleep(0.01)
            return said[-1]

        line = await system.run(told())
        assert system.restarts[name] == restarts.LIMIT + (name == "engine-0")
    assert line.startswith(f"{name} was killed by SIGKILL")
    assert "out of luck" in line
    rest = "with 1 of 2 engines" if name == "engine-0" else "without it"
    assert line.endswith(f"given up after {restarts.LIMIT + 1} failures in a row; rollouts go on {rest}")


async def test_an_engine_that_its_work_ends_each_time_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHILD_engine_0", "die")
    said: list[str] = []
    async with LocalSystem(REPLAY, 1, say=said.append) as system:

        async def often() -> None:
            while system.restarts["engine-0"] < 2 * restarts.LIMIT:
                await asyncio.sleep(0.01)

        async with asyncio.timeout(60):
            await system.run(often())
    assert "given up" not in "".join(said)


@pytest.mark.parametrize("names", [("engine_0", "engine_1"), ("buffer",)])
async def test_but_not_all_nor_the_buffer(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    for name in names:
        monkeypatch.setenv(f"CHILD_{name}", "die" if name == "buffer" else "once")
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    system = LocalSystem(REPLAY, 2)
    async with system:
        pids = list(system.pids.values())
        with pytest.raises(LaunchError, match="was killed by SIGKILL"):
            await system.run(work())
        assert cancelled.is_set()
    assert await gone(pids)


POOLED = Config(engine=EngineConfig(kv_blocks=8, cpu_cores="0"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_plan, "import_problem", lambda: "")


@pytest.mark.usefixtures("installed")
async def test_a_pool_is_started_with_the_rest() -> None:
    said: list[str] = []
    async with LocalSystem(POOLED, 1, say=said.append) as system:
        assert said[0].startswith("KV pool: mooncake (Mooncake is installed), at most ")
        while len(system.pids) < 6:  # it is not waited for
            await asyncio.sleep(0.01)
        folder = Path(system.endpoint.removeprefix("ipc://")).parent
        pools = [load(folder / f"{name}.toml").pool for name in ("engine-0", "pool-owner", "pool-master")]
        pids = list(system.pids.values())
    assert pools == [system.config.pool] * 3
    assert (pools[0].kind, pools[0].ssd_path) == ("mooncake", "")
    assert await gone(pids)


@pytest.mark.usefixtures("installed")
async def test_its_disk_lies_in_the_systems_folder() -> None:
    pool = replace(POOLED.pool, kind="mooncake", ssd_gib=1)
    async with LocalSystem(replace(REPLAY, pool=pool), 1) as system:
        folder = Path(system.endpoint.removeprefix("ipc://")).parent
        assert load(folder / "pool-owner.toml").pool.ssd_path == str(folder / "pool")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["pool-master", "pool-owner"])
@pytest.mark.parametrize("how", ["refuse", "die", '{"error": "no", "code": "config"}'])
async def test_a_pool_that_nobody_asked_for_may_fail(
    monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    monkeypatch.setenv("CHILD_" + name.replace("-", "_"), how)
    said: list[str] = []
    async with LocalSystem(POOLED, 1, say=said.append) as system:

        async def told() -> str:
            while "given up" not in said[-1]:
                await asyncio.sleep(0.01)
            return said[-1]

        line = await system.run(told())
        assert system.restarts[name] == restarts.LIMIT
    assert line.startswith(f"{name} ")
    assert line.endswith("rollouts go on without it")


@pytest.mark.usefixtures("installed")
async def test_a_pool_that_was_asked_for_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD_pool_owner", '{"error": "no room", "code": "config"}')
    pool = replace(POOLED.pool, kind="mooncake")
    system = LocalSystem(replace(POOLED, pool=pool), 1)
    with pytest.raises(ConfigError, match="pool-owner cannot start: no room"):
        await system.__aenter__()
    assert await gone(list(system.pids.values()))


async def test_stubborn_children_and_their_children_are_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CHILD_engine_0", "stubborn")
    monkeypatch.setenv("HELPER", str(tmp_path / "helper"))
    said: list[str] = []
    async with LocalSystem(REPLAY, 1, say=said.append) as system:
        helper = int((tmp_path / "helper").read_text())
        pids = [*system.pids.values(), helper]
        assert all(map(alive, pids))
    assert await gone(pids)
    assert said[0] == "engine-0 did not end 0.4 s after SIGTERM: killed"


async def test_an_exception_stops_everything() -> None:
    system = LocalSystem(REPLAY, 1)
    with pytest.raises(KeyError):
        async with system:
            raise KeyError
    assert await gone(list(system.pids.values()))


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, sys, time
        from seer.local.child import die_with
        parent = os.getpid()
        if os.fork() == 0:
            die_with(parent)
            print(os.getpid(), flush=True)
            time.sleep(600)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert _soon(lambda: not alive(orphan))


def _soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_long_temporary_folders_do_not_make_long_socket_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(launch.tempfile, "tempdir", str(deep))
    monkeypatch.setattr(launch, "_MAX_IPC_DIR", 60)
    assert launch._short_temporary_folder() == "/tmp"


def test_public_systems_need_known_ports() -> None:
    config = Config(endpoints=Endpoints(events="tcp://127.0.0.1:0"), engine=REPLAY.engine)
    with pytest.raises(ConfigError, match=r"endpoints\.events = 'tcp://127\.0\.0\.1:0'"):
        LocalSystem(config, 1, private=False)


# --- hardware --------------------------------------------------------------------------------

EIGHT = Hardware(cores=[0, 4, 1, 5, 2, 6, 3, 7], devices=[], free_bytes=16 * 2**30)


@pytest.mark.parametrize(
    ("cores", "instances", "ranks", "shares"),
    [
        ([0, 1], 2, 1, ["0", "1"]),
        ([0, 4, 1, 5], 2, 1, ["0,4", "1,5"]),
        ([0, 1, 2, 3], 2, 2, ["0|1", "2|3"]),
        ([0, 1, 2], 2, 1, ["0", "1"]),
        ([3], 2, 1, ["3", "3"]),
    ],
)
def test_cores_are_disjoint_while_there_are_enough(
    cores: list[int], instances: int, ranks: int, shares: list[str]
) -> None:
    assert share_cores(cores, instances, ranks) == shares


def test_cpu_engines() -> None:
    first, second = plan_engines(EngineConfig(), 2, EIGHT)
    assert (first.config.name, second.config.name) == ("engine-0", "engine-1")
    assert (first.config.cpu_cores, second.config.cpu_cores) == ("0,4,1,5", "2,6,3,7")
    assert first.config.kv_cache_gib == second.config.kv_cache_gib == 0.8
    assert not first.shares_device


def test_what_was_said_is_kept() -> None:
    (plan,) = plan_engines(EngineConfig(kv_cache_gib=1.5, cpu_cores="7"), 1, EIGHT)
    assert (plan.config.kv_cache_gib, plan.config.cpu_cores) == (1.5, "7")
    (plan,) = plan_engines(EngineConfig(kv_blocks=10), 1, EIGHT)
    assert plan.config.kv_cache_gib is None


def gpu(name: str, free: int = 80) -> Device:
    """A device of 80 GiB, of which `free` are free."""
    return Device(
        name=name, model="NVIDIA H100", total_bytes=80 * 2**30, free_bytes=free * 2**30, generation=9
    )


def on(*devices: Device) -> Hardware:
    return Hardware(cores=[0], devices=devices, free_bytes=0)


def test_devices_of_their_own() -> None:
    plans = plan_engines(EngineConfig(tensor_parallel=2), 2, on(*map(gpu, "abcd")))
    assert [plan.environ["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["a,b", "c,d"]
    assert {plan.config.gpu_memory_utilization for plan in plans} == {0.9}
    assert not any(plan.shares_device for plan in plans)


@pytest.mark.parametrize(("ranks", "instances"), [(1, 4), (2, 2), (3, 1)])
def test_without_a_number_each_rank_has_a_device_of_its_own(ranks: int, instances: int) -> None:
    plans = plan_engines(EngineConfig(tensor_parallel=ranks), None, on(*map(gpu, "abcd")))
    assert len(plans) == instances
    assert not any(plan.shares_device for plan in plans)
    assert {plan.config.max_num_seqs for plan in plans} == {1024}
    assert len(plan_engines(EngineConfig(tensor_parallel=ranks), None, EIGHT)) == 2
    assert len(plan_engines(EngineConfig(backend="replay"), None, on(gpu("a")))) == 2


def test_a_shared_device() -> None:
    plans = plan_engines(EngineConfig(), 2, on(gpu("0")))
    assert [plan.environ["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["0", "0"]
    assert {plan.config.gpu_memory_utilization for plan in plans} == {0.45}
    assert {plan.config.max_num_seqs for plan in plans} == {256}  # of 40 GiB each
    assert all(plan.shares_device for plan in plans)


def test_what_was_said_for_devices_is_kept() -> None:
    said = EngineConfig(gpu_memory_utilization=0.6, max_num_seqs=3, max_num_batched_tokens=7)
    for plan in plan_engines(said, 2, on(gpu("0", free=10))):
        config = plan.config
        assert (config.gpu_memory_utilization, config.max_num_seqs) == (0.3, 3)
        assert config.max_num_batched_tokens == 7


def test_impossible_plans() -> None:
    with pytest.raises(ConfigError, match="only 1 devices"):
        plan_engines(EngineConfig(tensor_parallel=2), 1, on(gpu("0")))
    with pytest.raises(InvalidField, match="instances = 0"):
        plan_engines(EngineConfig(), 0, EIGHT)


def test_this_machine() -> None:
    machine = Hardware.here()
    assert set(machine.cores) == os.sched_getaffinity(0)
    assert machine.free_bytes > 0
