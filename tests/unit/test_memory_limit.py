"""Memory limits as the kernel tells them, and the bounds that follow."""

import os
import resource
import subprocess
import sys

import pytest
import yaml
from memory_transport import MemoryNetwork, MemoryTransport

from seer.common.clock import LoopClock
from seer.common.config import BufferConfig, Config, DgdsConfig
from seer.common.errors import ConfigError
from seer.common.process.memory_limit import MOST, Bound, bounds, free_bytes, limit_bytes
from seer.services.buffer import server as buffer_server
from seer.services.dgds import server as dgds_server
from tests.parts import ROOT

GIB = 2**30


class Stopped(LoopClock):
    def now(self):
        return 0.0


UNLIMITED_V1 = 9223372036854771712


def kernel(root, cgroup, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {900 * 2**20} kB\n")
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def v2(folder, limit, used=0, cached=0):
    stat = f"anon 1\ninactive_file {cached}\nactive_file 2"
    return {f"{folder}memory.max": limit, f"{folder}memory.current": used, f"{folder}memory.stat": stat}


KERNELS = {
    "a container": ("0::/\n", v2("", 3 * GIB, 2 * GIB, GIB), 3 * GIB, 2 * GIB),
    "a unit with MemoryMax": (
        "0::/system.slice/seer-buffer.service\n",
        v2("system.slice/seer-buffer.service/", 2 * GIB, GIB) | v2("system.slice/", "max"),
        2 * GIB,
        GIB,
    ),
    "a slice above it": (
        "0::/a.slice/b.service\n",
        v2("a.slice/b.service/", "max") | v2("a.slice/", GIB, 0),
        GIB,
        GIB,
    ),
    "version 1": (
        "9:name=systemd:/\n4:cpu,memory:/docker/ab\n0::/\n",
        {"memory/memory.limit_in_bytes": 5 * GIB, "memory/memory.usage_in_bytes": GIB, "memory/memory.stat": "x 1"},
        5 * GIB,
        4 * GIB,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_the_smallest_limit_counts(tmp_path, monkeypatch, name):
    cgroup, files, limit, free = KERNELS[name]
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**28))
    root = kernel(tmp_path, cgroup, files)
    assert limit_bytes(root) == limit
    assert free_bytes(root) == free


def test_without_limits_it_is_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**20))
    unlimited = {"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/memory.usage_in_bytes": GIB}
    assert limit_bytes(kernel(tmp_path, "4:memory:/\n", unlimited)) == 4 * GIB


def test_an_address_space_is_a_limit():
    code = "from seer.common.process.memory_limit import limit_bytes; print(limit_bytes())"
    limited = lambda: resource.setrlimit(resource.RLIMIT_AS, (3 * GIB, 3 * GIB))  # noqa: E731
    found = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=limited, capture_output=True, text=True, check=True, timeout=60
    )  # fmt: skip
    assert int(found.stdout) <= 3 * GIB


A, B = Bound("a.bytes", None, 1 / 3, 16 * GIB), Bound("b.tokens", None, 1 / 4, 2 * 10**9, 3)


def test_bounds_follow_from_the_limit_and_fit_it():
    assert bounds([A, B], 0) == [16 * GIB, 2 * 10**9]
    assert bounds([A, B], 300 * GIB) == [16 * GIB, 2 * 10**9]
    assert bounds([A, B], 12 * GIB) == [4 * GIB, GIB]
    assert bounds([changed_bound(A, 5), B], 12 * GIB) == [5, GIB]


def changed_bound(bound, given):
    return bound._replace(given=given)


def test_bounds_beyond_the_limit_are_refused_by_name():
    given = [changed_bound(A, 8 * GIB), changed_bound(B, GIB)]
    assert bounds(given, 15 * GIB) == [8 * GIB, GIB]
    with pytest.raises(ConfigError) as refused:
        bounds(given, 14 * GIB)
    assert f"a.bytes = {8 * GIB}, b.tokens = {GIB}: 11.00 GiB, where this process may have 14.00" in str(
        refused.value
    )
    assert f"give at most {MOST * 14:.2f} GiB" in str(refused.value)


def built(monkeypatch, module, limit, **sections):
    monkeypatch.setattr(module, "limit_bytes", lambda: limit)
    return module.make(Config(**sections), MemoryTransport(MemoryNetwork()), Stopped())


@pytest.mark.parametrize("limit", [GIB // 8, 4 * GIB, 16 * GIB, 2**40])
def test_services_start_with_any_limit_and_stay_within_it(monkeypatch, limit):
    limits = built(monkeypatch, buffer_server, limit).machine.registry._limits
    assert 0 < 8 * (limits.unfinished_tokens + limits.result_tokens) <= MOST * limit
    store = built(monkeypatch, dgds_server, limit).store
    assert 0 < 3 * (store._max_tokens + store._past._max_tokens) <= MOST * limit
    if limit >= 4 * GIB:
        assert store._max_tokens / (256 * 1024) > 1_900, "tokens for each request of 256 engines"


@pytest.mark.parametrize(
    ("module", "sections", "named"),
    [
        (buffer_server, {"buffer": BufferConfig(result_bytes=8 * GIB, unfinished_bytes=16 * GIB)}, "result_bytes"),
        (buffer_server, {"buffer": BufferConfig(unfinished_bytes=10 * GIB)}, "buffer.unfinished_bytes = 10737418240"),
        (dgds_server, {"dgds": DgdsConfig(max_tokens=5_000_000_000)}, "dgds.max_tokens = 5000000000"),
        (dgds_server, {"dgds": DgdsConfig(remember_tokens=5_000_000_000)}, "dgds.remember_tokens = 5000000000"),
    ],
)  # fmt: skip
def test_a_service_refuses_to_start_with_bounds_that_its_limit_has_no_room_for(
    monkeypatch, module, sections, named
):
    with pytest.raises(ConfigError, match=f"{named}.* 16.00 GiB"):
        built(monkeypatch, module, 16 * GIB, **sections)


def test_limits_of_containers_have_room_for_what_is_promised(monkeypatch):
    """What compose, units and manifests allow, with the configuration that comes with them."""
    services = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]
    for module, name in ((buffer_server, "buffer"), (dgds_server, "dgds")):
        gib = int(services[name]["mem_limit"].rpartition(":-")[2].removesuffix("g}"))
        built(monkeypatch, module, gib * GIB)
