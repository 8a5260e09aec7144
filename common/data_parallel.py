"""What an engine with data-parallel ranks refuses, and what each of its ranks holds. Pure.

Invariant: an engine refuses at its start what `refusals` yields of data-parallel ranks, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from seer.common.config import EngineConfig
from seer.common.policy.device_defaults import has_experts

EXPERTS = ".experts."
"""Part of the names of tensors that are divided among data-parallel ranks; each rank has all others whole."""


class Refusal(NamedTuple):
    """A setting `what` that must be `wanted` instead of `now`."""

    what: str
    now: str
    wanted: str
    why: str


def refusals(engine: EngineConfig, model: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield what data-parallel ranks do not work with; `model`: its config.json, empty: unknown."""
    ranks = engine.vllm.data_parallel_size
    if ranks == 1:
        return
    if model and not has_experts(model):
        why = "ranks share the experts of a mixture, and this model has none: start more engines"
        yield Refusal("engine.vllm.data_parallel_size", f"{ranks}", "1", why)
    for name in ("tensor_parallel", "nodes"):
        if (now := getattr(engine, name)) > 1:
            yield Refusal(
                f"engine.{name}", f"{now}", "1", "data-parallel ranks have a device each, on one machine"
            )
    if engine.in_place_updates:
        why = "weights in place do not reach data-parallel ranks"
        yield Refusal("engine.in_place_updates", "true", "false", why)
    parts = engine.cpu_cores.count("|") + 1
    if parts not in (1, ranks):
        why = "data-parallel ranks have cores of their own"
        yield Refusal("engine.cpu_cores", repr(engine.cpu_cores), f"{ranks} parts, as 0-3|4-7", why)


def one_rank(engine: EngineConfig) -> EngineConfig:
    """Return an engine of one rank that has all experts, and the cores of all ranks."""
    cores = engine.cpu_cores.replace("|", ",") if engine.tensor_parallel == 1 else engine.cpu_cores
    return replace(engine, cpu_cores=cores, vllm=replace(engine.vllm, data_parallel_size=1))


def rank_weight_bytes(engine: EngineConfig, weights: int, experts: int) -> int:
    """Return the bytes that a rank of any kind has of `weights`, of which `experts` are the experts'."""
    dense = (weights - experts) // engine.tensor_parallel
    return dense + experts // (engine.tensor_parallel * engine.vllm.data_parallel_size)
