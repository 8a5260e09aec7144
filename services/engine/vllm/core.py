"""vLLM's engine core, in this process: its requests, its KV blocks, its workers.

Invariants:
- workers are reached by `collective_rpc` alone, so that any number of tensor-parallel ranks does the same;
- in the engine process, vLLM's private attributes are used here, in `loading`, `kv_account`, `decode_*`,
  `drafts/scratch_blocks` and `kv_pool` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from seer.common.config import DraftsConfig, SharedConfig
from seer.common.detokenizer import Detokenizer
from seer.common.errors import EngineBroken, EngineError
from seer.common.image_models import ImageModel
from seer.common.policy.draft_paths import path_rows
from seer.common.process.log import get_logger
from seer.common.process.memory_limit import free_bytes
from seer.common.sleep import SleepLevel, SleepState
from seer.common.types import Capacity
from seer.services.engine.nodes.same_settings import Meeting
from seer.services.engine.nodes.shares import NotRun
from seer.services.engine.vllm.drafts.scratch_blocks import take_scratch_blocks
from seer.services.engine.vllm.kv_account import KvAccount
from seer.services.engine.vllm.loading import MAX_VLLM_TEXT, eos_ids
from seer.services.engine.vllm.requests import EXTRA

WHOLE_CONTEXT = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's kinds of KV of which a request keeps all blocks until its end."""

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from seer.services.engine.backend import Routes


LAID_OUT_ROOM = 4
"""Free memory, in sizes of a model, to lay one out: that takes up to two, and other engines do so, too."""

MAX_NOT_RUN = 3
"""Proofs in a row that may fail to run, as for want of memory, before no other one is tried."""

KEPT_PROOFS = 2
"""An update may have the tensors of a draft head, or lack them."""

USED = "used"
"""In place of the digest of what is laid out: it is live now, and what was live before takes its memory."""

_log = get_logger()


class CoreHandle:
    """A loaded engine core; call `describe` before anything but `close`.

    `scratch`: ids of KV blocks for verifying several draft paths. `eos_ids` end a response. `detokenizer` is
    None for a model folder without tokenizer.json. Token ids below `plain_tokens` stand for no image, so that
    prompts can be made up of them. `kv` and `encoder` are the accounts of KV blocks and of images.
    """

    def __init__(self, client: InprocClient, rpc_seconds: float, meeting: Meeting | None = None) -> None:
        self._client: InprocClient | None = client
        self._rpc_seconds, self._meeting = rpc_seconds, meeting or Meeting("")
        self.scratch: list[int] = []
        self.held_length: int | None = None
        self._length_now = self._length_next = (
            0  # of drafts that the next step verifies, and of those after it
        )
        self._laid_out = self._laying_out = ""  # digests of the weights that are laid out, or are being
        self.head_behind = 0  # updates since the one that the draft head is of

    def describe(
        self, shared: SharedConfig, drafts: DraftsConfig | None, images: ImageModel | None = None
    ) -> None:
        """Take scratch blocks, then read what the engine can hold. Raises `EngineError`.

        `images`: what images are to the model, if the model takes images and they can run here.
        """
        from vllm.tokenizers import cached_tokenizer_from_config

        from seer.services.engine.vllm.grammars import Grammars

        size = self.vllm_config.cache_config.block_size
        self.scratch = take_scratch_blocks(self.engine_core, drafts, size)
        config = self.vllm_config
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.plain_tokens = min(self.vocab_size, images.placeholder) if images else self.vocab_size
        tokenizer = cached_tokenizer_from_config(config.model_config)
        self.eos_ids = eos_ids(config, tokenizer)
        known = getattr(tokenizer, "backend_tokenizer", None) is not None
        self.detokenizer = Detokenizer.of(tokenizer) if known else None
        scheduler = self.engine_core.scheduler
        grammars = Grammars(config)
        self.engine_core.structured_output_manager = scheduler.structured_output_manager = grammars
        self.kv = KvAccount(
            scheduler.kv_cache_manager, scheduler.kv_cache_config, config.cache_config.block_size
        )
        if config.device_config.device_type == "cpu":
            self.kv.zero_new(scheduler)
        self.encoder = EncoderAccount(scheduler)
        self.capacity = Capacity(
            kv_blocks=self.kv.blocks,
            block_size=config.cache_config.block_size,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            draft_tokens=drafts.max_draft if drafts else 0,
            image_tokens=self.encoder.most if images else 0,
        )
        if self.capacity.block_size != shared.block_size:
            raise EngineError(
                f"shared.block_size = {shared.block_size}: vLLM uses {self.capacity.block_size} for this "
                "model on this device; set that"
            )

    def install(self, max_draft: int, *, routed_experts: bool) -> None:
        """Put our parts into the workers, and have them keep expert ids. Raises `EngineError`."""
        scheduler = self.engine_core.scheduler
        if routed_experts:
            scheduler.kept_group = _whole_context_group(scheduler.kv_cache_config)
        self.rpc("seer_install", max_draft=max_draft, scratch=self.scratch, kept_group=scheduler.kept_group)

    @property
    def engine_core(self) -> EngineCore:
        """The engine core itself. Raises `EngineError` after `close`."""
        return self._engine.engine_core

    @property
    def vllm_config(self) -> VllmConfig:
        """The configuration of vLLM, with all defaults resolved."""
        return self.engine_core.vllm_config

    @property
    def versions(self) -> dict[str, str]:
        """Names and versions of what generates, for reports."""
        import torch
        import vllm.envs

        config = self.vllm_config
        return {
            "engine": f"vllm {vllm.__version__}",
            "torch": str(torch.__version__),  # a TorchVersion otherwise
            "device": config.device_config.device_type,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "tensor_parallel": str(config.parallel_config.tensor_parallel_size),
            "batch_invariant": "yes" if vllm.envs.VLLM_BATCH_INVARIANT else "no",
            "scheduling": "asynchronous" if self.ahead else "synchronous",
        }

    def rpc(self, method: str, *, loads: int = 1, **arguments: object) -> list[Any]:
        """Call a method of `SeerWorker` on every rank; return their answers in rank order.

        The deadline is that of so many `loads`. Raises `EngineError` if it failed on one of several ranks,
        `EngineBroken` if one is late; what a rank alone raises is raised here.
        """
        call, seconds = self._engine.collective_rpc, loads * self._rpc_seconds
        if self.vllm_config.parallel_config.world_size == 1:
            return list(call(method, timeout=seconds, kwargs=arguments))
        try:
            found = call("seer_try", timeout=seconds, kwargs={"method": method, "arguments": arguments})
        except TimeoutError as error:  # vLLM would take late answers for those of the next call
            limit = f"{seconds:g} s (engine.load_seconds = {self._rpc_seconds:g})"
            why = f"ranks of this engine did not end {method} within {limit}: it ends, and starts again"
            raise EngineBroken(why) from error
        for _, problem in found:
            if problem:
                raise EngineError(problem)
        return [answer for answer, _ in found]

    def send(self, method: str, **arguments: object) -> Future[Any]:
        """Do as `rpc`, without waiting: what is called later comes after it. Have few open at once."""
        executor = self.engine_core.model_executor
        sent: Future[Any] = executor.collective_rpc(
            method, timeout=self._rpc_seconds, kwargs=arguments, non_block=True
        )
        return sent

    # --- requests ------------------------------------------------------------------------

    def request_of(self, described: EngineCoreRequest) -> Request:
        """Return the scheduler's form of a request, with its block hashes."""
        request, _ = self.engine_core.preprocess_add_request(described)
        return request

    def add(self, request: Request, *, routes: bool = False) -> None:
        """Have a request scheduled from the next step on; `routes`: its expert ids will be read."""
        if routes:
            self.engine_core.scheduler.last_blocks[request.request_id] = []
        self.engine_core.add_request(request)

    def routes(self, engine_id: str, first: int, end: int) -> Routes | None:
        """Return the expert ids of an ended request's tokens from `first` to `end`, before the next step.

        None if it ended while it was preempted, as it may where vLLM schedules ahead: it had no block then.
        """
        blocks = self.engine_core.scheduler.last_blocks.pop(engine_id)
        if len(blocks) * self.capacity.block_size < end:
            return None
        found: Routes = self.rpc("seer_read_routes", blocks=blocks, first=first, end=end)[0]
        return found

    def forget_routes(self, engine_id: str) -> None:
        """Do not read a request's expert ids any more."""
        self.engine_core.scheduler.last_blocks.pop(engine_id, None)

    def abort(self, engine_id: str) -> None:
        """End a request; its blocks are free at once, but for those that saves to the KV pool pin."""
        self._engine.abort_requests([engine_id])

    def fail(self, request: Request) -> None:
        """End a request whose logits were no numbers: its KV may not be numbers, so nobody is to find it."""
        self.abort(request.request_id)
        self.kv.forget_cached(request)
        if self.scratch:  # its drafts' KV, too; requests' own blocks are zeroed when they are given out
            self.rpc("seer_zero_blocks", blocks=self.scratch)

    def grammar_error(self, request: Request) -> str:
        """Return why a request's grammar could not be compiled; empty: it could."""
        structured = request.structured_output_request
        error = structured.grammar if structured is not None else None
        return str(error) if isinstance(error, Exception) else ""

    def stop(self, engine_id: str) -> None:
        """End a request as a stop id does. Its KV may be saved, unlike the KV of an aborted request."""
        from vllm.v1.request import RequestStatus

        self.engine_core.scheduler.finish_requests(engine_id, RequestStatus.FINISHED_STOPPED)

    def hand_back(self, request: Request) -> None:
        """End a request as if it were at its limit, before its response's end: its KV is saved."""
        from vllm.v1.request import RequestStatus

        extra = request.sampling_params.extra_args
        extra[EXTRA] = structs.replace(extra[EXTRA], continues=True)
        self.engine_core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_LENGTH_CAPPED)

    def step(self) -> list[EngineCoreOutput]:
        """Run one step of all scheduled requests; return what each produced.

        Where vLLM schedules ahead, these are the outputs of the step before.
        """
        outputs: list[EngineCoreOutput] = self._engine.get_output().outputs
        return outputs

    def step_with_others(self) -> list[EngineCoreOutput]:
        """Do as `step`, in one pass of the model on all data-parallel ranks: a dummy if nothing is due."""
        core = self.engine_core
        outputs, executed = core.step_fn()
        core.post_step(model_executed=executed)
        if not executed:
            self.rpc("seer_run_dummy", tokens=path_rows(self._length_now))
        found = outputs.get(0) if outputs else None
        return found.outputs if found is not None else []

    @property
    def has_steps_under_way(self) -> bool:
        """Whether a step has begun that `step` has not ended: only where vLLM schedules ahead."""
        return bool(self.engine_core.batch_queue)

    @property
    def verified(self) -> Mapping[str, Sequence[int]]:
        """The drafts that the step verified whose outputs `step` returned last, by request."""
        drafts: Mapping[str, Sequence[int]] = self.engine_core.scheduler.verified
        return drafts

    @property
    def prefilled(self) -> int:
        """How many tokens of prompts that step computed."""
        return int(self.engine_core.scheduler.prefilled)

    def draft_next(self, length: int) -> None:
        """Have every request draft so many tokens after the next step, where steps are scheduled ahead.

        While `held_length` is set, it counts instead.
        """
        self._length_now = self._length_next
        self._length_next = length if self.held_length is None else self.held_length
        self.engine_core.scheduler.draft_length = self._length_next

    @property
    def ahead(self) -> bool:
        """Whether a step is scheduled before the tokens of the last one are known."""
        return bool(self.vllm_config.scheduler_config.async_scheduling)

    def request_counts(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait in vLLM's scheduler."""
        running, waiting = self.engine_core.scheduler.get_request_counts()
        return running, waiting

    # --- KV ------------------------------------------------------------------------------

    @property
    def has_pending_saves(self) -> bool:
        """Whether blocks are still pinned because they are being saved to the KV pool."""
        connector = self.engine_core.scheduler.connector
        return connector is not None and connector.has_pending_push_work()

    def pinned_blocks(self) -> int:
        """Return the blocks in use that no running request has; one that several share counts once."""
        return self.kv.pinned() if self.has_pending_saves else 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV. Raises `EngineError` when something still holds a block."""
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM could not empty its prefix cache: some blocks are still in use")

    def _reset_caches(self) -> None:
        """Forget all that follows from the weights: KV, and images that were encoded."""
        self.reset_prefix_cache()
        # Loading empties the workers' part alone, and the next known image would end the engine.
        self._engine.reset_encoder_cache()

    # --- weights and memory --------------------------------------------------------------

    def lay_out_weights(self, folders: Sequence[str] | None, digest: str) -> None:
        """See `Backend.lay_out_weights`; on CPUs, for which this was measured and proved."""
        self._forget_laid_out()
        device = self.engine_core.vllm_config.device_config.device_type
        if folders is None or device != "cpu" or self._meeting.prove:
            return
        size = sum(each.stat().st_size for each in Path(folders[0]).glob("*.safetensors"))
        if free_bytes() < LAID_OUT_ROOM * size:
            _log.debug(
                "weights are laid out in the pause", why=f"no memory for {LAID_OUT_ROOM} * {size} bytes"
            )
            return
        self._laying_out = digest
        self.rpc("seer_lay_out", folders=folders)

    def lays_out(self) -> bool:
        """See `Backend.lays_out`."""
        if not self._laying_out:
            return False
        problems = self.rpc("seer_lay_out_problem")
        if None in problems:
            return True
        self._laid_out = self._laying_out
        if any(problems):
            _log.debug("weights are laid out in the pause", why=problems)
            self._forget_laid_out()
        self._laying_out = ""
        return False

    def _forget_laid_out(self) -> None:
        if self._laid_out or self._laying_out:
            self._laid_out = self._laying_out = ""
            self.rpc("seer_forget_laid_out")

    def load_weights(self, folders: Sequence[str], digest: str, *, adapter: bool = False) -> None:
        """Load weights in place: the KV cache's memory and all settings stay. Raises `EngineError`.

        `folders`: where each node has them, or an adapter for the model that the engine was started with.
        """
        try:
            if digest and digest == self._laid_out:
                self._laid_out = USED
                self.rpc("seer_use_laid_out")
            else:
                self._forget_laid_out()
                if adapter:
                    self.rpc("seer_load_adapter", folders=folders)
                elif not (self._meeting.prove and self._prove(folders)):
                    self.rpc("seer_load_weights", folders=folders)
        except EngineBroken:
            raise
        except Exception as error:
            if self._meeting.proofs:
                self._meeting.proofs = []  # nodes read the next stream whole, and it is proved again
            raise EngineError(f"vLLM could not load {folders[0]}: {str(error)[:MAX_VLLM_TEXT]}") from error
        self._loaded()

    def _prove(self, folders: Sequence[str]) -> bool:
        """Load weights, and find out what each rank reads of them; return whether both was done."""
        found, meeting = self.rpc("seer_prove_reads", loads=2, folders=folders), self._meeting
        meeting.prove = False
        problems = [each for each in found if isinstance(each, str)]
        if not problems:
            meeting.proofs, meeting.not_run = [found, *(meeting.proofs or ())][:KEPT_PROOFS], 0
            return True
        meeting.not_run += 1
        if meeting.not_run < MAX_NOT_RUN and all(isinstance(each, NotRun) for each in problems):
            _log.warning("it is proved with the next whole stream what ranks read of one", why=problems)
        else:
            _log.warning("every node copies all of each stream of weights from now on", why=problems)
            meeting.proofs = None
        return False

    def receive_weights(self, folders: Sequence[str], engine: str) -> None:
        """Load weights in place, by the plan in each node's folder, as the engine of this name.

        Raises `EngineError`, or `EngineBroken` if vLLM itself failed: its model is in no known state then.
        """
        self._forget_laid_out()
        try:
            problems = self.rpc("seer_receive_weights", folders=folders, engine=engine)
        except Exception as error:
            why = f"vLLM could not load weights in place: {str(error)[:MAX_VLLM_TEXT]}"
            raise EngineBroken(f"{why}; this engine ends, and starts again") from error
        if any(problems):
            raise EngineError("; ".join(dict.fromkeys(filter(None, problems))))
        self._loaded()

    def _loaded(self) -> None:
        self._reset_caches()
        self.head_behind = max(self.rpc("seer_head_behind"))

    def sleep(self, state: SleepState, level: SleepLevel) -> None:
        """Free memory or take it again, see `Backend.sleep`. Raises `EngineError`.

        KV alone is never freed from awake: vLLM frees all, and wakes the weights.
        """
        try:
            self._forget_laid_out()
            if state is SleepState.ASLEEP:
                self._reset_caches()
            if self.versions["device"] == "cpu":
                self.rpc("seer_sleep", tags=state.tags, level=level)
            elif state is SleepState.ASLEEP:
                self._engine.sleep(level=level)
            else:
                self._engine.wake_up(["weights"] if state is SleepState.KV_ASLEEP else None)
        except Exception as error:
            doing = "free" if state is SleepState.ASLEEP else "take"
            raise EngineError(f"vLLM could not {doing} memory: {str(error)[:MAX_VLLM_TEXT]}") from error

    def close(self) -> None:
        """Stop the workers and free the device; idempotent."""
        if self._client is not None:
            with contextlib.suppress(Exception):  # a rank may have ended
                self._forget_laid_out()
        client, self._client = self._client, None
        if client is not None:
            client.shutdown()

    @property
    def _engine(self) -> InprocClient:
        if self._client is None:
            raise EngineError("the engine is closed")
        return self._client


def _whole_context_group(config: KVCacheConfig) -> int:
    """Return the group of layers beside whose KV expert ids are kept.

    Raises `EngineError` if no group's layers attend to all tokens: blocks before a window go to others.
    """
    for place, group in enumerate(config.kv_cache_groups):
        if type(group.kv_cache_spec).__name__ in WHOLE_CONTEXT:
            return place
    raise EngineError(
        "engine.routed_experts = true: no layer of this model attends to all tokens; set it to false"
    )


class EncoderAccount:
    """What vLLM's scheduler gives its vision encoder to do.

    `runs` counts images that were encoded; `most` tokens are the most that one may take, 0: none runs.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        manager = scheduler.encoder_cache_manager
        # A larger image would wait for ever: it fits neither a step nor the cache.
        self.most = min(scheduler.max_num_encoder_input_tokens, manager.cache_size)
        self.runs = 0
        allocate = manager.allocate

        def counted(request: Request, input_id: int) -> None:
            self.runs += 1
            allocate(request, input_id)

        manager.allocate = counted
