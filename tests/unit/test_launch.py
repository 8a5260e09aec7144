"""The local supervisor with scripted children."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from living import alive
from msgspec.structs import replace
from virtual_time import eventually

from seer.common.config import BufferConfig, Config, Endpoints, EngineConfig, load
from seer.common.endpoints import shards
from seer.common.errors import ConfigError
from seer.local import child, pool_plan, restarts
from seer.local import system as launch
from seer.local.child import LaunchError
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
if what == "once":  # its first incarnation works
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


def names_in(folder: str) -> set[str]:
    return {file.name for file in Path(folder).iterdir()}


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def gone(pids: list[int]) -> bool:
    await eventually(lambda: not any(map(alive, pids)))
    return True


async def given_up(said: list[str]) -> str:
    await eventually(lambda: said and "given up" in said[-1])
    return said[-1]


def test_without_what_engines_need_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "missing_for_engines", lambda: "torch")
    LocalSystem(REPLAY, 1)
    with pytest.raises(ConfigError, match=r"torch is not installed; .*seer-rollout\[cpu\]"):
        LocalSystem(Config(), 1)


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
        kept = {name: getattr(system.config.buffer, name) for name in ("spool", "images", "log")}
        await system.restart_buffer(BufferConfig(chunk_size=7))
        assert {name for name, pid in system.pids.items() if pid != before[name]} == {"buffer"}
        assert not alive(before["buffer"])
        assert (
            system.config.buffer == load(folder / "buffer.toml").buffer == BufferConfig(chunk_size=7, **kept)
        )
        os.kill(system.pids["buffer"], signal.SIGKILL)
        await eventually(lambda: system.restarts["buffer"])
        assert load(folder / "buffer.toml").buffer.chunk_size == 7


async def test_the_environment_is_not_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEER_ENGINE__NAME", "mine")
    monkeypatch.setenv("CHILD_engine_0", "")
    async with LocalSystem(REPLAY, 1) as system:
        environ = environ_of(system.pids["engine-0"])
    assert b"SEER_ENGINE__NAME" not in environ
    assert b"CHILD_engine_0" in environ


async def test_a_log_keeps_what_earlier_incarnations_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD_dgds", "die")
    async with LocalSystem(REPLAY, 1) as system:
        log = Path(system.endpoint.removeprefix("ipc://")).parent / "dgds.log"
        await eventually(lambda: system.restarts["dgds"] >= 3)
        assert log.read_text().count("hello from dgds\nout of luck\n") >= 3


async def test_a_child_that_refuses_shows_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD_engine_1", "refuse")
    said: list[str] = []
    system = LocalSystem(REPLAY, 2, say=said.append)
    with pytest.raises(LaunchError, match=r"engine-1 ended with exit code 2;(.|\n)*no such model"):
        await system.__aenter__()
    assert await gone(list(system.pids.values()))
    assert names_in(said[-1].removeprefix("logs are kept in ")) >= {"engine-1.log", "buffer.log"}


def test_a_child_for_which_no_file_can_be_opened_cannot_be_started_and_leaves_none_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", full)
    spawn = child.Child.spawn("dgds", "dgds", REPLAY, {}, tmp_path, logged=False)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(LaunchError, match=r"dgds cannot be started: .*Too many open files"):
        spawn.send(None)  # it comes to nothing that it waits for
    assert len(list(Path("/proc/self/fd").iterdir())) == before


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


@pytest.mark.parametrize("line", ["{garbage", "{" + "x" * 100_000])
async def test_a_child_that_reports_garbage(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setenv("CHILD_dgds", line)
    system = LocalSystem(REPLAY, 1)
    with pytest.raises(
        LaunchError, match=r"dgds told its start in a way unknown here: (.|\n)*hello from dgds"
    ):
        await system.__aenter__()
    assert await gone(list(system.pids.values()))


async def test_a_lost_child_whose_log_is_lost_too_is_started_again() -> None:
    said: list[str] = []
    async with LocalSystem(REPLAY, 1, say=said.append) as system:
        (Path(system.endpoint.removeprefix("ipc://")).parent / "dgds.log").unlink()
        os.kill(system.pids["dgds"], signal.SIGKILL)
        await system.run(eventually(lambda: "dgds is back" in said))
    assert any("dgds was killed by SIGKILL; its log cannot be read" in line for line in said)


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
        await system.run(eventually(lambda: sum(line.endswith("is back") for line in said) == len(before)))
        after = system.pids
        assert set(system.restarts.values()) == {1}
        assert not set(after.values()) & set(before.values())
    assert "buffer was killed by SIGKILL" in "\n".join(said)
    assert await gone([*before.values(), *after.values()])


async def test_a_lost_child_that_cannot_be_started_at_first_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, said = asyncio.create_subprocess_exec, list[str]()

    async def failing(*_: object, **__: object) -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    async with LocalSystem(REPLAY, 1, say=said.append) as system:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", failing)
        os.kill(system.pids["dgds"], signal.SIGKILL)
        await system.run(eventually(lambda: "dgds is back" in said))
    assert any("dgds cannot be started: [Errno 11] no more processes" in line for line in said)


async def test_an_exception_stops_everything_and_a_child_that_dies_meanwhile_stays_dead() -> None:
    system = LocalSystem(REPLAY, 1)
    with pytest.raises(KeyError):
        async with system:
            os.kill(system.pids["dgds"], signal.SIGKILL)
            raise KeyError
    assert await gone(list(system.pids.values()))


@pytest.mark.parametrize("name", ["engine-0", "context"])
async def test_one_that_always_dies_is_given_up_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("CHILD_" + name.replace("-", "_"), "once" if name == "engine-0" else "die")
    said: list[str] = []
    async with LocalSystem(REPLAY, 2, say=said.append) as system:
        line = await system.run(given_up(said))
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
        await system.run(eventually(lambda: system.restarts["engine-0"] >= 2 * restarts.LIMIT))
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
        await eventually(lambda: len(system.pids) == 6)  # it is not waited for
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
@pytest.mark.parametrize(
    ("name", "how"),
    [("pool-master", "refuse"), ("pool-owner", "die"), ("pool-owner", '{"error": "no", "code": "config"}')],
)
async def test_a_pool_that_nobody_asked_for_may_fail(
    monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    monkeypatch.setenv("CHILD_" + name.replace("-", "_"), how)
    said: list[str] = []
    async with LocalSystem(POOLED, 1, say=said.append) as system:
        line = await system.run(given_up(said))
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


async def test_a_drain_ends_once_no_engine_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHILD_buffer", "stubborn")
    monkeypatch.setenv("HELPER", str(tmp_path / "helper"))
    monkeypatch.setenv("CHILD_engine_0", "once")
    said: list[str] = []
    async with asyncio.timeout(60), LocalSystem(REPLAY, 1, drain=True, say=said.append):
        pass
    assert any("engine-0 is given up" in line for line in said)


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
