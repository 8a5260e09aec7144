"""Which engines may have data-parallel ranks, and how each rank is made.

vLLM 0.32 runs data-parallel ranks of mixtures alone: those of a dense model have nothing in common, and are
engines of their own here.
"""

from __future__ import annotations

import functools
import tempfile

from msgspec.structs import replace

from seer.common.config import Config
from seer.common.data_parallel import refusals
from seer.common.errors import ConfigError
from seer.services.engine.backend import Backend
from seer.services.engine.nodes.same_settings import Meeting
from seer.services.engine.ranked import RankedBackend
from seer.services.engine.vllm import env, loading
from seer.services.engine.vllm.backend import VllmBackend


class VllmRank(VllmBackend):
    """One of several ranks: `RankBackend`."""

    @property
    def wanted_drafts(self) -> int:
        """See `RankBackend.wanted_drafts`."""
        return self._drafting.wanted if self._drafting is not None else 0

    def agree(self, drafts: int) -> None:
        """See `RankBackend.agree`."""
        if self._drafting is not None:
            self._drafting.agreed = drafts


def vllm_backend(config: Config, meeting: Meeting | None) -> Backend:
    """Return the backend of an engine, with data-parallel ranks if it has some; see `ranked_backend`."""
    if config.engine.vllm.data_parallel_size > 1:
        return ranked_backend(config)
    return VllmBackend(config.engine, config.shared, config.pool, config.drafts, meeting)


def ranked_backend(config: Config) -> RankedBackend:
    """Return the backend of an engine with data-parallel ranks.

    Raises `ConfigError`, or `EngineError` without a model folder.
    """
    for what, now, wanted, why in refusals(config.engine, loading.model_config(config.shared)):
        raise ConfigError(f"{what} = {now}: {why}: set {wanted}")
    ranks = config.engine.vllm.data_parallel_size
    cores = (config.engine.cpu_cores or env.share_cores(ranks)).split("|")
    each = cores if len(cores) == ranks else [""] * ranks  # not bound
    return RankedBackend(functools.partial(_rank, config, tuple(each)), ranks, config.engine.load_seconds)


def _rank(config: Config, cores: tuple[str, ...], rank: int, port: int) -> VllmRank:
    engine = replace(config.engine, cpu_cores=cores[rank])
    # All ranks measure step times, or none: what one alone has kept would leave the others waiting.
    drafts = replace(config.drafts, cache=tempfile.mkdtemp(prefix="seer-steps-"))
    place = env.RankPlace(rank, len(cores), port)
    return VllmRank(engine, config.shared, config.pool, drafts, place=place)
