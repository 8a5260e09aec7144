"""Rollouts whose processes are in network namespaces, where pairs of them are cut off from each other.

Invariants: those of `stops`, and both ways of a cut are tried alone, too: then a connection lives, as the
kernel at one end sees it, while nothing comes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chaos.network import Network
from chaos.stops import Trial, trial
from chaos.system import System, replay

PAIRS = (
    ("buffer", "engine-0"),
    ("buffer", "engine-1"),
    ("buffer", "context"),
    ("buffer", "trainer"),
    ("dgds", "engine-0"),
    ("dgds", "engine-1"),
)
"""Those that talk to each other."""

WAYS = ("both", "there", "back")
"""What is dropped between the first and the second of a pair: everything, or what one of them sends."""

CUT_SECONDS = 30.0

POOR = {"delay": 0.05, "loss": 0.01}
"""A poor network: seconds one way, and the share of packets lost."""


async def cuts(
    pair: tuple[str, str], ways: Sequence[str] = WAYS, seconds: float = CUT_SECONDS, **network: float
) -> list[Trial]:
    """Cut a pair off each other in each of these ways, one after the other, on one system."""
    first, second = pair
    net = Network(**network)
    try:
        async with System(replay(), net=net) as system:
            trials = []
            for number, way in enumerate(ways):

                async def cut(system: System, way: str = way) -> None:
                    if way in ("both", "there"):
                        net.cut(first, second)
                    if way in ("both", "back"):
                        net.cut(second, first)

                async def heal(system: System) -> None:
                    net.heal()

                what = f"cut {first} - {second} ({way})"
                trials.append(await trial(system, number, what, seconds, cut, heal))
        trials[-1].problems += [f"left over: {what}" for what in system.leftovers()]
    finally:
        net.close()
    return trials


async def matrix(pairs: Sequence[tuple[str, str]] = PAIRS, **network: float) -> list[Trial]:
    """Cut all of these pairs, each of its own system, in all ways."""
    found = await asyncio.gather(*(cuts(pair, **network) for pair in pairs))
    return [each for trials in found for each in trials]
