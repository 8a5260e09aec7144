"""`seer status`: the state of a running system, and which services do not answer."""

from __future__ import annotations

import asyncio

import msgspec

from seer.cli.ping import greeted
from seer.client import RolloutClient
from seer.common.config import SecurityConfig
from seer.common.endpoints import shards
from seer.common.errors import SeerError, Unreachable
from seer.common.ids import new_incarnation
from seer.common.net.identity import Identity
from seer.common.net.keys import load_keys, name_under
from seer.common.pool_metrics import PoolFigures, ask_master, read_figures
from seer.common.process.log import printable
from seer.common.wire import ContextSnapshotReply, DgdsToEngine, InstanceStatus, Status
from seer.report.engine_use import draft_text, figures_text, pool_text, pool_used

CONNECT_SECONDS = 5.0
RATE_SECONDS = 1.0
"""Rates are computed from two answers this many seconds apart."""

_UNIONS = {"context": ContextSnapshotReply, "dgds": DgdsToEngine}


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One service; `error` is empty if it answered."""

    name: str
    endpoint: str
    uptime_seconds: float = 0.0
    error: str = ""


class SystemStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `seer status` shows. `rates` are per second; `buffer` is None if it does not answer.

    `pool` are the metrics of the KV pool's master; None if there is no pool, or it does not answer.
    """

    services: list[Service]
    buffer: Status | None = None
    rates: dict[str, float] = {}
    pool: PoolFigures | None = None


def show(endpoint: str, security: SecurityConfig, as_json: bool) -> int:
    """Print a system's state; return 1 if a service does not answer, or a pool has no memory."""
    seen = asyncio.run(_look(endpoint, security))
    print(msgspec.json.format(msgspec.json.encode(seen)).decode() if as_json else printable(_text(seen)))
    ownerless = seen.pool is not None and not seen.pool.owners
    return int(ownerless or any(service.error for service in seen.services))


async def _look(endpoint: str, security: SecurityConfig) -> SystemStatus:
    try:
        async with RolloutClient(endpoint, connect_seconds=CONNECT_SECONDS, security=security) as client:
            before = await client.status(CONNECT_SECONDS)
            known = [
                (name, each)
                for name, at in sorted(before.services.items())
                if name in _UNIONS
                for each in shards(at)
            ]
            others = asyncio.gather(*(_probe(name, at, security) for name, at in known))
            (pool, figures), services, _ = await asyncio.gather(
                _ask_pool(before.services.get("pool", "")), others, asyncio.sleep(RATE_SECONDS)
            )
            status = await client.status(CONNECT_SECONDS)
    except Unreachable as error:
        return SystemStatus(services=[Service(name="buffer", endpoint=endpoint, error=str(error))])
    buffer = Service(name="buffer", endpoint=endpoint, uptime_seconds=status.uptime_seconds)
    seconds = max(status.uptime_seconds - before.uptime_seconds, 1e-3)
    rates: dict[str, float] = {
        name: (status.counters[name] - before.counters.get(name, 0)) / seconds
        for name in ("tokens", "chunks")
        if name in status.counters
    }
    return SystemStatus(services=[buffer, *services, *pool], buffer=status, rates=rates, pool=figures)


async def _ask_pool(metrics: str) -> tuple[list[Service], PoolFigures | None]:
    if not metrics:
        return [], None
    try:
        figures = read_figures(await ask_master(metrics))
    except Unreachable as error:
        return [Service(name="pool", endpoint=metrics, error=str(error))], None
    return [Service(name="pool", endpoint=metrics)], figures


async def _probe(name: str, endpoint: str, security: SecurityConfig) -> Service:
    name_there = name_under(load_keys(security), "status")
    me = Identity(role="status", name=name_there, incarnation=new_incarnation())
    try:
        welcome = await greeted(endpoint, me, _UNIONS[name], CONNECT_SECONDS, security)
        return Service(name=name, endpoint=endpoint, uptime_seconds=welcome.uptime_seconds)
    except SeerError as error:
        return Service(name=name, endpoint=endpoint, error=str(error))


def _text(seen: SystemStatus) -> str:
    lines = [_service(service, seen.pool) for service in seen.services]
    status = seen.buffer
    if status is None:
        return "\n".join(lines)
    rates = ", ".join(f"{rate:.0f} {name}/s" for name, rate in seen.rates.items())
    lines += [
        f"policy {status.policy}: {status.rollouts} rollouts, {status.requests_running} requests running, "
        f"{status.requests_waiting} waiting, {rates}",
        f"weights version {status.weight_version} ({status.weights_digest or 'no digest'})",
    ]
    for instance in status.instances:
        stats = instance.stats
        lines += [_instance(instance), *([f"    {pool_text(stats)}"] if pool_used(stats) else [])]
        lines += [f"    {draft_text(stats)}"] if stats.verifications else []
    lines += [] if status.instances else ["no engines are registered"]
    lines += ["engines sleep: a trainer uses their memory"] if status.asleep else []
    lines += (
        ["DRAINING: it finishes what it began; the rest waits for its successor"] if status.draining else []
    )
    lines += [
        f"  {name} NOT WRITTEN for {each.seconds:.0f} s: {each.problem}"
        for name, each in sorted(status.unwritten.items())
    ]
    lines += [f"  {name}: QUARANTINED: {why}" for name, why in status.quarantined.items()]
    totals = ", ".join(f"{name} {count}" for name, count in status.counters.items())
    return "\n".join([*lines, f"totals: {totals}"])


def _service(service: Service, pool: PoolFigures | None) -> str:
    if service.error:
        return f"{service.name}: UNREACHABLE: {service.error}"
    if service.name == "pool" and pool is not None:
        return f"pool: {figures_text(pool)}"
    return f"{service.name}: up {service.uptime_seconds:.0f} s at {service.endpoint}"


def _instance(it: InstanceStatus) -> str:
    total, ranks = it.capacity.kv_blocks, it.capacity.parts
    of_ranks = ""
    if ranks > 1:
        dummies = it.stats.dummy_steps / max(1, ranks * it.stats.steps)
        of_ranks = f" on {ranks} ranks ({dummies:.0%} of their steps without a request)"
    return (
        f"  {it.name}: {it.chunks} chunks ({it.stats.running} running, {it.stats.waiting} waiting), "
        f"KV {total - it.stats.free_blocks}/{total} blocks used{of_ranks}, {it.reserved_blocks} reserved, "
        f"{it.stats.generated_tokens} tokens, {it.stats.preemptions} preemptions, {it.restarts} restarts"
    )
