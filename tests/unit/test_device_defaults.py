"""What a configuration that leaves it open gets, by devices, model and who else is on a device."""

import pytest

from seer.common.config import EngineConfig
from seer.common.policy.device_defaults import (
    EXACT_ATTENTION,
    Device,
    EngineDefaults,
    engine_defaults,
    exact_attention,
    uses_mla,
)

GIB = 2**30
DENSE = {"hidden_size": 64}
MLA = {"kv_lora_rank": 512}


def device(name="0", *, gib=80, free=None, model="NVIDIA H100", generation=9):
    return Device(
        name=name, model=model, total_bytes=gib * GIB, free_bytes=int((gib if free is None else free) * GIB),
        generation=generation,
    )  # fmt: skip


def test_without_devices_values_are_those_for_cpus():
    assert engine_defaults([], 1, MLA) == EngineDefaults(
        instances=2, sharing=1, max_num_seqs=64, max_num_batched_tokens=None, block_size=32,
        gpu_memory_utilization=0.9,
    )  # fmt: skip
    assert engine_defaults([], 2, DENSE, instances=5).instances == 5


@pytest.mark.parametrize(
    ("found", "seqs", "tokens"),
    [
        (device(), 1024, 16_384),
        (device(gib=141, model="NVIDIA H200"), 1024, 16_384),
        (device(gib=80, model="NVIDIA A100-SXM4-80GB"), 256, 8_192),
        (device(gib=24, model="NVIDIA L4", generation=8), 256, 8_192),
        (Device(name="MIG-1"), 256, 8_192),
    ],
)
def test_batches_are_as_large_as_the_device(found, seqs, tokens):
    default = engine_defaults([found], 1, DENSE)
    assert (default.max_num_seqs, default.max_num_batched_tokens) == (seqs, tokens)


def test_the_smallest_of_several_devices_counts():
    default = engine_defaults([device(), device("1", gib=24)], 2, DENSE)
    assert (default.instances, default.max_num_seqs) == (1, 256)


@pytest.mark.parametrize(
    ("count", "ranks", "asked", "instances", "sharing"),
    [
        (8, 1, None, 8, 1),
        (8, 2, None, 4, 1),
        (8, 3, None, 2, 1),
        (1, 2, None, 1, 2),
        (2, 1, 4, 4, 2),
        (2, 1, 3, 3, 2),
    ],
)
def test_instances_are_devices_divided_by_ranks(count, ranks, asked, instances, sharing):
    devices = [device(str(index)) for index in range(count)]
    default = engine_defaults(devices, ranks, DENSE, instances=asked)
    assert (default.instances, default.sharing) == (instances, sharing)


@pytest.mark.parametrize(
    ("free", "share"), [(80, 0.9), (76.1, 0.9), (75, 0.88), (40, 0.45), (20, 0.2), (4, 0.01), (0, 0.01)]
)
def test_beside_a_trainer_engines_take_what_it_leaves(free, share):
    found = device(free=free)
    alone = engine_defaults([found, device("1")], 2, DENSE)
    assert alone.gpu_memory_utilization == share
    assert engine_defaults([found], 1, DENSE, instances=2).gpu_memory_utilization == share / 2


@pytest.mark.parametrize("free", range(5, 81))
@pytest.mark.parametrize("instances", [1, 2, 3])
def test_engines_of_a_device_together_ask_for_no_more_than_is_free(free, instances):
    default = engine_defaults([device(free=free)], 1, DENSE, instances=instances)
    assert default.gpu_memory_utilization * instances * 80 <= free + 1e-9


@pytest.mark.parametrize(
    ("model", "generation", "backend", "size"),
    [
        (DENSE, 9, None, 32),
        (MLA, 8, None, 32),
        (MLA, 9, None, 64),
        (MLA, 10, None, 64),
        (MLA, 10, "CUTLASS_MLA", 128),
        ({"text_config": MLA}, 9, None, 64),
        ({"kv_lora_rank": None}, 9, None, 32),
        (MLA, 0, None, 32),
    ],
)
def test_blocks_are_of_the_size_that_attention_takes(model, generation, backend, size):
    found = engine_defaults([device(generation=generation)], 1, model, attention_backend=backend)
    assert found.block_size == size


def test_an_odd_description_is_no_model_with_latent_attention():
    assert not uses_mla({"text_config": None, "kv_lora_rank": 512})


@pytest.mark.parametrize(("model", "backend"), [
    ({"head_dim": 128, "hidden_size": 1024, "num_attention_heads": 16}, None),
    ({"hidden_size": 4096, "num_attention_heads": 32}, None),
    ({"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4}, EXACT_ATTENTION),
    ({"hidden_size": 2048, "num_attention_heads": 32}, EXACT_ATTENTION),
    ({"head_dim": 256, "text_config": {"head_dim": 128}}, None),
    ({"head_dim": 128, "text_config": {"head_dim": 256}}, EXACT_ATTENTION),
    ({"kv_lora_rank": 512, "head_dim": 64}, None),
    ({}, EXACT_ATTENTION),
    ({"hidden_size": "x", "num_attention_heads": 0}, EXACT_ATTENTION),
    ({"text_config": 3}, None),
])  # fmt: skip
def test_attention_is_exact_where_it_was_measured_or_by_construction(model, backend):
    assert exact_attention(model) == backend


def test_what_was_said_stays():
    default = engine_defaults([device()], 1, DENSE)
    assert default.unset(EngineConfig(max_num_seqs=1)) == {
        "max_num_batched_tokens": 16_384,
        "gpu_memory_utilization": 0.9,
    }
