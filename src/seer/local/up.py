"""`seer up`: a whole system in the foreground."""

from __future__ import annotations

import asyncio
import signal
import sys

from msgspec.structs import asdict

from seer.common.config import Config
from seer.local.system import LocalSystem, run


def serve(config: Config, instances: int | None) -> None:
    """Run until SIGINT or SIGTERM. Raises `LaunchError` when the system cannot start or go on."""
    run(_serve(config, instances))


async def _serve(config: Config, instances: int | None) -> None:
    stop = asyncio.Event()
    task = asyncio.current_task()

    def caught() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    async with LocalSystem(config, instances, private=False, drain=True, say=_say) as system:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, caught)
        for name, endpoint in asdict(system.config.endpoints).items():
            if endpoint:
                print(f"{name} = {endpoint}", flush=True)
        _say(f"ready: trainers connect to {system.endpoint}; Ctrl-C drains")
        await system.run(stop.wait())
        _say("draining; Ctrl-C again stops at once")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
