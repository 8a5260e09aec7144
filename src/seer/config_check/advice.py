"""What a cluster of some size should change in its configuration, and why. Pure.

Invariants (tests/unit/test_config_check.py):
- a configuration that takes the advice gets none on the same matter;
- advice names what is now, what should be, and the figures it follows from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from seer.common.config import Config, Endpoints
from seer.common.data_parallel import refusals
from seer.common.endpoints import is_local, shards
from seer.common.errors import ConfigError
from seer.common.policy.device_defaults import MEMORY_SHARE
from seer.common.policy.schedule import POLICIES
from seer.common.process.memory_bounds import buffer_bounds, dgds_bounds
from seer.common.process.memory_limit import MOST, Bound, bounds
from seer.config_check.facts import Facts, held
from seer.config_check.settings import gib, number
from seer.services.buffer.log.log_folder import KEPT_BYTES
from seer.services.buffer.log.writer import LONGEST_IN_FILE
from seer.services.buffer.response_store import TOKEN_BYTES

REQUESTS_PER_SLOT = 2
"""Unfinished requests for each that runs: where one ends, another should be there to begin."""

DRAFT_TOKENS = 1900
"""Tokens of each running request that dgds should have room for, as by default with 256 engines of 1,024."""

VERSIONS = 2
"""Versions of the weights in the spool: the live ones, and those that a trainer streams."""

LOG_BYTES = KEPT_BYTES + LONGEST_IN_FILE
"""A log has its earlier files, and the one that is being written."""

KV_SHARE = 0.25
"""Least share of a GPU's memory, of what an engine takes of it, that weights should leave to KV."""

GPU_HOST_BYTES, CPU_RANK_BYTES = 8 * 2**30, 4 * 2**30
"""Host memory of an engine beside weights and KV: on GPUs all its ranks of a machine, on CPUs each rank."""


class Advice(NamedTuple):
    """Set `what`, a setting or what the machine gives, from `now` to `wanted`."""

    what: str
    now: str
    wanted: str
    why: str


def advice(config: Config, sources: Mapping[str, str], facts: Facts) -> list[Advice]:
    """Return what should change. `sources`: those of `load_with_sources`."""
    return [
        *_names(config),
        *_addresses(config, facts),
        *_requests(config, sources, facts),
        *_buffer_memory(config, facts),
        *_dgds(config, facts),
        *_ranks(config, facts),
        *_gpu_memory(config, facts),
        *_engine_memory(config, facts),
        *_disk(config, facts),
    ]


def _names(config: Config) -> Iterator[Advice]:
    policy = config.buffer.policy
    if policy not in POLICIES:
        yield Advice("buffer.policy", policy, f"one of {', '.join(POLICIES)}", "there is no such policy")
    count, shard = len(shards(config.endpoints.dgds)), config.dgds.shard
    if shard >= count:
        yield Advice(
            "dgds.shard", number(shard), f"0 to {count - 1}", f"endpoints.dgds names {count}; count from 0"
        )


def _addresses(config: Config, facts: Facts) -> Iterator[Advice]:
    if not facts.elsewhere:
        return
    for name in ("trainers", "engines", "dgds"):
        address = getattr(config.endpoints, name)
        if any(each.startswith("ipc:") or is_local(each) for each in shards(address)):
            head = getattr(Endpoints(), name).replace("127.0.0.1", "HEAD")
            why = "engines and trainers on other machines cannot reach a loopback address"
            yield Advice(f"endpoints.{name}", address, head, why)


def _requests(config: Config, sources: Mapping[str, str], facts: Facts) -> Iterator[Advice]:
    running, most = facts.running(config), config.buffer.max_requests
    at_once = f"{facts.engines:,} engines run {running:,} requests at once"
    if most < REQUESTS_PER_SLOT * running:
        why = f"{at_once}, and others should wait for their places; each takes 1.5 KB of the buffer"
        yield Advice("buffer.max_requests", number(most), number(REQUESTS_PER_SLOT * running), why)
    gateway = config.gateway
    if (
        any(key.startswith("gateway.") for key in sources)
        and gateway.workers * gateway.max_requests < running
    ):
        workers = math.ceil(running / gateway.max_requests)
        why = f"{at_once}, and each process of the gateway has {gateway.max_requests:,} open"
        yield Advice("gateway.workers", number(gateway.workers), number(workers), why)


def _buffer_memory(config: Config, facts: Facts) -> Iterator[Advice]:
    limit = facts.memory.get("buffer", 0)
    wanted = buffer_bounds(config.buffer)
    unfinished, results = (held(each, limit) for each in wanted)
    running, needed = facts.running(config), _unfinished_bytes(config, facts)
    if unfinished < needed:
        why = (
            f"{running:,} running requests of {facts.mean_tokens:,} tokens take {TOKEN_BYTES} bytes a token; "
            "beyond the bound the youngest prompts fail"
        )
        yield Advice("buffer.unfinished_bytes", number(unfinished), number(needed), why)
        if limit and needed + results > MOST * limit:
            least = math.ceil((needed + results) / MOST / 2**30) * 2**30
            why = f"buffer.unfinished_bytes and buffer.result_bytes take at most {MOST:.0%} of it"
            yield Advice("memory of the buffer", gib(limit), gib(least), why)
    else:
        yield from _refused("the buffer", wanted, limit)


def _unfinished_bytes(config: Config, facts: Facts) -> int:
    """Return what the output of all running requests takes, in whole GiB."""
    return math.ceil(facts.running(config) * facts.mean_tokens * TOKEN_BYTES / 2**30) * 2**30


def _dgds(config: Config, facts: Facts) -> Iterator[Advice]:
    limit = facts.memory.get("dgds", 0)
    wanted = dgds_bounds(config.dgds)
    yield from _refused("a dgds", wanted, limit)
    count, each = len(shards(config.endpoints.dgds)), held(wanted[0], limit)
    running = facts.running(config)
    needed = math.ceil(running * DRAFT_TOKENS / max(1, each))
    if config.drafts.source == "grouped" and count < needed:
        why = (
            f"drafts of {running:,} running requests use about {DRAFT_TOKENS:,} tokens each, and a dgds has "
            f"room for {each:,} (dgds.max_tokens); each more is an address in endpoints.dgds and a process"
        )
        yield Advice("dgds, by endpoints.dgds", number(count), number(needed), why)


def _ranks(config: Config, facts: Facts) -> Iterator[Advice]:
    if config.engine.backend == "vllm":
        yield from (Advice(*each) for each in refusals(config.engine, facts.model))


def _gpu_memory(config: Config, facts: Facts) -> Iterator[Advice]:
    engine, weights = config.engine, facts.weights_of_rank(config)
    if not weights or not facts.devices or not (gpu := facts.devices[0].total_bytes):
        return
    share = engine.gpu_memory_utilization or MEMORY_SHARE
    room = gpu * share * (1 - KV_SHARE)
    if weights <= room:
        return
    why = (
        f"weights of {gib(facts.weight_bytes)} on GPUs of {gib(gpu)}, of which an engine takes {share:.0%} "
        f"and KV should have {KV_SHARE:.0%} of that"
    )
    if engine.vllm.data_parallel_size == 1:
        ranks = 2 ** math.ceil(math.log2(facts.weight_bytes / room))
        yield Advice("engine.tensor_parallel", number(engine.tensor_parallel), number(ranks), why)
        return
    whole = facts.weight_bytes - facts.expert_bytes
    why += f"; each data-parallel rank has {gib(whole)} of them whole"
    if whole < room:
        ranks = 2 ** math.ceil(math.log2(facts.expert_bytes / (room - whole)))
        now = number(engine.vllm.data_parallel_size)
        yield Advice("engine.vllm.data_parallel_size", now, number(ranks), why)
    else:
        yield Advice("memory of a GPU", gib(gpu), f"more than {gib(whole / share / (1 - KV_SHARE))}", why)


def _engine_memory(config: Config, facts: Facts) -> Iterator[Advice]:
    weights, limit = facts.weights_of_rank(config), facts.memory.get("engine", 0)
    if not weights or not limit:
        return
    ranks = facts.ranks(config)
    if facts.devices:
        needed, why = GPU_HOST_BYTES + ranks * weights, "one copy of its weights while it sleeps, and 8 GiB"
    else:
        kv = int((config.engine.kv_cache_gib or 0) * 2**30)
        needed = ranks * (2 * weights + kv + CPU_RANK_BYTES)
        why = "of each rank its weights twice, KV, and 4 GiB"
    if limit < needed:
        yield Advice("memory of an engine", gib(limit), gib(math.ceil(needed / 2**30) * 2**30), why)


def _disk(config: Config, facts: Facts) -> Iterator[Advice]:
    """Judge the room of the volume with the buffer's folders, as if all of them were on one."""
    if facts.room_bytes is None:
        return
    buffer, limit = config.buffer, facts.memory.get("buffer", 0)
    parts = {f"{VERSIONS} versions of the weights": VERSIONS * facts.weight_bytes}
    if buffer.log:
        parts["the log"] = LOG_BYTES
    if buffer.log and buffer.keep_chunks:
        unfinished, results = (held(each, limit) for each in buffer_bounds(buffer))
        parts["kept chunks"] = max(unfinished, _unfinished_bytes(config, facts)) + results
    if buffer.images:
        parts["images"] = buffer.image_bytes
    needed = sum(parts.values())
    if facts.room_bytes < needed:
        why = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        where = buffer.spool or "the temporary folder, which buffer.spool replaces"
        yield Advice(f"disk of the buffer ({where})", gib(facts.room_bytes), gib(needed), why)


def _refused(who: str, wanted: Sequence[Bound], limit: int) -> Iterator[Advice]:
    try:
        bounds(wanted, limit)
    except ConfigError as error:
        yield Advice(f"memory of {who}", gib(limit), "more, or lower bounds", f"it would not start: {error}")
