"""Every setting of a configuration: who reads it, its value, and where the value comes from. Pure.

Invariants (tests/unit/test_config_check.py):
- each setting is there once, but those of the replay backend where that is not used;
- a value that follows from memory, devices or the model is the one that the process computes by itself from
  the same facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from seer.common.config import Config
from seer.common.process.memory_bounds import buffer_bounds, dgds_bounds
from seer.common.process.memory_limit import Bound
from seer.common.tables import settings, toml_value
from seer.config_check.facts import Facts, held

ROLES = {
    "shared": "all", "endpoints": "all", "security": "all", "log": "all", "buffer": "buffer",
    "context": "context", "dgds": "dgds", "engine": "engine", "drafts": "engine", "pool": "engine, pool",
    "gateway": "gateway",
}  # fmt: skip
"""Who reads a section. The context service also reads buffer.policy, the gateway buffer.update_seconds."""

VLLMS = "vLLM's own"

LEFT_OPEN = {
    "buffer.chunk_size": "a 64th of a response's max_tokens, at least 256",
    "engine.kv_blocks": "as many as fit",
    "engine.kv_cache_gib": "a share of free memory, on CPUs",
    "engine.max_num_batched_tokens": VLLMS,
    "engine.max_model_len": "the model's own limit",
    "engine.async_scheduling": "on GPUs",
    "drafts.max_paths": "as many as pay",
    "pool.dram_gib": "a share of free memory",
    "pool.pull_tokens": "as many as take less time to compute",
}
"""What a setting without a value comes to; those of `engine.vllm` are vLLM's own."""


class Row(NamedTuple):
    """One setting. `value` is as TOML has it, or a text in brackets where it has none."""

    role: str
    key: str
    value: str
    source: str


def rows(config: Config, sources: Mapping[str, str], facts: Facts) -> list[Row]:
    """Return all settings. `sources`: those of `load_with_sources`."""
    derived = dict(_derived(config, facts))
    found = []
    for key, value in settings(msgspec.to_builtins(config)):
        if key.startswith("engine.replay.") and config.engine.backend != "replay":
            continue
        source = sources.get(key, "default")
        if value is None and key in derived:
            value, source = derived[key]
        section = key.partition(".")[0]
        found.append(Row(ROLES[section], key, _shown(key, value), source))
    return sorted(found, key=lambda row: list(ROLES.values()).index(row.role))


def rank_text(config: Config, facts: Facts) -> str:
    """Return what each data-parallel rank of an engine has."""
    engine, weights = config.engine, facts.weights_of_rank(config)
    parts = ["weights of unknown size"]
    if weights:
        whole = gib(facts.weight_bytes - facts.expert_bytes)
        parts = [f"weights of {gib(weights)} ({whole} as every other, and its part of the experts)"]
    if engine.kv_blocks is not None:
        parts.append(f"{number(engine.kv_blocks)} KV blocks")
    elif facts.devices and weights:
        share = engine.gpu_memory_utilization or facts.defaults(config).gpu_memory_utilization
        parts.append(
            f"KV in what {share:.0%} of a GPU leaves: "
            f"{gib(max(0, facts.devices[0].total_bytes * share - weights))}"
        )
    elif engine.kv_cache_gib is not None:
        parts.append(f"KV of {engine.kv_cache_gib:g} GiB")
    parts.append(f"{number(engine.max_num_seqs or facts.defaults(config).max_num_seqs)} requests at once")
    if not facts.devices:
        parts.append(f"cores {engine.cpu_cores}" if engine.cpu_cores else "an equal share of the cores")
    if config.pool.kind != "none":
        parts.append(f"{config.pool.staging_mib} MiB between KV and the pool")
    ranks = engine.vllm.data_parallel_size
    return f"each of an engine's {ranks} data-parallel ranks: {', '.join(parts)}"


def number(value: float) -> str:
    """Return a number as TOML has it, with its thousands apart."""
    return f"{value:_}" if isinstance(value, int) else f"{value:g}"


def gib(size: float) -> str:
    """Return a size as people read it."""
    if size < 2**30:
        return f"{size / 2**20:.0f} MiB"
    return f"{size / 2**30:.3g} GiB" if size < 1000 * 2**30 else f"{size / 2**30:,.0f} GiB"


def _shown(key: str, value: object) -> str:
    if value is None:
        return f"({LEFT_OPEN.get(key, VLLMS)})"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return toml_value(value)


def _derived(config: Config, facts: Facts) -> Iterator[tuple[str, tuple[object, str]]]:
    for role, bounds in (("buffer", buffer_bounds(config.buffer)), ("dgds", dgds_bounds(config.dgds))):
        limit = facts.memory.get(role, 0)
        for each in bounds:
            yield each.key, (held(each, limit), _of_memory(each, limit))
    defaults = facts.defaults(config)
    where = f"default: {_device(facts)}"
    yield "shared.block_size", (defaults.block_size, where)
    if config.engine.backend == "vllm":
        for name, value in defaults.unset(config.engine).items():
            if value is not None and (facts.devices or name != "gpu_memory_utilization"):
                yield f"engine.{name}", (value, where)


def _of_memory(bound: Bound, limit: int) -> str:
    if held(bound, limit) == bound.most:
        return "default where memory abounds"
    return f"default: {bound.share:.0%} of {gib(limit)} of memory"


def _device(facts: Facts) -> str:
    if not facts.devices:
        return "on CPUs"
    device = facts.devices[0]
    return f"on {device.model or 'a GPU'} of {gib(device.total_bytes)}"
