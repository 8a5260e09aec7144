"""What is known of a cluster beside its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seer.common.config import Config
from seer.common.policy.device_defaults import Device, EngineDefaults, engine_defaults
from seer.common.process.memory_limit import Bound

MEAN_TOKENS = 16_384
"""Tokens of a response where nobody says: the paper's three workloads have 7,600 to 39,000 on average."""


@dataclass(frozen=True, slots=True)
class Facts:
    """`devices`: those of a node, all alike; none: its engines run on CPUs.

    `model`: its config.json, empty: unknown. `memory`: the limit of each role's process in bytes; a role that
    is missing or 0 is unknown. `room_bytes`: the room of the volume that has the buffer's folders, None:
    unknown. `elsewhere`: engines run on machines other than the buffer's.
    """

    engines: int
    devices: Sequence[Device] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    weight_bytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    room_bytes: int | None = None
    mean_tokens: int = MEAN_TOKENS
    elsewhere: bool = False

    def defaults(self, config: Config) -> EngineDefaults:
        """Return what an engine takes where the configuration leaves it open, with a device for each rank."""
        ranks = max(1, config.engine.tensor_parallel // config.engine.nodes)
        devices = list(self.devices[:1]) * ranks
        return engine_defaults(
            devices, ranks, self.model, attention_backend=config.engine.vllm.attention_backend
        )

    def running(self, config: Config) -> int:
        """Return how many requests all engines run at once at most."""
        return self.engines * (config.engine.max_num_seqs or self.defaults(config).max_num_seqs)


def held(bound: Bound, limit: int) -> int:
    """Return a bound in its units, whether or not a process with this limit accepts it. 0: no limit known."""
    if bound.given is not None:
        return bound.given
    return min(bound.most, math.floor(limit * bound.share / bound.unit)) if limit else bound.most
