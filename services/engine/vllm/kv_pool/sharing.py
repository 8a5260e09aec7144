"""What one engine shares with others through the pool: under which name, and for how long.

Invariants:
- engines find each other's KV only if all that it follows from is equal: weight bytes, the model's
  configuration, types, block size, attention backend and its layout, tensor-parallel ranks, and the
  versions that hash blocks;
- blocks that a finished response alone could use are removed soon after it ends.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

FORGET_BLOCKS = 256
"""Blocks of finished responses that are removed together."""

COUNT_SECONDS = 0.5
"""Counters are asked of all ranks this often, not at every step."""

Rpc = Callable[..., list[Any]]


class Sharing:
    """Use `rpc(method, **arguments)` to reach every rank's `SeerWorker`."""

    def __init__(self, rpc: Rpc, model: Path, config: VllmConfig) -> None:
        import vllm  # only now: its environment is prepared before it is imported

        self._rpc = rpc
        self._facts = {
            "config": (model / "config.json").read_text(),
            "dtype": str(config.model_config.dtype),
            "kv_dtype": str(config.cache_config.cache_dtype),
            "block_size": config.cache_config.block_size,
            "ranks": [
                config.parallel_config.tensor_parallel_size,
                config.parallel_config.pipeline_parallel_size,
            ],
            "layout": sorted({text for texts in rpc("seer_kv_layout") for text in texts}),
            # These hash blocks: they must come to the same keys.
            "versions": [vllm.__version__, *platform.python_version_tuple()[:2]],
            "hash": config.cache_config.prefix_caching_hash_algo,
        }
        self._forgotten: list[str] = []
        self._counts: dict[str, int] = {}
        self._counted_at = 0.0

    def bind(self, digest: str) -> None:
        """Share with engines that have the weights of this digest; what was shared before is dropped."""
        self._forgotten.clear()
        facts = msgspec.json.encode({**self._facts, "weights": digest})
        namespace = "seer-" + hashlib.blake2b(facts, digest_size=16).hexdigest() if digest else ""
        self._rpc("seer_pool_use", namespace=namespace)

    def finished(self, request: Request, prompt_blocks: int, saved_blocks: int) -> None:
        """Note that nobody needs a response's blocks any more; those of its prompt, others may.

        `saved_blocks` of it are what chunks before this one may have saved.
        """
        self._forgotten += [digest.hex() for digest in request.block_hashes[prompt_blocks:saved_blocks]]
        if len(self._forgotten) >= FORGET_BLOCKS:
            self.flush()

    def flush(self) -> None:
        """Remove what is noted."""
        if self._forgotten:
            self._rpc("seer_pool_forget", hashes=self._forgotten)
            self._forgotten = []

    def counts(self) -> dict[str, int]:
        """Return all ranks' counters, added up; `away` is how many of them leave the pool alone."""
        if time.monotonic() - self._counted_at > COUNT_SECONDS:
            self._counted_at = time.monotonic()
            ranks: list[dict[str, int]] = self._rpc("seer_pool_counts")
            names = {name for counts in ranks for name in counts}
            self._counts = {name: sum(counts.get(name, 0) for counts in ranks) for name in names}
        return self._counts
