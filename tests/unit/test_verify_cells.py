"""Which cells a verification has, what each runs, and what each must have done."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from letters import Letters
from msgspec.structs import fields

from seer.client.results import Group, Response
from seer.common.config import Config, EngineConfig, PoolConfig, SharedConfig
from seer.common.errors import InvalidField, SeerError
from seer.common.policy.device_defaults import Device
from seer.common.types import Capacity, InstanceStats, SamplingParams
from seer.common.vllm_settings import VllmSettings
from seer.common.wire import InstanceStatus, Progress
from seer.local import pool_plan
from seer.local.hardware import Hardware
from seer.verify import cell_run
from seer.verify.cell_run import _and_once, _final_status
from seer.verify.cells import CELLS, choose, scarce_pool_bytes, settled
from seer.verify.parameters import every_parameter

REFERENCE = CELLS["one-go"]
HERE = Hardware(cores=[0, 1], devices=[], free_bytes=0)
GPUS = ["synchronous"]
DENSE = ["dp-2", "pool-dp-2"]
RANKS = ["tp-2", "pool-tp-2", "drafts-tp-2"]
POOLS = ["pool-migrate", "pool-warm", "pool-ssd", "pool-tp-2", "pool-dp-2", "drafts"]
DRAFTS = ["drafts", "drafts-right", "drafts-sampling", "drafts-random", "drafts-late", "drafts-tp-2"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_plan, "import_problem", lambda: "")


def config(tmp_path: Path, heads: int = 4, **engine: object) -> Config:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads}))
    (tmp_path / "tokenizer.json").touch()
    return Config(shared=SharedConfig(model=str(tmp_path)), engine=EngineConfig(max_model_len=100, **engine))


def test_cells_are_made_for_the_blocks_that_the_devices_have(tmp_path: Path):
    hopper = Device(name="0", total_bytes=80 * 2**30, free_bytes=80 * 2**30, generation=9)
    base = config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, "kv_lora_rank": 16}))
    for devices, block in (([], 32), ([hopper], 64)):
        found = settled(base, Hardware(cores=[0], devices=devices, free_bytes=0))
        assert (found.shared.block_size, found.engine.max_num_seqs) == (block, 64)
    given = config(tmp_path, max_num_seqs=8)
    assert settled(given, HERE).engine.max_num_seqs == 8


def test_every_cell_can_be_had_on_two_cores(tmp_path: Path):
    cells, skipped = choose("", config(tmp_path), HERE)
    assert [cell.name for cell in cells] == [name for name in CELLS if name not in (*GPUS, *DENSE)]
    assert cells[0] is REFERENCE
    assert list(skipped) == [*GPUS, *DENSE]
    hopper = Device(name="0", total_bytes=80 * 2**30, free_bytes=80 * 2**30, generation=9)
    gpus = Hardware(cores=[0], devices=[hopper] * 2, free_bytes=0)
    assert list(choose("", config(tmp_path), gpus)[1]) == DENSE
    assert list(choose("", config(tmp_path, async_scheduling=False), gpus)[1]) == [*GPUS, *DENSE]


@pytest.mark.parametrize(
    ("engine", "machine", "why"),
    [
        ({}, HERE, ""),
        ({"tensor_parallel": 2}, HERE, "the reference has ranks itself"),
        ({"vllm": VllmSettings(data_parallel_size=2)}, HERE, "the reference has ranks itself"),
        ({"in_place_updates": True}, HERE, "in_place_updates"),
        ({"backend": "replay"}, HERE, "replay backend has no data parallelism"),
        ({}, Hardware(cores=[0], devices=[], free_bytes=0), "needs 2 cores"),
        ({}, Hardware(cores=[0, 1], devices=[Device(name="0")], free_bytes=0), "needs 2 devices"),
    ],
)
def test_data_parallel_ranks_are_of_mixtures(tmp_path: Path, engine: dict, machine: Hardware, why: str):
    base = config(tmp_path, **engine)
    assert "start more engines" in choose("", config(tmp_path), HERE)[1]["dp-2"]
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, "n_routed_experts": 8}))
    cells, skipped = choose("", base, machine)
    assert why in skipped.get("dp-2", "")
    assert ("dp-2" in [cell.name for cell in cells]) == (not why)
    made = CELLS["dp-2"].config(config(tmp_path)).engine.vllm
    assert (made.data_parallel_size, made.enable_expert_parallel) == (2, True)
    unmet = CELLS["dp-2"].unmet({"data_parallel": 2, "dummy_steps": 0, "chunks": 3, "responses": 1})
    assert unmet == ["dummy_steps > 0 (was 0)"]
    pooled = CELLS["pool-dp-2"].config(config(tmp_path), [320] * 64)
    assert (pooled.pool.kind, pooled.engine.vllm) == ("mooncake", made)
    whole = CELLS["pool-tp-2"].config(config(tmp_path), [320] * 64).engine
    assert 2 * pooled.engine.kv_blocks == whole.kv_blocks, "each rank has half"


@pytest.mark.parametrize(
    ("heads", "engine", "machine", "why"),
    [
        (3, {}, HERE, "3 attention heads"),
        (4, {"tensor_parallel": 2}, HERE, "2 ranks itself"),
        (4, {}, Hardware(cores=[0], devices=[], free_bytes=0), "needs 2 cores"),
        (4, {}, Hardware(cores=[0, 1], devices=[Device(name="0")], free_bytes=0), "needs 2 devices"),
    ],
)
def test_a_cell_that_cannot_run_is_left_out_with_a_reason(tmp_path, heads, engine, machine, why):
    base = config(tmp_path, heads, **engine)
    cells, skipped = choose("", base, machine)
    left_out = [*RANKS, *DENSE, *(() if machine.devices else GPUS)]
    assert [cell.name for cell in cells] == [name for name in CELLS if name not in left_out]
    assert sorted(skipped) == sorted(left_out)
    assert all(why in skipped[name] for name in RANKS)
    with pytest.raises(InvalidField, match="tp-2"):
        choose("chunk-1,tp-2", base, machine)


@pytest.mark.parametrize(
    ("backend", "kind", "problem", "why"),
    [
        ("vllm", "auto", "no libibverbs", r"Mooncake cannot be imported \(no libibverbs\)"),
        ("vllm", "none", "", r"pool\.kind = none"),
        ("replay", "auto", "", "replay backend has no KV"),
    ],
)
def test_cells_with_a_pool_need_mooncake_an_engine_with_kv_and_leave(
    tmp_path, monkeypatch, backend, kind, problem, why
):
    monkeypatch.setattr(pool_plan, "import_problem", lambda: problem)
    base = msgspec.structs.replace(config(tmp_path, backend=backend), pool=PoolConfig(kind=kind))
    cells, skipped = choose("", base, HERE)
    others = (
        {"tp-2", "sampling", "structured", *GPUS, *DRAFTS} - set(POOLS) if backend == "replay" else set(GPUS)
    ) | set(DENSE) - set(POOLS)
    assert [name for name in skipped if name not in others] == POOLS
    assert others <= set(skipped)
    assert not {cell.name for cell in cells} & set(POOLS)
    with pytest.raises(InvalidField, match=why):
        choose("chunk-1,pool-warm", base, HERE)


def test_only_cells_that_are_about_a_pool_have_one_and_it_is_their_own(tmp_path: Path):
    theirs = PoolConfig(kind="mooncake", master="192.0.2.1:7108", ssd_gib=9.0, protocol="rdma")
    base = msgspec.structs.replace(config(tmp_path), pool=theirs)
    pools = {name: cell.config(base, [60]).pool for name, cell in CELLS.items()}
    assert [name for name, pool in pools.items() if pool.kind == "mooncake"] == POOLS
    assert {pool.kind for pool in pools.values()} == {"mooncake", "none"}
    assert [name for name, pool in pools.items() if pool.ssd_gib] == ["pool-ssd"]
    for pool in pools.values():
        assert (pool.master, pool.metrics) == (PoolConfig().master, PoolConfig().metrics)
        assert (pool.pull_tokens, pool.protocol) == (0, "rdma")


def test_only_cells_that_are_about_drafts_draft(tmp_path: Path):
    configs = {name: cell.config(config(tmp_path), [60]) for name, cell in CELLS.items()}
    assert [name for name, its in configs.items() if its.drafts.source != "off"] == DRAFTS
    assert [name for name, its in configs.items() if its.dgds.remember_tokens] == [
        "drafts-right",
        "drafts-sampling",
        "drafts-late",
        "drafts-tp-2",
    ]


def test_text_is_constrained_only_where_the_model_has_a_tokenizer(tmp_path: Path):
    base = config(tmp_path)
    assert "structured" not in choose("", base, HERE)[1]
    (tmp_path / "tokenizer.json").unlink()
    assert "tokenizer.json" in choose("", base, HERE)[1]["structured"]


def test_every_sampling_parameter_meets_chunks_and_drafts():
    sampled = [cell for cell in CELLS.values() if cell.sampled == "every"]
    assert [cell.drafts for cell in sampled] == ["off", "grouped"]
    for cell in sampled:
        assert cell.buffer["chunk_size"] < 64
        assert {"text_stops", "id_stops"} <= {name for name, _, _ in cell.needs}


def test_a_pool_with_a_disk_has_memory_for_few_blocks(tmp_path: Path):
    base = config(tmp_path)
    described = {
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert scarce_pool_bytes(base) == 2**24  # nothing is known
    (tmp_path / "config.json").write_text(json.dumps({"text_config": described}))
    assert scarce_pool_bytes(base) == 128 * 32 * 144 * 2**10  # 144 KiB a token
    pool = CELLS["pool-ssd"].config(base, [60]).pool
    assert (pool.dram_gib, pool.ssd_gib) == (0.5625, 9.0)
    described = {"num_attention_heads": 4, "num_hidden_layers": 100, "hidden_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert scarce_pool_bytes(base) == 128 * 32 * 2 * 100 * 128 * 2


@pytest.mark.parametrize("names", ["chunk-7", "one-go", "chunk-1,,chunk-16"])
def test_a_matrix_that_compares_nothing_is_refused(tmp_path: Path, names: str):
    with pytest.raises(InvalidField, match="--matrix"):
        choose(names, config(tmp_path), HERE)


def test_scarce_memory_holds_a_longest_sequence_and_a_quarter_of_those_at_once(tmp_path: Path):
    base = config(tmp_path, max_num_seqs=8)
    assert CELLS["preempt"].config(base, [60] * 4).engine.kv_blocks == 4  # 101 slots of 32
    assert CELLS["preempt"].config(base, [60] * 20).engine.kv_blocks == 4
    assert CELLS["preempt"].config(base, [80] * 20).engine.kv_blocks == 6  # 8 sequences of 3 blocks
    assert REFERENCE.config(base).engine.kv_blocks is None


def test_needs_compare_counters_with_numbers_and_counters():
    counters = {"responses": 4, "chunks": 4, "preemptions": 0}
    assert REFERENCE.unmet(counters) == []
    assert CELLS["chunk-64"].unmet(counters) == ["chunks > responses (was 4)"]
    assert REFERENCE.unmet(counters | {"preemptions": 2}) == ["preemptions == 0 (was 2)"]


@pytest.mark.parametrize(
    ("cell", "idle"),
    [
        ("pool-migrate", "migrations"),
        ("pool-migrate", "pool_tokens"),
        ("pool-warm", "restarts"),
        ("pool-warm", "pool_tokens"),
        ("pool-ssd", "pool_ssd_reads"),
        ("pool-tp-2", "pool_tokens"),
        ("drafts", "accepted_tokens"),
        ("drafts-right", "accepted_tokens"),
        ("drafts-tp-2", "accepted_tokens"),
    ],
)
def test_a_pool_or_drafts_that_did_nothing_prove_nothing(cell: str, idle: str):
    names = ("migrations", "restarts", "pool_tokens", "pool_ssd_reads", "accepted_tokens")
    counters = dict.fromkeys(names, 1) | {"preemptions": 0, "tensor_parallel": 2, "drafted_tokens": 2}
    assert CELLS[cell].unmet(counters) == []
    assert CELLS[cell].unmet(counters | {idle: 0}) == [f"{idle} > 0 (was 0)"]


def test_an_engine_is_killed_once_when_half_of_the_tokens_are_there():
    shown, kills = [], []
    show = _and_once(shown.append, lambda: kills.append(len(shown)), 50)
    zeros = dict.fromkeys(Progress.__struct_fields__, 0) | {"rollout_id": "r", "finish_times": []}
    steps = [Progress(**zeros | {"tokens": tokens}) for tokens in (10, 49, 50, 80)]
    for step in steps:
        show(step)
    assert shown == steps
    assert kills == [3]


def told(generated: int, running: int = 0, restarts: int = 0) -> list[InstanceStatus]:
    room = Capacity(kv_blocks=1, block_size=32, max_num_seqs=1, max_model_len=32)
    stats = InstanceStats(generated_tokens=generated, running=running, pool_tokens=generated)
    return [
        InstanceStatus(name="e", capacity=room, stats=stats, chunks=0, reserved_blocks=0, restarts=restarts)
    ]


@pytest.mark.parametrize(
    ("reports", "last"),
    [
        ([told(60), told(100)], 100),
        ([told(0, restarts=1), told(30, running=1, restarts=1), told(40, restarts=1)], 40),
    ],
)
async def test_counters_are_the_last_ones_though_a_killed_engine_took_its_own_along(reports, last):
    """The engine that came back first reports that it did nothing: that is not the end."""

    class Client:
        async def status(self) -> SimpleNamespace:
            return SimpleNamespace(instances=reports.pop(0))

    (instance,) = await _final_status(Client(), 100)
    assert instance.stats.pool_tokens == last
    assert not reports


async def test_an_engine_that_is_gone_at_the_end_is_its_cell_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        async def status(self) -> SimpleNamespace:
            return SimpleNamespace(instances=[])

    monkeypatch.setattr(cell_run, "STATUS_WAIT_SECONDS", 0.0)
    with pytest.raises(SeerError, match="no engine is there"):
        await _final_status(Client(), 100)


def answered(*texts: str) -> list[Group]:
    responses = tuple(
        Response(
            i, np.array(Letters().encode(text), np.int32), np.zeros(len(text), np.float32), None, "length", ""
        )
        for i, text in enumerate(texts)
    )
    return [Group("a", np.zeros(3, np.int32), {}, 0, "", responses, 1, 0, 0)]


def test_the_cell_with_every_parameter_leaves_none_out_and_stops_where_responses_get():
    groups = answered(*("abcdefgh" * 3, "hgfedcba" * 3, "aabbccddxyz" + "e" * 13))
    plain = SamplingParams(max_tokens=24)
    found = every_parameter(plain, groups, Letters())
    found.check()
    same = {f.name for f in fields(plain) if getattr(found, f.name) == getattr(plain, f.name)}
    assert same == {
        "max_tokens",
        "temperature",
        "ignore_eos",
        "logprobs",
        "routed_experts_from",
        "top_logprobs",
        "prompt_logprobs",
        "structured_outputs",
        "receipt",
    }  # what decides how long, and what is shown
    assert 1 < found.min_tokens < 24
    texts = [Letters().decode(each.token_ids)[found.min_tokens :] for each in groups[0].responses]
    assert [len(stop) for stop in found.stop] == [1, 2, 3]
    for stop in (*found.stop, Letters().decode(found.stop_token_ids)):
        assert 0 < sum(stop in text for text in texts) < 3
    given = SamplingParams(max_tokens=24, top_k=7, stop=("q",), min_tokens=2, frequency_penalty=-1.0)
    kept = every_parameter(given, groups, Letters())
    assert (kept.top_k, kept.stop, kept.min_tokens, kept.frequency_penalty) == (7, ("q",), 2, -1.0)
    assert every_parameter(plain, groups, None).stop == ()
