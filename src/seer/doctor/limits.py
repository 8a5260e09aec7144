"""What the system allows: files, shared memory, memory, processors, disk.

Invariant (tests/unit/test_doctor_machine.py asserts it): a limit fails if what this configuration needs is
above it, and says which setting, or which command, changes that.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from seer.common.config import Config
from seer.common.data_parallel import rank_weight_bytes
from seer.common.process.memory_limit import free_bytes
from seer.common.process.scratch import nearest_existing
from seer.doctor.checked_config import given, model_bytes
from seer.doctor.report_lines import Report
from seer.local.hardware import EnginePlan, plan_engines

LEAST_FILES = 1024
"""Sockets of a system with tens of engines; each engine and trainer takes a few."""

SHARED_BYTES_PER_RANK = 256 * 2**20
"""vLLM's ranks send each other their work through shared memory, NCCL its buffers."""

BASE_BYTES = 2**30
"""What a rank takes on the host besides weights and KV: libraries, batches."""

SPOOL_VERSIONS = 2
"""Versions of the weights that the buffer keeps on disk while a trainer streams."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a process may have here. Bytes; None: no limit. `quota`: CPUs that a container may use at once."""

    files: int
    shared_bytes: int | None
    locked_bytes: int | None
    free_bytes: int
    cores: int
    quota: float | None
    strict_memory: bool = False

    @classmethod
    def here(cls) -> Limits:
        """Return this process's."""
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shared = Path("/dev/shm")  # noqa: S108 - asked for its size
        return cls(
            files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            shared_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
            locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
            free_bytes=free_bytes(),
            cores=len(os.sched_getaffinity(0)),
            quota=_quota(_text("/sys/fs/cgroup/cpu.max")),
            strict_memory=_text("/proc/sys/vm/overcommit_memory").strip() == "2",
        )


@dataclass(frozen=True, slots=True)
class Need:
    """What a system on this machine needs, in bytes: `rank_bytes` each rank, `locked_bytes` for RDMA."""

    instances: int
    ranks: int
    rank_bytes: int
    locked_bytes: int
    pool_bytes: int

    @classmethod
    def of(cls, config: Config, plans: list[EnginePlan], weights: int, experts: int = 0) -> Need:
        """Return what engines of these plans need, whose weights, and experts of them, are so many bytes."""
        engine, pool = plans[0].config, config.pool
        ranks = engine.tensor_parallel * engine.vllm.data_parallel_size
        each = rank_weight_bytes(engine, weights, experts)
        kv = 0 if plans[0].environ else int((engine.kv_cache_gib or 0) * 2**30)
        copies = 1 if plans[0].environ else 2  # GPUs: for sleep; CPUs: new ones are read beside the old
        staging = pool.staging_mib * 2**20 * ranks * len(plans) if pool.kind != "none" else 0
        return cls(
            instances=len(plans), ranks=ranks, rank_bytes=BASE_BYTES + copies * each + kv,
            locked_bytes=staging if pool.protocol == "rdma" else 0,
            pool_bytes=int((pool.dram_gib or 0) * 2**30) + staging,
        )  # fmt: skip

    @property
    def host_bytes(self) -> int:
        """Return all memory of the host that is needed."""
        return self.instances * self.ranks * self.rank_bytes + self.pool_bytes


def check(report: Report) -> None:
    """Compare what is allowed here with what the configuration needs."""
    config = given(report)
    plans = plan_engines(config.engine, None)
    weights, experts = model_bytes(config)
    need = Need.of(config, plans, weights, experts)
    report.note(
        "planned",
        instances=need.instances,
        ranks=need.ranks,
        devices=plans[0].environ.get("CUDA_VISIBLE_DEVICES", "CPUs"),
    )
    judge(report, Limits.here(), need)
    judge_load(report, os.getloadavg()[0], len(os.sched_getaffinity(0)))
    spool = Path(config.buffer.spool or tempfile.gettempdir())
    judge_disk(report, "buffer.spool", spool, SPOOL_VERSIONS * weights)
    if config.pool.ssd_gib:
        disk = Path(config.pool.ssd_path or tempfile.gettempdir())
        judge_disk(report, "pool.ssd_path", disk, int(config.pool.ssd_gib * 2**30))


def judge(report: Report, limits: Limits, need: Need) -> None:
    """Judge each limit by what is needed."""
    report.expect(
        limits.files >= LEAST_FILES, f"open files: {limits.files} allowed, {LEAST_FILES} needed",
        f"ulimit -n {LEAST_FILES}, or LimitNOFILE={LEAST_FILES} in the unit", files=limits.files,
    )  # fmt: skip
    shared = SHARED_BYTES_PER_RANK * need.ranks * need.instances if need.ranks > 1 else 0
    enough = limits.shared_bytes is None or limits.shared_bytes >= shared
    report.expect(
        enough, f"shared memory: {_gib(limits.shared_bytes)} free in /dev/shm, {_gib(shared)} needed",
        f"docker run --shm-size={-(-shared // 2**30)}g, or SEER_SHM_SIZE in compose/.env",
    )  # fmt: skip
    if need.locked_bytes:
        enough = limits.locked_bytes is None or limits.locked_bytes >= need.locked_bytes
        text = (
            f"locked memory for RDMA: {_gib(limits.locked_bytes)} allowed, {_gib(need.locked_bytes)} needed"
        )
        report.expect(enough, text, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit")
    enough = not limits.free_bytes or limits.free_bytes >= need.host_bytes
    each = f"{need.instances} engines of {need.ranks} ranks, {_gib(need.rank_bytes)} each"
    report.expect(
        enough, f"memory: {_gib(limits.free_bytes)} free, {_gib(need.host_bytes)} needed: {each}, the pool",
        "start fewer --instances, lower engine.kv_cache_gib or pool.dram_gib, or raise the container's limit",
    )  # fmt: skip
    if limits.strict_memory:
        report.prefer(False, "vm.overcommit_memory is 2: memory may be refused that is never touched",
                      "sysctl vm.overcommit_memory=0")  # fmt: skip
    cores = limits.cores if limits.quota is None else min(limits.cores, limits.quota)
    wanted = need.instances * need.ranks
    report.prefer(
        cores >= wanted, f"processors: {cores:g} may be used at once, {wanted} ranks want one each or more",
        "start fewer --instances, or give the container more CPUs", cores=cores,
    )  # fmt: skip


def judge_load(report: Report, load: float, cores: int) -> None:
    """Judge how busy the machine is, by the processes that ran in the last minute."""
    busy = load > cores
    text = f"other work on the machine: {load:.1f} processes ran on {cores} cores in the last minute"
    report.prefer(not busy, text, "run the doctor again while nothing else runs: it would be faster")


def judge_disk(report: Report, field: str, folder: Path, needed: int) -> None:
    """Judge the room in the folder of a setting; the nearest parent's, if it is yet to be made."""
    there = nearest_existing(folder)
    free = shutil.disk_usage(there).free
    text = f"disk for {field}: {_gib(free)} free in {there}, {_gib(needed)} needed"
    report.expect(free >= needed, text, f"set {field} to a folder with more room")


def _gib(size: int | None) -> str:
    return "no limit" if size is None else f"{size / 2**30:.2f} GiB"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _quota(text: str) -> float | None:
    """Return the CPUs that a container may use at once, by its `cpu.max`: "quota period", or "max period"."""
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
