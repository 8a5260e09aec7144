"""Which engines may have data-parallel ranks, and how each rank is made.

vLLM 0.32 runs data-parallel ranks of mixtures alone: those of a dense model have nothing in common, and are
engines of their own here.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator

from msgspec.structs import replace

from seer.common.config import Config
from seer.common.errors import ConfigError
from seer.common.policy.device_defaults import has_experts
from seer.services.engine.backend import Backend
from seer.services.engine.nodes.same_settings import Meeting
from seer.services.engine.ranked import RankedBackend
from seer.services.engine.vllm import env, loading
from seer.services.engine.vllm.backend import VllmBackend

NAME = "engine.vllm.data_parallel_size"


def vllm_backend(config: Config, meeting: Meeting | None) -> Backend:
    """Return the backend of an engine, with data-parallel ranks if it has some; see `ranked_backend`."""
    if config.engine.vllm.data_parallel_size > 1:
        return ranked_backend(config)
    return VllmBackend(config.engine, config.shared, config.pool, config.drafts, meeting)


def ranked_backend(config: Config) -> RankedBackend:
    """Return the backend of an engine with data-parallel ranks.

    Raises `ConfigError`, or `EngineError` without a model folder.
    """
    ranks = config.engine.vllm.data_parallel_size
    for problem in _problems(config):
        raise ConfigError(f"{NAME} = {ranks}: {problem}")
    cores = (config.engine.cpu_cores or env.share_cores(ranks)).split("|")
    if len(cores) not in (1, ranks):
        raise ConfigError(f"engine.cpu_cores = {config.engine.cpu_cores!r}: give {ranks} parts, as 0-3|4-7")
    each = cores if len(cores) == ranks else [""] * ranks  # not bound
    return RankedBackend(functools.partial(_rank, config, tuple(each)), ranks, config.engine.load_seconds)


def _problems(config: Config) -> Iterator[str]:
    """Yield what was not proved with data-parallel ranks, and what to set."""
    engine = config.engine
    if not has_experts(loading.model_config(config.shared)):
        yield "ranks share the experts of a mixture, and this model has none: start more engines"
    if engine.nodes > 1 or engine.tensor_parallel > 1:
        yield "its ranks are of one device each, on one machine: set engine.tensor_parallel and nodes to 1"
    if engine.in_place_updates:
        yield "weights in place do not reach its ranks: set engine.in_place_updates = false"
    if config.pool.kind == "mooncake":
        yield "its ranks share no KV pool: set pool.kind = 'none'"


def _rank(config: Config, cores: tuple[str, ...], rank: int, port: int) -> VllmBackend:
    engine = replace(config.engine, cpu_cores=cores[rank])
    # All ranks measure step times, or none: what one alone has kept would leave the others waiting.
    drafts = replace(config.drafts, cache=tempfile.mkdtemp(prefix="seer-steps-"))
    place = env.RankPlace(rank, len(cores), port)
    return VllmBackend(engine, config.shared, config.pool, drafts, place=place)
