"""How long after a token is sampled on one engine another engine can draft it: p50 and p99, in ms.

Buffer, context and dgds are processes; two engines run in this one, real servers on threads of their
own, over a backend that takes a fixed time per step and notes when tokens are made and when siblings'
tokens are fed. So it includes the steps of both, and all sockets, but no model. Prints JSON.

    python bench/drafts/freshness.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lib.hardware import machine

from seer.client import RolloutClient, SamplingParams
from seer.common.clock import LoopClock
from seer.common.config import Config, load
from seer.common.net.transport.zmq import ZmqTransport
from seer.local.child import Child
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import StepOutput
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.server import EngineServer

GROUPS, SIZE, TOKENS = 4, 8, 600
WARM = 100
"""First tokens of each response that do not count: connections open, queues fill."""


class Timed(ReplayBackend):
    """Notes, by group and response, when each token was made here; and how old the fed ones are."""

    def __init__(self, config: Config, made: dict[tuple[str, int], list[float]], ages: list[float]) -> None:
        super().__init__(config.engine, config.shared)
        self._made, self._ages = made, ages

    def step(self) -> StepOutput:
        """Take the time that the settings give a step."""
        out = super().step()
        time.sleep(out.seconds)
        for generated in out.generated:
            group_id, _, index = generated.request_id.rpartition("#")
            times = self._made.setdefault((group_id, int(index)), [])
            times += [time.perf_counter()] * len(generated.token_ids)
        return out

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """Note how long ago these tokens were made."""
        now = time.perf_counter()
        for delta in deltas:
            made = self._made[delta.group_id, delta.index]
            first = max(delta.previous, WARM)
            self._ages += [now - at for at in made[first : delta.previous + len(delta.tokens)]]


async def measure(step_seconds: float) -> dict[str, Any]:
    """Run one rollout with steps that long; return ages in milliseconds."""
    made: dict[tuple[str, int], list[float]] = {}
    ages: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = ("trainers", "engines", "events", "event_snapshots", "estimates", "estimate_snapshots", "dgds")
        settings = [f"endpoints.{way}=ipc://{folder}/{way}" for way in ways]
        settings += ["buffer.chunk_size=100000", "engine.replay.row_seconds=0"]
        settings += [f"engine.replay.step_seconds={step_seconds}"]
        config = load(None, {}, settings)
        names = ("buffer", "context", "dgds")
        children = [await Child.spawn(one, one, config, {}, folder, logged=True) for one in names]
        transports = [ZmqTransport() for _ in range(2)]
        tasks = []
        try:
            for child in children:
                await child.ready(60)
            for number, transport in enumerate(transports):
                mine = load(None, {}, [*settings, f"engine.name=e{number}"])
                server = EngineServer(mine, transport, LoopClock(), Timed(mine, made, ages))
                await server.start()
                tasks.append(asyncio.create_task(server.run()))
            async with RolloutClient(config.endpoints.trainers) as client:
                sampling = SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, ignore_eos=True)
                prompts = [[1, 2, 3 + group] for group in range(GROUPS)]
                await (await client.submit(prompts, n=SIZE, sampling=sampling)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for transport in transports:
                await transport.close()
            for child in children:
                child.kill_group()
                await child.gone(10)
    cuts = statistics.quantiles(ages, n=100)
    found = {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}
    return {"step_ms": step_seconds * 1e3, "tokens": len(ages)} | {
        key: round(value, 1) for key, value in found.items()
    }


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    report = {"machine": machine(), "runs": [asyncio.run(measure(step)) for step in (0.005, 0.02)]}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
