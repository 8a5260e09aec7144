"""How weights get to the engines, also when the trainer was killed while it brought them there."""

from __future__ import annotations

import asyncio
import time

from learner import Learner

from seer.client import RolloutClient, WeightsLive, WeightsRefused

PATIENCE_SECONDS = 90.0
"""Longest wait for an update under way. One whose trainer died in the middle is given up after 30 s."""


async def bring(client: RolloutClient, learner: Learner, iteration: int) -> WeightsLive:
    """Bring the weights to the engines; another trainer's update, or a killed one's, comes first."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        version = max(iteration, (await client.status()).weight_version) + 1
        try:
            return await client.update_weights(version, learner.weights())
        except WeightsRefused as error:
            if error.reasons.keys() != {""} or time.monotonic() > until:  # an engine's reason stays
                raise
        await asyncio.sleep(1)
