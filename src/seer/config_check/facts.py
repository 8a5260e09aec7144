"""What is known of a cluster beside its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seer.common.config import Config
from seer.common.data_parallel import rank_weight_bytes
from seer.common.policy.device_defaults import Device, EngineDefaults, engine_defaults
from seer.common.process.memory_limit import Bound

MEAN_TOKENS = 16_384
"""Tokens of a response where nobody says: the paper's three workloads have 7,600 to 39,000 on average."""


@dataclass(frozen=True, slots=True)
class Facts:
    """`devices`: those of a node, all alike; none: its engines run on CPUs.

    `model`: its config.json, empty: unknown. `expert_bytes` of `weight_bytes` are experts', 0: unknown.
    `memory`: the limit of each role's process in bytes; a role that is missing or 0 is unknown. `room_bytes`:
    the room of the volume that has the buffer's folders, None: unknown. `elsewhere`: engines run on machines
    other than the buffer's.
    """

    engines: int
    devices: Sequence[Device] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    weight_bytes: int = 0
    expert_bytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    room_bytes: int | None = None
    mean_tokens: int = MEAN_TOKENS
    elsewhere: bool = False

    def defaults(self, config: Config) -> EngineDefaults:
        """Return what an engine takes where the configuration leaves it open, with a device for each rank."""
        ranks = self.ranks(config)
        devices = list(self.devices[:1]) * ranks
        return engine_defaults(
            devices, ranks, self.model, attention_backend=config.engine.vllm.attention_backend
        )

    def ranks(self, config: Config) -> int:
        """Return how many ranks an engine has on a machine."""
        engine = config.engine
        return max(1, engine.tensor_parallel // engine.nodes) * engine.vllm.data_parallel_size

    def weights_of_rank(self, config: Config) -> int:
        """Return the bytes of a rank's weights; 0: unknown, or no model runs."""
        engine = config.engine
        unknown = engine.vllm.data_parallel_size > 1 and not self.expert_bytes
        if unknown or engine.backend != "vllm":
            return 0
        return rank_weight_bytes(engine, self.weight_bytes, self.expert_bytes)

    def running(self, config: Config) -> int:
        """Return how many requests all engines run at once at most."""
        parts = self.engines * config.engine.vllm.data_parallel_size
        return parts * (config.engine.max_num_seqs or self.defaults(config).max_num_seqs)


def held(bound: Bound, limit: int) -> int:
    """Return a bound in its units, whether or not a process with this limit accepts it. 0: no limit known."""
    if bound.given is not None:
        return bound.given
    return min(bound.most, math.floor(limit * bound.share / bound.unit)) if limit else bound.most
