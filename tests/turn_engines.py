"""Engines in processes of their own, which share a KV pool and run what a test gives them: no buffer places chunks.

Invariant: when a call returns, the pool has all that its engine has saved.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ahead import scheduling_ahead
from engine_cases import Response, run

from seer.common.config import DraftsConfig, EngineConfig, PoolConfig, SharedConfig
from seer.common.types import InstanceStats
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.drafts.draft_script import DraftScript
from seer.services.engine.vllm.kv_pool import unreachable_store

CALL_SECONDS = 240.0
"""Bound on what a test waits for."""


class EngineProcess:
    """An engine on one core; `ready` waits until it is loaded. One that schedules `ahead` has no drafts."""

    def __init__(self, model: Path, pool: PoolConfig, profiles: Path, core: int, ahead: bool = False) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(theirs, str(model), pool, str(profiles), core, ahead)
        )
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        self._answer()

    def run(self, chunks: list[Chunk]) -> dict[str, Response]:
        """Run chunks at once to their ends."""
        return self._call("run", chunks)

    def script_drafts(self, script: DraftScript | None) -> None:
        """See `Probe.script_drafts`."""
        self._call("script_drafts", script)

    def empty(self) -> None:
        """Forget all KV of this engine."""
        self._call("empty")

    def bind_weights(self, digest: str) -> None:
        """See `Backend.bind_weights`."""
        self._call("bind_weights", digest)

    def stats(self) -> InstanceStats:
        return self._call("stats")

    def saves(self) -> list[tuple[int, int, int]]:
        """Return and forget what was saved: how many tokens, of how many, and how many vLLM had computed."""
        return self._call("saves")

    def blocks_to_remove(self) -> int:
        """Return and forget how many blocks are to be removed from the pool, as nobody needs them."""
        return self._call("blocks_to_remove")

    def close(self) -> None:
        self._connection.close()
        self._process.join(20)
        self._process.kill()

    def _call(self, name: str, *arguments: object) -> Any:
        self._connection.send((name, arguments))
        return self._answer()

    def _answer(self) -> Any:
        assert self._connection.poll(CALL_SECONDS), "the engine does not answer"
        problem, answer = self._connection.recv()
        assert not problem, problem
        return answer


class _Served:
    def __init__(self, model: str, pool: PoolConfig, profiles: str, core: int, ahead: bool) -> None:
        from seer.services.engine.vllm.backend import VllmBackend

        unreachable_store.CALL_SECONDS = 20.0  # on cores with others a call is no miss for being slow

        config = EngineConfig(
            kv_blocks=300, max_num_seqs=16, max_model_len=600, cpu_cores=str(core), async_scheduling=ahead
        )
        drafts = None if ahead else DraftsConfig(max_draft=5, cache=profiles)
        self._has_drafts = not ahead
        self._backend = VllmBackend(config, SharedConfig(model=model), pool, drafts)
        self._backend.start()
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._pool_calls = get_kv_transfer_group().store._calls
        self._saves: list[tuple[int, int, int]] = []
        connector = self._backend.core.engine_core.scheduler.connector
        save = connector._save

        def noted(request: Any, blocks: Any, tokens: int) -> None:
            self._saves.append((tokens, request.num_tokens, request.num_computed_tokens))
            save(request, blocks, tokens)

        connector._save = noted

    def run(self, chunks: list[Chunk]) -> dict[str, Response]:
        responses = dict(run(self._backend, chunks))
        self._pool_calls._writes.submit(lambda: None).result(CALL_SECONDS)
        return responses

    def script_drafts(self, script: DraftScript | None) -> None:
        if self._has_drafts:
            self._backend.probe.script_drafts(script)

    def empty(self) -> None:
        self._backend.core.reset_prefix_cache()

    def bind_weights(self, digest: str) -> None:
        self._backend.bind_weights(digest)

    def stats(self) -> InstanceStats:
        return self._backend.stats()

    def saves(self) -> list[tuple[int, int, int]]:
        saves, self._saves[:] = list(self._saves), []
        return saves

    def blocks_to_remove(self) -> int:
        noted = len(self._backend._sharing._to_remove)
        self._backend._sharing._to_remove = []
        return noted


def _serve(
    connection: Connection, model: str, pool: PoolConfig, profiles: str, core: int, ahead: bool
) -> None:
    try:
        with scheduling_ahead() if ahead else contextlib.nullcontext():
            served = _Served(model, pool, profiles, core, ahead)
            connection.send(("", None))
            while True:
                name, arguments = connection.recv()
                connection.send(("", getattr(served, name)(*arguments)))
    except EOFError:
        os._exit(0)  # vLLM's threads would be waited for
    except BaseException:
        connection.send((traceback.format_exc(), None))
        raise
