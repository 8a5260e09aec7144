"""vLLM's MooncakeStoreConnector over our guarded store.

Invariants:
- vLLM's connector decides how KV is keyed, copied, looked up and loaded; `GuardedStore` talks to Mooncake;
- no request waits for the pool: if a load fails, its KV is computed (`kv_load_failure_policy`), and while a
  look-up is not ready, other requests go first;
- KV, also of generated tokens, is saved at the end of a chunk whose response continues, or may in another
  turn (`tokens_to_save`), all at once: vLLM's connector would save block by block, at a round trip each, also
  for responses that have finished;
- KV is loaded, and so saved, only if it covers more than `pull_tokens`: as configured, or as `FetchChoice`
  finds from steps and loads.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.request import RequestStatus

from seer.common.config import PoolConfig
from seer.common.policy.fetch_choice import NEVER, FetchChoice
from seer.common.process.log import get_logger
from seer.common.weights.mooncake import own_address
from seer.services.engine.vllm.kv_pool import vllm_patches
from seer.services.engine.vllm.kv_pool.block_copies import KvRegions
from seer.services.engine.vllm.kv_pool.connect import open_store
from seer.services.engine.vllm.kv_pool.guarded_store import GuardedStore, StoreSettings
from seer.services.engine.vllm.kv_pool.sharing import tokens_to_save
from seer.services.engine.vllm.kv_pool.unreachable_store import CALL_SECONDS
from seer.services.engine.vllm.requests import EXTRA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

SETTINGS, LOOKUP, PULL_TOKENS = "seer_settings", "seer_lookup", "seer_pull_tokens"
"""Keys of ours in vLLM's `kv_connector_extra_config`."""

MAX_STEPS = 4
"""More steps than vLLM has under way at once."""

_log = get_logger()


class SeerStoreConnector(MooncakeStoreConnector):
    """See the module's docstring. Named in vLLM's configuration by `transfer_config`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._pull_tokens: int | None = extra[PULL_TOKENS]
        self.choice, self._computes_all = FetchChoice(), False
        self._loads: dict[str, tuple[int, float]] = {}  # by request: tokens, and when they were ordered
        self._steps: deque[tuple[SchedulerOutput, float]] = deque(maxlen=MAX_STEPS)
        self._step_ended = 0.0
        settings = msgspec.convert(extra[SETTINGS], StoreSettings)
        with vllm_patches.patched(lambda: GuardedStore(settings, open_store), extra[LOOKUP]):
            super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:  # it only loads: we decide what to save
            self.connector_scheduler.kv_role = "kv_consumer"
            self.connector_scheduler.save_decode_cache = False

    @property
    def store(self) -> GuardedStore:
        """The store of this worker's rank."""
        store: GuardedStore = self.connector_worker.store
        return store

    @property
    def pull_tokens(self) -> int:
        """Up to so many missing tokens are computed."""
        return self.choice.pull_tokens(time.monotonic()) if self._pull_tokens is None else self._pull_tokens

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens the pool has beyond those computed; None until the look-up is done."""
        pull_tokens = self.pull_tokens
        # What asks for logprobs of its prompt computes all of it.
        if request.skip_reading_prefix_cache or request.num_tokens - num_computed_tokens <= pull_tokens:
            return 0, False
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is not None and 0 < found <= pull_tokens:
            self.connector_scheduler.load_specs.pop(request.request_id)
            return 0, False
        return found, later

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order a load, and note when."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            now = time.monotonic()
            self._loads[request.request_id] = num_external_tokens, now
            self.choice.order(now)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See vLLM's; a step begins."""
        self._steps.append((scheduler_output, time.monotonic()))
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See vLLM's; measure loads that came, unless some failed: which is not known of each."""
        super().update_connector_output(connector_output)
        now, failed = time.monotonic(), connector_output.invalid_block_ids or connector_output.failed_recving
        for name in connector_output.finished_recving or ():
            load = self._loads.pop(name, None)
            if load is not None and failed:
                self.choice.lost()
            elif load is not None:
                self.choice.load(load[0], now - load[1], now)
        if self._computes_all != (self.pull_tokens == NEVER):
            self._computes_all = not self._computes_all
            how = "computed, as fetching it takes longer" if self._computes_all else "fetched again"
            _log.info(f"KV that is missing is {how}")

    def take_events(self) -> Iterable[KVCacheEvent]:
        """See vLLM's, which calls it at the end of each step; measure that step."""
        now = time.monotonic()
        if self._steps:  # with asynchronous scheduling, the next one has begun, too
            step, begun = self._steps.popleft()
            seconds = now - max(begun, self._step_ended)
            self.choice.step(step.num_scheduled_tokens, step.scheduled_spec_decode_tokens, seconds)
        self._step_ended = now
        events: Iterable[KVCacheEvent] = super().take_events()
        return events

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Save the KV of a chunk whose response continues; its blocks are pinned until they are copied."""
        if self._loads.pop(request.request_id, None) is not None:  # it was dropped while it waited
            self.choice.lost()
        tokens = tokens_to_save(
            request.sampling_params.extra_args[EXTRA],
            at_limit=request.status == RequestStatus.FINISHED_LENGTH_CAPPED,
            at_stop=request.status == RequestStatus.FINISHED_STOPPED,
            computed=request.num_computed_tokens,
            known=request.num_tokens,
            block_size=self.connector_scheduler._block_size,
        )
        if tokens > self.pull_tokens:
            self._save(request, block_ids, tokens)
        return False, None

    def _save(self, request: Request, block_ids: tuple[list[int], ...], tokens: int) -> None:
        """Queue a save for the next step, as `register_finished_partial_tail` does for Mamba states."""
        scheduler = self.connector_scheduler
        job, scheduler._next_store_job_id = scheduler._next_store_job_id, scheduler._next_store_job_id + 1
        groups = tuple(block_ids[group].copy() for group in scheduler._store_group_ids)
        pinned = list(dict.fromkeys(block for group in groups for block in group if block != NULL_BLOCK_ID))
        blocks = scheduler._gpu_block_pool
        blocks.touch([blocks.blocks[block] for block in pinned])
        scheduler._pinned_saves[job] = (pinned, scheduler._num_workers)
        scheduler._finished_partial_tail_metas[request.request_id] = ReqMeta(
            req_id=request.request_id,
            token_len_chunk=tokens,
            block_ids=groups,
            block_hashes=list(request.block_hashes),
            can_save=True,
            store_job_id=job,
            num_prompt_tokens=request.num_prompt_tokens,
            prefill_end_tokens=tokens,
            completed_token_len=tokens,
        )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note the KV memory, with the addresses that vLLM's connector uses."""
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        layout = worker.token_dbs[0].store_layout
        flat = {}
        for cache in kv_caches.values():
            storage = cache.untyped_storage()
            flat[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
        self._regions = [
            (start, _blocks(flat, start, size, worker.num_blocks))
            for start, size in zip(layout.kv_caches_base_addr, layout.block_len, strict=True)
        ]
        self.store.key_prefixes = tuple(db.store_layout._key_prefix for db in worker.token_dbs)

    def begin(self, beside: torch.Tensor | None) -> None:
        """Give the store the KV memory, and what is kept `beside` it, bytes [blocks, bytes of a block]."""
        size = sum(memory.shape[1] for _, memory in self._regions)
        extra = 0 if beside is None else beside.shape[1]
        self.store.attach(KvRegions(self._regions, beside), size + extra)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Order loads; they write no block before work that the model's stream has now is done."""
        if self._get_connector_metadata().requests:
            self.store.loads_ordered()
        super().start_load_kv(forward_context, **kwargs)

    def reset_cache(self) -> bool:
        """Do nothing: a new namespace does the same, and other engines use this pool, too."""
        return True


def _blocks(flat: dict[int, torch.Tensor], start: int, size: int, blocks: int) -> torch.Tensor:
    """Return the bytes [blocks, size] at an address of KV memory."""
    base = max(address for address in flat if address <= start)
    return flat[base].as_strided((blocks, size), (size, 1), start - base)


def transfer_config(pool: PoolConfig) -> dict[str, Any]:
    """Return the fields of vLLM's `KVTransferConfig` for an engine that uses the pool."""
    settings = StoreSettings(
        master=pool.master,
        host=pool.host or own_address(pool.master),
        protocol=pool.protocol,
        device=pool.device,
        lease_seconds=pool.lease_seconds,
        call_seconds=CALL_SECONDS,
        staging_mib=pool.staging_mib,
    )
    return {
        "kv_connector": SeerStoreConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "save_decode_cache": True,
            "lookup_async": True,
            SETTINGS: msgspec.to_builtins(settings),
            PULL_TOKENS: pool.pull_tokens,
            # An abstract socket (Linux) leaves no file behind.
            LOOKUP: f"ipc://@seer-kv-lookup-{os.getpid()}",
        },
    }
