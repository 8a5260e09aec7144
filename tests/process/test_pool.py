"""The KV pool's processes with the real Mooncake, started by their commands; no vLLM.

Blocks are put and got by a plain client in a process of its own, as a call of Mooncake's may hang.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import msgspec
import pytest
from living import alive, children, wait_for

from seer.common.config import Config, EngineConfig, PoolConfig, dump
from seer.common.pool_metrics import ask_master, read_figures
from seer.local.pool_plan import _free_ports
from seer.local.system import LocalSystem
from seer.report.engine_use import figures_text
from seer.services.pool.supervisor import PROBE_SECONDS

pytest.importorskip("mooncake.store", reason="needs Mooncake and libibverbs1", exc_type=ImportError)

CLIENT = """
import json, sys
from mooncake.store import MooncakeDistributedStore

def block(key):
    return (key * 64).encode()[:64] * (int(sys.argv[2]) // 64)

store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**24, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
for line in sys.stdin:
    verb, key = line.split()
    if verb == "put":
        print(json.dumps(store.put(key, block(key)) == 0), flush=True)
    else:
        got = store.get(key)
        print(json.dumps({block(key): "hit", b"": "miss"}.get(got, "wrong")), flush=True)
"""

SECONDS = 60.0
until = partial(wait_for, seconds=SECONDS)

STALL_SECONDS = 20.0
"""Longer than memory may be missing, and than a master may be silent."""


class Client:
    def __init__(self, master, block_bytes=65536):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, master, str(block_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
            env={**os.environ, "MC_RPC_TIMEOUT_MS": "2000"},
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def _ask(self, verb, key):
        self.process.stdin.write(f"{verb} {key}\n")
        return json.loads(self.process.stdout.readline())

    def put(self, key):
        return self._ask("put", key)

    def get(self, key):
        return self._ask("get", key)

    def works_with(self, key):
        return self.put(key) and self.get(key) == "hit"


class Pool:
    """A pool by its commands; `processes` by service."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.config = Config(pool=pool_config(**settings))
        self.file = folder / "seer.toml"
        self.file.write_text(dump(self.config))
        self.processes = {}
        self.clients = []

    def start(self, service, wait=True):
        ready, write = os.pipe()
        with (self.folder / f"{service}.log").open("ab") as log:
            self.processes[service] = subprocess.Popen(
                [sys.executable, "-m", "seer.cli.main", service, "--config", str(self.file), "--ready-fd", str(write)],
                stderr=log, pass_fds=(write,), start_new_session=True,
            )  # fmt: skip
        os.close(write)
        with os.fdopen(ready, "rb") as pipe:
            return json.loads(pipe.readline()) if wait else None

    def client(self, **options):
        self.clients.append(Client(self.config.pool.master, **options))
        return self.clients[-1]

    def log(self, service):
        return (self.folder / f"{service}.log").read_text()

    def child_of(self, service):
        (child,) = children(self.processes[service].pid)
        return child

    def close(self):
        for process in [client.process for client in self.clients]:
            process.kill()
            process.wait(10)
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def pool_config(**settings):
    master, metrics = (f"127.0.0.1:{port}" for port in _free_ports(2))
    given = {
        "kind": "mooncake",
        "master": master,
        "metrics": metrics,
        "dram_gib": 0.125,
        "lease_seconds": 0.5,
    }
    return PoolConfig(**(given | settings))


@contextlib.contextmanager
def running(folder, **settings):
    pool = Pool(folder, **settings)
    try:
        pool.start("pool-owner", wait=False)  # it waits for the master
        assert "error" not in pool.start("pool-master")
        until(lambda: "ready" in pool.log("pool-owner"))
        yield pool
    finally:
        pool.close()


def test_what_is_put_is_there_and_nothing_stays_behind(tmp_path):
    disk = tmp_path / "disk"
    with running(tmp_path, ssd_gib=0.25, ssd_path=str(disk)) as pool:
        client, other = pool.client(), pool.client()
        assert client.get("never") == "miss"
        assert client.works_with("one")
        assert other.get("one") == "hit"
        assert (disk / "kv").is_dir()
        children = [pool.child_of(service) for service in pool.processes]
        for process in pool.processes.values():
            process.terminate()
        assert [process.wait(SECONDS) for process in pool.processes.values()] == [0, 0]
        until(lambda: not any(map(alive, children)))
        assert list(disk.iterdir()) == []
        for address in (pool.config.pool.master, pool.config.pool.metrics):
            with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
                pass


def test_a_killed_owner_costs_what_it_held(tmp_path):
    with running(tmp_path) as pool:
        client = pool.client()
        assert client.works_with("before")
        holder = pool.child_of("pool-owner")
        pool.processes["pool-owner"].kill()
        until(lambda: not alive(holder))
        until(lambda: client.get("before") == "miss")
        assert "error" not in pool.start("pool-owner")
        until(lambda: client.works_with(f"after{time.monotonic()}"))
        assert client.get("before") == "miss"


def test_memory_whose_holder_was_killed_is_held_anew(tmp_path):
    with running(tmp_path) as pool:
        client, holder = pool.client(), pool.child_of("pool-owner")
        assert client.works_with("before")
        os.kill(holder, signal.SIGKILL)
        until(lambda: "the pool's memory is back" in pool.log("pool-owner"))
        assert "its holder was killed by SIGKILL" in pool.log("pool-owner")
        until(lambda: client.works_with(f"after{time.monotonic()}"))
        assert pool.processes["pool-owner"].poll() is None
        assert pool.child_of("pool-owner") != holder


@pytest.mark.breadth  # tests/unit/test_pool_supervisor.py has them stopped, on virtual time
def test_a_machine_that_stalls_has_its_pool_afterwards(tmp_path):
    """As long as a master, an owner and its holder are stopped together, nobody learns anything of anybody."""
    with running(tmp_path) as pool:
        client = pool.client()
        assert client.works_with("before")
        before = {name: (process.pid, pool.child_of(name)) for name, process in pool.processes.items()}
        for sign in (signal.SIGSTOP, signal.SIGCONT):
            for pids in before.values():
                for pid in pids:
                    os.kill(pid, sign)
            if sign == signal.SIGSTOP:
                time.sleep(STALL_SECONDS)
        until(lambda: client.works_with(f"after{time.monotonic()}"))
        time.sleep(2 * PROBE_SECONDS)
        now = {name: (process.pid, pool.child_of(name)) for name, process in pool.processes.items()}
        assert now == before
        assert "begun anew" not in pool.log("pool-owner") + pool.log("pool-master")


def test_a_killed_master_costs_what_it_knew(tmp_path):
    with running(tmp_path) as pool:
        client = pool.client()
        assert client.works_with("before")
        program = pool.child_of("pool-master")
        pool.processes["pool-master"].kill()
        until(lambda: not alive(program))
        assert client.get("before") == "miss"
        assert not client.put("meanwhile")
        assert "error" not in pool.start("pool-master")
        until(lambda: client.works_with(f"after{time.monotonic()}"))
        assert client.get("before") == "miss"
        assert pool.processes["pool-owner"].poll() is None


@pytest.mark.breadth  # tests/unit/test_pool_supervisor.py has them stopped, on virtual time
def test_a_master_that_hangs_is_replaced(tmp_path):
    with running(tmp_path) as pool:
        client = pool.client()
        program = pool.child_of("pool-master")
        os.kill(program, signal.SIGSTOP)
        assert client.get("anything") == "miss"
        until(lambda: "Mooncake's master is back" in pool.log("pool-master"))
        assert "it did not answer for 10 s" in pool.log("pool-master")
        assert not alive(program)
        until(lambda: client.works_with(f"after{time.monotonic()}"))
        assert [process.poll() for process in pool.processes.values()] == [None, None]


@pytest.mark.breadth  # tests/unit/test_pool_supervisor.py has them stopped, on virtual time
def test_memory_that_does_not_answer_is_held_anew(tmp_path):
    with running(tmp_path, ssd_gib=0.25, ssd_path=str(tmp_path / "disk")) as pool:
        client = pool.client()
        assert client.works_with("before")
        holder = pool.child_of("pool-owner")
        os.kill(holder, signal.SIGSTOP)
        until(lambda: "the pool's memory is back" in pool.log("pool-owner"))
        assert "did not list it for 15 s" in pool.log("pool-owner")
        assert not alive(holder)
        assert client.get("before") == "miss"
        until(lambda: client.works_with(f"after{time.monotonic()}"))


def test_nobody_who_holds_memory_is_said_and_ends_when_a_holder_is_back(tmp_path):
    with running(tmp_path) as pool:
        metrics = pool.config.pool.metrics
        owner, holder = pool.processes["pool-owner"].pid, pool.child_of("pool-owner")
        for pid in (owner, holder):
            os.kill(pid, signal.SIGSTOP)
        until(lambda: not read_figures(asyncio.run(ask_master(metrics))).owners)
        assert not pool.client().put("dropped")
        assert "NOBODY" in figures_text(read_figures(asyncio.run(ask_master(metrics))))
        for pid in (owner, holder):
            os.kill(pid, signal.SIGCONT)
        until(lambda: read_figures(asyncio.run(ask_master(metrics))).owners)
        until(lambda: pool.clients[0].works_with(f"after{time.monotonic()}"))


def test_what_memory_cannot_hold_lies_on_disk(tmp_path):
    blocks, size = 400, 2**20
    with running(tmp_path, ssd_gib=1.0, ssd_path=str(tmp_path / "disk")) as pool:
        client = pool.client(block_bytes=size)
        for i in range(blocks):  # three times the memory; a full pool refuses until it has made room
            until(lambda i=i: client.put(f"block{i}"))
        got = [client.get(f"block{i}") for i in range(blocks)]
        assert got.count("wrong") == 0
        assert got.count("hit") >= 0.9 * blocks
        written = sum(file.stat().st_size for file in (tmp_path / "disk").rglob("*.bucket"))
        assert 2**27 < written <= 2**30


def test_a_full_disk_gives_up_the_oldest(tmp_path):
    blocks, memory, disk = 300, 64, 128  # MiB, as a block is
    with running(
        tmp_path, dram_gib=memory / 1024, ssd_gib=disk / 1024, ssd_path=str(tmp_path / "disk")
    ) as pool:
        client = pool.client(block_bytes=2**20)
        for i in range(blocks):
            until(lambda i=i: client.put(f"block{i}"))
        got = [client.get(f"block{i}") for i in range(blocks)]
        assert set(got) == {"hit", "miss"}
        assert 0.6 * disk < got.count("hit") <= memory + disk
        assert got[0] == "miss"
        assert set(got[-memory // 2 :]) == {"hit"}
        written = sum(file.stat().st_size for file in (tmp_path / "disk").rglob("*.bucket"))
        assert written <= disk * 2**20


@pytest.mark.parametrize(
    ("service", "settings", "said"),
    [
        ("pool-owner", {"dram_gib": 1e6}, "pool.dram_gib = 1e+06: only"),
        ("pool-owner", {"ssd_gib": 1e9}, "pool.ssd_gib = 1e+09: only"),
        ("pool-owner", {"ssd_gib": 1.0, "ssd_path": "/proc/disk"}, "pool.ssd_path = '/proc/disk': No such file"),
        ("pool-master", {"master": "203.0.113.1:7108"}, "pool.master = '203.0.113.1:7108': Cannot assign"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(tmp_path, service, settings, said):
    pool = Pool(tmp_path, **settings)
    try:
        answer = pool.start(service)
        assert said in answer["error"]
        assert answer["code"] == "config"
        assert pool.processes[service].wait(SECONDS) == 2
    finally:
        pool.close()


def test_what_is_in_use_is_not_shared(tmp_path):
    with running(tmp_path, ssd_gib=0.25, ssd_path=str(tmp_path / "disk")) as pool:
        first = dict(pool.processes)
        for service, said in (
            ("pool-master", f"pool.master = '{pool.config.pool.master}': Address already in use"),
            ("pool-owner", "another owner uses it; give another folder"),
        ):
            assert said in pool.start(service)["error"]
            assert pool.processes[service].wait(SECONDS) == 2
        assert all(process.poll() is None for process in first.values())
        assert pool.client().works_with("still")
        pool.processes |= first


def test_two_owners_share_the_work(tmp_path):
    with running(tmp_path) as pool:
        first = pool.processes["pool-owner"]
        try:
            assert "error" not in pool.start("pool-owner")
            client = pool.client(block_bytes=2**20)
            assert all(client.put(f"block{i}") for i in range(200))  # more than one of them holds
            assert {client.get(f"block{i}") for i in range(200)} == {"hit"}
        finally:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait(10)


def status(endpoint, *options):
    command = [sys.executable, "-m", "seer.cli.main", "status", "--connect", endpoint, *options]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return shown.returncode, shown.stdout


async def test_a_local_system_has_a_pool_of_its_own():
    config = Config(engine=EngineConfig(backend="replay"), pool=PoolConfig(kind="mooncake", dram_gib=0.125))
    said = []
    async with LocalSystem(config, 1, say=said.append) as system:
        pids = [system.pids[name] for name in ("pool-master", "pool-owner")]
        assert system.config.pool.master != config.pool.master
        client = Client(system.config.pool.master)
        try:
            assert client.works_with("one")
        finally:
            client.process.kill()
            client.process.wait(10)
        code, text = status(system.endpoint)
        assert (code, "pool: 1 keys, 0.00 of 0.12 GiB of memory, 0 evicted; owned by 127.0.0.1:" in text) == (
            0,
            True,
        )
        code, text = status(system.endpoint, "--json")
        assert (code, json.loads(text)["pool"]["dram_total"]) == (0, 2**27)
        os.killpg(system.pids["pool-master"], signal.SIGSTOP)
        code, text = status(system.endpoint)
        said_of_it = f"pool: UNREACHABLE: pool.metrics = '{system.config.pool.metrics}': no answer in 3 s"
        assert (code, said_of_it in text) == (1, True)
        assert "engine-0: 0 chunks" in text
        os.killpg(system.pids["pool-master"], signal.SIGCONT)
    assert said == ["KV pool: mooncake, at most 0.125 GiB of memory"]
    until(lambda: not any(map(alive, pids)))


def test_the_holder_says_what_it_cannot_hold():
    from seer.services.pool.memory_process import SegmentConfig

    holding = SegmentConfig(
        host="127.0.0.1", master="127.0.0.1:1", protocol="tcp", device="", dram_bytes=2**24
    )
    holder = subprocess.run(
        [sys.executable, "-m", "seer.services.pool.memory_process", msgspec.json.encode(holding).decode()],
        capture_output=True, text=True, timeout=SECONDS, check=False,
        env={**os.environ, "MC_STORE_CLIENT_SETUP_RETRIES": "1"},
    )  # fmt: skip
    assert (holder.returncode, holder.stdout) == (
        1, "Mooncake cannot hold 16777216 bytes at 127.0.0.1 (code -1): see its log\n",
    )  # fmt: skip
