"""The real engine: chunks run as requests of an in-process vLLM engine core.

Invariants:
- vLLM sees greedy requests with a token limit and stop ids; all sampling is ours, in
  `worker.py`, all stop strings are ours, here: both go by the whole response, so that chunk
  boundaries, batches and preemptions change nothing;
- vLLM request ids are never reused, so a dropped chunk cannot be mistaken for its next attempt;
- workers learn of a request from its `extra_args` alone, and of the rest by `collective_rpc`: any
  number of tensor-parallel ranks does the same;
- KV is shared with engines of the same weights and layout alone; a chunk that must wait for room
  starts once its worst case fits beside those of all others, whatever saves to the pool still hold.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from seer.common.config import DraftsConfig, EngineConfig, PoolConfig, SharedConfig
from seer.common.errors import EngineError, InvalidField, SeerError
from seer.common.policy.draft_paths import SEPARATOR
from seer.common.types import Capacity, InstanceStats, SamplingParams
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Chunk, ChunkEnd, Generated, StepOutput
from seer.services.engine.chunk_gate import ChunkGate
from seer.services.engine.vllm import env
from seer.services.engine.vllm.checks import budget, check
from seer.services.engine.vllm.drafts.control import Drafting
from seer.services.engine.vllm.drafts.scratch_blocks import take_scratch
from seer.services.engine.vllm.drafts.scripted import Script
from seer.services.engine.vllm.kv_pool.sharing import Sharing
from seer.services.engine.vllm.requests import engine_request
from seer.services.engine.vllm.stop_strings import StopStrings

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.request import Request

IDLE_STEP_SECONDS = 0.0005
"""Pause after a step in which all waited for the KV pool: its threads need the interpreter."""

SETTLE_SECONDS = 60.0
"""Longest wait for blocks that the KV pool holds; its calls have deadlines of seconds."""


@dataclass(slots=True)
class _Run:
    """One chunk in the engine; `left` counts tokens until the response's own limit."""

    chunk: Chunk
    request: Request
    left: int
    stops: StopStrings | None
    cached_tokens: int = 0
    tree: str = ""
    drafted: int = 0


class VllmBackend:
    """`Backend` on vLLM (V1 engine core, model runner V1): CPU or GPU, any tensor parallelism."""

    def __init__(
        self,
        config: EngineConfig,
        shared: SharedConfig,
        pool: PoolConfig | None = None,
        drafts: DraftsConfig | None = None,
    ) -> None:
        """Take the configuration.

        Without a `pool` of kind `mooncake`, KV stays in this engine; without `drafts`, or with source
        `off`, every step gives each request one token.
        """
        self._config = config
        self._shared = shared
        self._pool = pool if pool is not None and pool.kind == "mooncake" else None
        self._sharing: Sharing | None = None
        self._drafts = drafts if drafts is not None and drafts.source != "off" else None
        self._drafting: Drafting | None = None
        self._gate = ChunkGate()
        self._client: InprocClient | None = None
        self._runs: dict[str, _Run] = {}
        self._ids: dict[tuple[str, int], str] = {}
        self._next_id = itertools.count()
        self._fault_position: int | None = None
        self._reset_counters()

    def _reset_counters(self) -> None:
        self._steps = self._generated = self._prompt = self._cached = self._preemptions = 0
        self._pulled = 0
        self._step_seconds = 0.0

    def start(self) -> None:
        """Load the model, install our sampler, and prove that it is the one that samples.

        Raises `EngineError` naming the cause and the fix.
        """
        env.prepare(self._config)
        # Only now: it imports torch and, through the workers, vllm.
        from seer.services.engine.vllm import self_test

        self._client = env.load(self._config, self._shared, self._pool, self._drafts)
        try:
            scratch = take_scratch(self._core, self._drafts, self._shared.block_size)
            self._describe()
            self._rpc(
                "seer_install", max_draft=self._drafts.max_draft if self._drafts else 0, scratch=scratch
            )
            self_test.check(self)
            if self._drafts is not None:
                self._drafting = Drafting(self._rpc, self._drafts, self._vocab_size)
                self._drafting.prepare(self, self._core.vllm_config, bool(scratch))
            if self._pool is not None:
                model = Path(self._shared.model)
                self._sharing = Sharing(self._rpc, model, self._core.vllm_config)
        except SeerError:
            self.close()
            raise
        except Exception as error:  # whatever a first forward pass provokes inside vLLM
            self.close()
            raise EngineError(env.explain(error, self._config, self._shared)) from error
        self.plant_fault(self._config.fault_position)
        self._reset_counters()  # of what was run to check and to measure

    def _describe(self) -> None:
        """Read from the loaded engine what it turned out to hold."""
        from vllm.tokenizers import cached_tokenizer_from_config

        config = self._core.vllm_config
        self._vocab_size: int = config.model_config.get_vocab_size()
        tokenizer = cached_tokenizer_from_config(config.model_config)
        self._eos = env.eos_ids(config, tokenizer)
        self._tokenizer: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._blocks = self._core.scheduler.kv_cache_manager.block_pool
        self._capacity = Capacity(
            kv_blocks=self._blocks.num_gpu_blocks - 1,
            block_size=config.cache_config.block_size,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            draft_tokens=self._drafts.max_draft if self._drafts else 0,
        )
        if self._capacity.block_size != (wanted := self._shared.block_size):
            raise EngineError(
                f"shared.block_size = {wanted}: here this model needs {self._capacity.block_size}"
            )

    @property
    def capacity(self) -> Capacity:
        """What this instance holds; valid after `start`."""
        return self._capacity

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; valid after `start`."""
        return self._vocab_size

    @property
    def versions(self) -> dict[str, str]:
        """Names and versions of what generates, for reports."""
        import torch
        import vllm

        config = self._core.vllm_config
        return {
            "engine": f"vllm {vllm.__version__}",
            "torch": str(torch.__version__),  # a TorchVersion otherwise
            "device": config.device_config.device_type,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "tensor_parallel": str(config.parallel_config.tensor_parallel_size),
        }

    def add(self, chunk: Chunk) -> None:
        """Queue a chunk. Raises `InvalidField` for a request this engine cannot run."""
        if (chunk.request_id, chunk.attempt) in self._ids:
            raise InvalidField("request_id", chunk.request_id, f"attempt {chunk.attempt} is already running")
        self._submit(chunk)

    def drop(self, request_id: str, attempt: int) -> None:
        """Forget a chunk; nothing further is reported of it. Unknown ones are ignored."""
        engine_id = self._ids.get((request_id, attempt))
        if engine_id is not None:
            self._engine.abort_requests([engine_id])
            self._forget(engine_id)

    def has_work(self) -> bool:
        """Say whether `step` would do anything: run chunks, or let go of blocks that saves hold."""
        return bool(self._runs) or self._saving()

    def step(self) -> StepOutput:
        """Advance every running chunk by one engine step."""
        result, begun = StepOutput(), time.perf_counter()
        for engine_id in self._gate.start(self._blocks.get_num_free_blocks(), self._held):
            self._core.add_request(self._runs[engine_id].request)
        outputs = self._engine.get_output().outputs
        for output in outputs:
            self._report(output, result)
        if not outputs and self._sharing is not None:
            time.sleep(IDLE_STEP_SECONDS)
        self._steps += 1
        result.seconds = time.perf_counter() - begun
        self._step_seconds += result.seconds
        return result

    def _saving(self) -> bool:
        return self._sharing is not None and self._core.scheduler.connector.has_pending_push_work()

    def _held(self, engine_id: str) -> int:
        """Return the blocks that a request has now."""
        managers = self._core.scheduler.kv_cache_manager.coordinator.single_type_managers
        return sum(len(manager.req_to_blocks.get(engine_id, ())) for manager in managers)

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """See `Backend.feed`."""
        if self._drafting is not None:
            self._drafting.feed(deltas)

    def forget(self, group_ids: Iterable[str]) -> None:
        """See `Backend.forget`."""
        if self._drafting is not None:
            self._drafting.forget(group_ids)

    def bind_weights(self, digest: str) -> None:
        """See `Backend.bind_weights`: engines share KV of equal weights."""
        if self._sharing is not None:
            self._sharing.bind(digest)

    def _settle(self) -> None:
        """Drop all chunks, and step until nothing holds a block. Raises `EngineError`."""
        for request_id, attempt in list(self._ids):
            self.drop(request_id, attempt)
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._sharing is not None and self._blocks.get_num_free_blocks() < self._capacity.kv_blocks:
            self._engine.get_output()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the KV pool held blocks for {SETTLE_SECONDS:g} s after all work had ended"
                )
            time.sleep(IDLE_STEP_SECONDS)

    def load_weights(self, folder: Path, digest: str) -> None:
        """See `Backend.load_weights`. In place: the KV cache's memory and all settings stay."""
        self._settle()
        self.bind_weights("")
        if self._drafting is not None:
            self._drafting.clear()
        try:
            self._rpc("reload_weights", weights_path=str(folder))
        except Exception as error:
            raise EngineError(f"vLLM could not load {folder}: {str(error)[: env.MAX_VLLM_TEXT]}") from error
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM kept KV of the old weights in its prefix cache")
        self.bind_weights(digest)

    def sleep(self, asleep: bool) -> None:
        """See `Backend.sleep`: KV on CPU; on a GPU vLLM's sleep mode also moves weights to host memory."""
        self._settle()
        try:
            if asleep and not self._engine.reset_prefix_cache():
                raise EngineError("vLLM kept KV in its prefix cache")
            if self.versions["device"] == "cpu":
                self._rpc("seer_hold_kv", held=not asleep)
            elif asleep:
                self._engine.sleep(level=1)
            else:
                self._engine.wake_up()
        except Exception as error:
            doing = "free" if asleep else "take"
            raise EngineError(f"vLLM could not {doing} memory: {str(error)[: env.MAX_VLLM_TEXT]}") from error

    def stats(self) -> InstanceStats:
        """Return current gauges and counters; cheap, called between steps."""
        running, waiting = self._core.scheduler.get_request_counts()
        free = self._blocks.get_num_free_blocks()
        pool = self._sharing.counts() if self._sharing is not None else {}
        return InstanceStats(
            steps=self._steps,
            running=running,
            waiting=waiting + self._gate.waiting,
            free_blocks=free,
            pinned_blocks=self._pinned(free),
            preemptions=self._preemptions + sum(run.request.num_preemptions for run in self._runs.values()),
            generated_tokens=self._generated,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            pool_tokens=self._pulled,
            pool_saved_blocks=pool.get("saved_blocks", 0),
            pool_dropped_blocks=pool.get("dropped_blocks", 0),
            pool_failures=pool.get("failures", 0),
            pool_corrupt=pool.get("corrupt", 0),
            pool_away=bool(pool.get("away", 0)),
            step_seconds=self._step_seconds,
            **(self._drafting.counts() if self._drafting is not None else {}),
        )

    def _pinned(self, free: int) -> int:
        """Return the blocks in use that no running request has; a shared one counts once."""
        if not self._saving():
            return 0
        managers = self._core.scheduler.kv_cache_manager.coordinator.single_type_managers
        used = {
            block.block_id
            for manager in managers
            for blocks in manager.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        }
        return max(0, self._capacity.kv_blocks - free - len(used))

    def close(self) -> None:
        """Stop the workers and free the device; idempotent."""
        client, self._client = self._client, None
        self._runs.clear()
        self._ids.clear()
        if client is not None:
            client.shutdown()

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Return the raw next-token logits after `tokens`: shape [vocab_size].

        For checkers, on an idle engine: raises `EngineError` while chunks are running.
        """
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        chunk = Chunk(
            request_id="", group_id="", attempt=0, key=0, prompt_len=len(tokens), max_new_tokens=1,
            sampling=sampling, tokens=tokens,
        )  # fmt: skip
        row: npt.NDArray[np.float32] = self.captured(chunk)[1][0][0]
        return row

    def captured(
        self, chunk: Chunk, company: Sequence[Chunk] = ()
    ) -> tuple[list[int], list[npt.NDArray[np.float32]]]:
        """Run one chunk; return its tokens, and each rank's raw logits [tokens, vocab_size].

        `company` runs beside it, under other request ids.
        """
        if self._runs:
            raise EngineError("the engine is running chunks: capture logits on an idle engine")
        for other in company:
            self._submit(other)
        self._submit(chunk, capture=True)
        tokens: list[int] = []
        while self.has_work():
            for generated in self.step().generated:
                if generated.request_id == chunk.request_id:
                    tokens += generated.token_ids
        return tokens, self._rpc("seer_take_captured")

    def noise_errors(self) -> list[str]:
        """Let every rank compare its noise with the reference; an empty text is a pass."""
        return self._rpc("seer_check_noise")

    def plant_fault(self, position: int | None) -> None:
        """Sample this absolute position of later chunks with a wrong key: checkers must notice."""
        self._fault_position = position

    def script_drafts(self, script: Script | None) -> None:
        """Draft what a script says, for measuring and checkers; None: go on with the trees."""
        self._rpc("seer_script_drafts", script=script)

    @property
    def _engine(self) -> InprocClient:
        if self._client is None:
            raise EngineError("the engine is not started, or closed")
        return self._client

    @property
    def _core(self) -> EngineCore:
        return self._engine.engine_core

    def _rpc(self, method: str, **arguments: object) -> list[Any]:
        seconds = self._config.load_seconds
        answers: list[Any] = self._engine.collective_rpc(method, timeout=seconds, kwargs=arguments)
        return answers

    def _submit(self, chunk: Chunk, *, capture: bool = False) -> None:
        sampling = chunk.sampling
        eos = () if sampling.ignore_eos else self._eos
        stop_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos)))
        check(
            chunk,
            vocab=self._vocab_size,
            max_model_len=self._capacity.max_model_len,
            stop_ids=stop_ids,
            has_tokenizer=self._tokenizer is not None,
        )
        most = self._capacity.blocks_for(len(chunk.tokens), budget(chunk))
        if chunk.wait_for_room and most > self._capacity.kv_blocks:
            why = (
                f"needs {most} KV blocks, this engine has {self._capacity.kv_blocks}: it would wait for ever"
            )
            raise InvalidField("max_new_tokens", chunk.max_new_tokens, why)
        stops = None
        prompt, output = chunk.tokens[: chunk.prompt_len], chunk.tokens[chunk.prompt_len :]
        if sampling.stop and self._tokenizer is not None:
            stops = StopStrings(self._tokenizer, sampling.stop, sampling.min_tokens, prompt, output)
        engine_id = str(next(self._next_id))
        tree = self._drafting.begin(chunk) if self._drafting is not None else ""
        described = engine_request(
            engine_id,
            chunk,
            stop_ids=stop_ids,
            vocab=self._vocab_size,
            capture=capture,
            fault_position=self._fault_position,
            group=tree,
        )
        request, _ = self._core.preprocess_add_request(described)
        if chunk.wait_for_room:
            self._gate.enter(engine_id, most)
        else:
            self._core.add_request(request)
        self._runs[engine_id] = _Run(chunk, request, sampling.max_tokens - len(output), stops, tree=tree)
        self._ids[chunk.request_id, chunk.attempt] = engine_id

    def _report(self, output: EngineCoreOutput, result: StepOutput) -> None:
        run = self._runs[output.request_id]
        chunk, ended = run.chunk, output.finish_reason
        if output.prefill_stats is not None:
            run.cached_tokens = output.prefill_stats.num_cached_tokens
            self._prompt += len(chunk.tokens)
            self._cached += run.cached_tokens
            self._pulled += output.prefill_stats.num_external_cached_tokens
        if self._drafting is not None:
            self._drafting.count(len(output.new_token_ids), run.drafted)
            upcoming = run.request.spec_token_ids
            run.drafted = len(upcoming) - upcoming.count(SEPARATOR)
        by_id = ended is not None and str(ended) == "stop"
        tokens, stop_string = output.new_token_ids, None
        if run.stops is not None:
            tokens, stop_string = run.stops.cut(tokens, ends_by_id=by_id)
        if tokens:
            self._generated += len(tokens)
            run.left -= len(tokens)
            result.generated.append(self._tokens(chunk, tokens, output.new_logprobs.logprobs))
        if stop_string is not None:
            if ended is None:
                self._engine.abort_requests([output.request_id])
            self._end(output.request_id, result, "stop", stop_string)
        elif by_id:
            self._end(output.request_id, result, "stop", str(output.stop_reason))
        elif ended is not None:
            self._end(output.request_id, result, "" if run.left else "length", "")

    def _tokens(self, chunk: Chunk, tokens: list[int], logprobs: npt.NDArray[np.float32]) -> Generated:
        if min(tokens) < 0:
            raise EngineError(
                f"request {chunk.request_id}: no token can be drawn, its logits hold NaN or an infinite "
                f"maximum; check the weights in shared.model = {self._shared.model} and engine.dtype"
            )
        return Generated(
            request_id=chunk.request_id,
            attempt=chunk.attempt,
            token_ids=tokens,
            logprobs=logprobs[: len(tokens), 0].tolist(),
        )

    def _end(self, engine_id: str, result: StepOutput, finish: str, stop_reason: str) -> None:
        run = self._runs[engine_id]
        drafted, accepted = self._drafting.learned(run.tree) if self._drafting is not None else ([], [])
        self._forget(engine_id)
        if finish and self._sharing is not None:
            prompt, before = run.chunk.prompt_len, len(run.chunk.tokens)
            size = self._capacity.block_size
            self._sharing.finished(run.request, prompt // size, before // size)
        end = ChunkEnd(
            request_id=run.chunk.request_id,
            attempt=run.chunk.attempt,
            finish=finish,
            stop_reason=stop_reason,
            preemptions=run.request.num_preemptions,
            cached_tokens=run.cached_tokens,
            drafted=drafted,
            accepted=accepted,
        )
        result.ended.append(end)

    def _forget(self, engine_id: str) -> _Run:
        run = self._runs.pop(engine_id)
        self._gate.leave(engine_id)
        if self._drafting is not None:
            self._drafting.end(run.tree)
        del self._ids[run.chunk.request_id, run.chunk.attempt]
        self._preemptions += run.request.num_preemptions
        return run
