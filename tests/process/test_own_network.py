"""A network for one system alone, and the ports that a pool keeps to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.network import problem

from seer.common.config import Config, EngineConfig, PoolConfig
from seer.common.errors import ConfigError
from seer.common.pool_metrics import port_environment
from seer.local import own_network

DEVICES = """
import os, socket
from pathlib import Path
from seer.local.own_network import enter
before = os.readlink("/proc/self/ns/net")
said = enter()
devices = sorted(name for _, name in socket.if_nameindex())
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname(), timeout=5).close()
    reached = server.accept()[0].fileno() >= 0
print(said, os.readlink("/proc/self/ns/net") != before, devices, reached, os.getuid(), Path(__file__).parent.owner())
"""


def moved(folder, *before):
    script = folder / "moves.py"
    script.write_text(DEVICES)
    done = subprocess.run(
        [*before, sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(bool(problem()), reason=problem())
def test_a_process_moves_into_a_network_that_has_a_loopback_alone(tmp_path):
    assert moved(tmp_path) == f" True ['lo'] True {os.getuid()} {tmp_path.owner()}".strip()


def test_where_it_is_forbidden_the_network_stays_and_is_said(tmp_path):
    forbidden = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    if os.geteuid() != 0 or subprocess.run([*forbidden, "true"], check=False).returncode:
        pytest.skip("needs root and util-linux's setpriv")
    said = moved(tmp_path, *forbidden)
    assert said.startswith("no network namespace: Operation not permitted False [")
    assert "'lo'" in said


def test_only_a_pool_of_ones_own_over_tcp_has_ports_to_hide(monkeypatch):
    entered = []
    monkeypatch.setattr(own_network, "enter", lambda: entered.append(1) or "forbidden")
    for pool, backend, moves in (
        (PoolConfig(), "vllm", True),
        (PoolConfig(kind="mooncake"), "vllm", True),
        (PoolConfig(kind="none"), "vllm", False),
        (PoolConfig(), "replay", False),
        (PoolConfig(protocol="rdma"), "vllm", False),
        (PoolConfig(master="10.0.0.7:7108"), "vllm", False),
    ):
        entered.clear()
        note = own_network.for_pool(Config(pool=pool, engine=EngineConfig(backend=backend)))
        assert bool(entered) == moves
        assert ("23000-23999 (forbidden)" in note) == moves


@pytest.mark.parametrize("ports", ["", "23000", "23999-23000", "80-90", "23000-70000", "a-b", "-23000-23001"])
def test_ports_that_are_none_are_refused_by_name(ports):
    with pytest.raises(ConfigError, match=r"pool\.ports"):
        port_environment(ports)


def listening(pid):
    """The TCP ports at which a process listens."""
    inodes = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def test_who_holds_the_pools_memory_keeps_to_its_ports(tmp_path):
    pytest.importorskip("mooncake.store", reason="needs Mooncake and libibverbs1", exc_type=ImportError)
    from process.test_pool import running

    with running(tmp_path, ports="24100-24199") as pool:
        ports = listening(pool.child_of("pool-owner"))
        assert len(ports) == 2, ports
        assert all(24100 <= port <= 24199 for port in ports), ports
