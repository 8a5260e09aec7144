"""Which engines share KV through the pool, what they save there, and for how long.

Invariants:
- engines find each other's KV only if everything that it depends on is equal: weight bytes, the model's
  configuration, types, block size, attention backend and its layout, tensor-parallel ranks, whether kernels
  are batch-invariant, the draft head if there is one, and the versions that hash blocks; and if both keep
  expert ids beside it, or neither;
- KV is saved of responses that go on in another chunk, or may in another turn, and of tokens that they have;
- blocks that only a finished response could use are removed soon after it ends.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from seer.common.weights.digest import digest_of_folder
from seer.services.engine.vllm.drafts.head_config import MTP, head_folder
from seer.services.engine.vllm.requests import ExtraArgs

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

FORGET_BLOCKS = 256
"""Blocks of finished responses are removed this many at a time."""

COUNT_SECONDS = 0.5
"""How often counters are fetched from all ranks: not at every step."""

Rpc = Callable[..., list[Any]]


def tokens_to_save(
    extra: ExtraArgs, *, at_limit: bool, at_stop: bool, computed: int, known: int, block_size: int
) -> int:
    """Return of how many tokens, in full blocks, to save the KV of a request that ended; 0 for none.

    It has `known` tokens, and KV of `computed` ones. These are more where right drafts followed a stop: vLLM
    drops such tokens, but goes on counting their KV.
    """
    goes_on = (at_limit and extra.continues) or (at_stop and extra.parks)
    return min(computed, known) // block_size * block_size if goes_on else 0


class KvSharing:
    """One engine's namespace in the pool; `rpc(method, **arguments)` calls every rank's `SeerWorker`."""

    def __init__(self, rpc: Rpc, model: Path, config: VllmConfig, *, routed_experts: bool = False) -> None:
        import vllm.envs  # only now: its environment is prepared before it is imported

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
            # They hash blocks: all engines must compute the same keys.
            "versions": [vllm.__version__, *platform.python_version_tuple()[:2]],
            "batch_invariant": bool(vllm.envs.VLLM_BATCH_INVARIANT),  # else KV may differ in last bits
            "routed_experts": routed_experts,
            "hash": config.cache_config.prefix_caching_hash_algo,
        }
        head = head_folder(config)
        if head is not None:  # its KV lies in the same blocks
            own = (
                MTP if head == model else [digest_of_folder(head, tag=""), (head / "config.json").read_text()]
            )
            self._facts["head"] = own
        self._to_remove: list[str] = []
        self._counts: dict[str, int] = {}
        self._counted_at = 0.0

    def bind(self, digest: str) -> None:
        """Share KV with engines whose weights have this digest, from now on; empty: with none."""
        self._to_remove.clear()
        facts = msgspec.json.encode({**self._facts, "weights": digest})
        namespace = "seer-" + hashlib.blake2b(facts, digest_size=16).hexdigest() if digest else ""
        self._rpc("seer_use_pool_namespace", namespace=namespace)

    def finished(self, request: Request, prompt_blocks: int, saved_blocks: int) -> None:
        """Have a finished response's blocks removed, but not the prompt's, which other responses may need.

        Its first `saved_blocks` may be in the pool, saved by earlier chunks.
        """
        self._to_remove += [digest.hex() for digest in request.block_hashes[prompt_blocks:saved_blocks]]
        if len(self._to_remove) >= FORGET_BLOCKS:
            self.flush()

    def flush(self) -> None:
        """Remove all noted blocks."""
        if self._to_remove:
            self._rpc("seer_remove_from_pool", hashes=self._to_remove)
            self._to_remove = []

    def counts(self) -> dict[str, int]:
        """Return the sums of all ranks' counters; `away`: how many ranks do not use the pool now."""
        if time.monotonic() - self._counted_at > COUNT_SECONDS:
            self._counted_at = time.monotonic()
            ranks: list[dict[str, int]] = self._rpc("seer_pool_counts")
            names = {name for counts in ranks for name in counts}
            self._counts = {name: sum(counts.get(name, 0) for counts in ranks) for name in names}
        return self._counts
