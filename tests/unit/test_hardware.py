"""How a machine is divided among engines."""

from __future__ import annotations

import os

import pytest

from seer.common.config import EngineConfig
from seer.common.errors import ConfigError, InvalidField
from seer.common.policy.device_defaults import Device
from seer.common.vllm_settings import VllmSettings
from seer.local.hardware import Hardware, plan_engines, share_cores

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
    ranked = EngineConfig(vllm=VllmSettings(data_parallel_size=2))
    first, second = plan_engines(ranked, 2, EIGHT)
    assert (first.config.cpu_cores, first.config.kv_cache_gib) == ("0,4|1,5", 0.4), "of each rank"


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
