"""The ranks of an engine on a node other than its leader's: vLLM's workers, without a scheduler.

The leader's executor reaches these ranks as it reaches ranks on its own node: by vLLM's queues over TCP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from seer.common.config import Config
from seer.services.engine.nodes.same_settings import Meeting
from seer.services.engine.vllm import env, loading

if TYPE_CHECKING:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class VllmRanks:
    """The ranks of one node; `start` and `close` block."""

    def __init__(self, config: Config) -> None:
        drafts = config.drafts if config.drafts.source != "off" else None
        pool = config.pool if config.pool.kind == "mooncake" else None
        self._engine, self._shared, self._pool, self._drafts = config.engine, config.shared, pool, drafts
        self._executor: MultiprocExecutor | None = None

    def start(self, meeting: Meeting, ended: Callable[[], object]) -> None:
        """Load this node's ranks, once the ranks of all nodes have met. Raises `EngineError`.

        `ended` is called, on any thread, when one of them ends by itself.
        """
        engine = env.with_schedule(self._engine)
        env.prepare(engine, meeting)
        described = loading.model_config(self._shared)
        engine, shared = env.with_defaults(engine, self._shared, described)
        self._executor = loading.load_node(engine, shared, self._pool, self._drafts, meeting)
        self._executor.register_failure_callback(ended)  # at once if one has ended already

    def close(self) -> None:
        """End all; idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
