"""`seer status`: what a running system does."""

from __future__ import annotations

import asyncio

import msgspec

from seer.client import RolloutClient
from seer.common.wire.messages import Status

CONNECT_SECONDS = 5.0


def show(endpoint: str, as_json: bool) -> None:
    """Print a buffer's status. Raises `Unreachable` when it does not answer."""
    status = asyncio.run(_ask(endpoint))
    print(msgspec.json.format(msgspec.json.encode(status)).decode() if as_json else _text(status))


async def _ask(endpoint: str) -> Status:
    async with RolloutClient(endpoint, connect_seconds=CONNECT_SECONDS) as client:
        return await client.status(CONNECT_SECONDS)


def _text(status: Status) -> str:
    lines = [
        f"policy {status.policy}: {status.rollouts} rollouts, "
        f"{status.requests_running} requests running, {status.requests_waiting} waiting"
    ]
    lines += [
        f"  {it.name}: {it.chunks} chunks, {it.reserved_blocks}/{it.capacity.kv_blocks} KV blocks reserved, "
        f"{it.stats.generated_tokens} tokens, {it.stats.preemptions} preemptions"
        for it in status.instances
    ]
    totals = ", ".join(f"{name} {count}" for name, count in status.counters.items())
    return "\n".join([*lines, f"totals: {totals}"] if totals else lines)
