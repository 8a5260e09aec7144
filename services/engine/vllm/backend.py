"""The real engine: chunks run as requests of vLLM's engine core.

Invariants:
- vLLM sees greedy requests with a token limit and stop ids. Sampling is ours (`worker.py`), and so are stop
  strings (`stop_strings.py`): both depend on the whole context and where its turn begins alone, so that chunk
  boundaries, batches and preemptions change nothing;
- vLLM request ids are never reused, so a dropped chunk cannot be mistaken for its next attempt;
- workers learn what they need of a request from its `extra_args`;
- engines share KV only if their weights and layout are equal; a chunk that must not preempt others
  (`wait_for_room`) starts once its worst case fits the free blocks.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from seer.common.config import DraftsConfig, EngineConfig, PoolConfig, SharedConfig
from seer.common.errors import EngineError, InvalidField, SeerError, Unsampleable
from seer.common.image_models import image_model
from seer.common.policy.draft_paths import SEPARATOR
from seer.common.sleep import SleepLevel, SleepState
from seer.common.types import Capacity, InstanceStats
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Chunk, ChunkEnd, ChunkFailure, Generated, StepOutput
from seer.services.engine.chunk_gate import ChunkGate
from seer.services.engine.nodes.same_settings import Meeting
from seer.services.engine.planted_fault import planted_position
from seer.services.engine.vllm import env, loading
from seer.services.engine.vllm.checks import check_chunk, no_token, token_budget, tokens_left, unmet
from seer.services.engine.vllm.core import CoreHandle
from seer.services.engine.vllm.drafts.control import Drafting
from seer.services.engine.vllm.drafts.step_times import step_costs
from seer.services.engine.vllm.images import Images
from seer.services.engine.vllm.kv_pool.sharing import KvSharing
from seer.services.engine.vllm.probe import Probe
from seer.services.engine.vllm.requests import engine_request, logprobs_beside
from seer.services.engine.vllm.stop_strings import StopStrings

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

IDLE_STEP_SECONDS = 0.0005
"""Pause after a step in which all requests waited for the KV pool or grammars: their threads need the CPU."""

MOST_JOINED = 0.25
"""Share of a batch that may be new in a step, if the step is to say how fast steps are."""

SETTLE_SECONDS = 60.0
"""Longest wait for blocks that the KV pool holds; its calls have deadlines of seconds."""


@dataclass(slots=True)
class _Run:
    """One chunk in the engine. `left`: tokens until its turn's own limit; `tree`: what it drafts from."""

    chunk: Chunk
    request: Request
    left: int
    stops: StopStrings | None
    cached_tokens: int = 0
    tree: str = ""
    drafted: int = 0
    accepted: int = 0


class VllmBackend:
    """`Backend` on vLLM (V1 engine core, model runner V2): CPU or GPU, any tensor parallelism.

    `core` and `probe` are there after `start`. While `fault_position` is set, that absolute position of
    chunks added from then on is sampled with a wrong key: checkers must notice.
    """

    core: CoreHandle
    probe: Probe

    def __init__(
        self,
        config: EngineConfig,
        shared: SharedConfig,
        pool: PoolConfig | None = None,
        drafts: DraftsConfig | None = None,
        meeting: Meeting | None = None,
        place: env.RankPlace | None = None,
    ) -> None:
        """Take the configuration. `meeting`: where its ranks meet if other nodes have some.

        Without a `pool` of kind `mooncake`, KV stays in this engine; without `drafts`, or with source
        `off`, every step gives each request one token. `place`: its own among data-parallel ranks.
        """
        self._shared, self._meeting, self._place = shared, meeting, place
        self._pool = pool if pool is not None and pool.kind == "mooncake" else None
        self._sharing: KvSharing | None = None
        self._drafts = drafts if drafts is not None and drafts.source != "off" else None
        self._config = config
        self._drafting: Drafting | None = None
        self._gate = ChunkGate()
        self._runs: dict[str, _Run] = {}
        self._ended_trees: list[str] = []  # of the chunks that end in a step, in order
        self._engine_ids: dict[tuple[str, int], str] = {}
        self._next_id = itertools.count()
        self.fault_position: int | None = None
        self._handed_back = StepOutput()  # of the next step
        self._joined = 0  # chunks that were added since the last step
        self._busy_since = 0.0  # when the last step ended, 0 if it left no work
        self._reset_counters()

    def _reset_counters(self) -> None:
        self._steps = self._generated = self._prompt = self._cached = self._preemptions = 0
        self._pool_tokens = 0
        self._step_seconds = 0.0

    def start(self) -> None:
        """Load the model, install our sampler, and prove that it is the one that samples.

        Raises `EngineError` naming the cause and the fix.
        """
        with env.without_collections():
            self._start()

    def _start(self) -> None:
        if self._config.nodes > 1 and self._meeting is None:
            fix = "this command has all ranks on this machine: set it to 1"
            raise EngineError(f"engine.nodes = {self._config.nodes}: {fix}")
        self._config = env.with_schedule(self._config)
        env.prepare(self._config, self._meeting, self._place)
        described = loading.model_config(self._shared)
        model = image_model(described)
        self._config, self._shared = env.with_defaults(self._config, self._shared, described)
        # Only now: it imports torch and, through the workers, vllm.
        from seer.services.engine.vllm import self_test

        client = loading.load(self._config, self._shared, self._pool, self._drafts, self._meeting)
        self.core = CoreHandle(client, self._config.load_seconds, self._meeting)
        self.probe = Probe(self, self.core)
        try:
            self.core.describe(self._shared, self._drafts, model)
            self._images = Images(model, self.core.capacity.image_tokens)
            max_draft = self._drafts.max_draft if self._drafts else 0
            self.core.draft_next(0)
            self.core.install(max_draft, routed_experts=self._config.routed_experts)
            self_test.check(self.probe, model)
            if self._drafts is not None:
                self._drafting = self._start_drafting(self._drafts)
            if self._pool is not None:
                self._sharing = KvSharing(
                    self.core.rpc, Path(self._shared.model), self.core.vllm_config,
                    routed_experts=self._config.routed_experts,
                )  # fmt: skip
        except SeerError:
            self.close()
            raise
        except Exception as error:  # whatever a first forward pass provokes inside vLLM
            self.close()
            raise EngineError(loading.explain(error, self._config, self._shared, self._drafts)) from error
        self.fault_position = planted_position()
        self._reset_counters()  # of what was run to check and to measure

    def _start_drafting(self, config: DraftsConfig) -> Drafting:
        core, ahead = self.core, self.core.ahead
        drafting = Drafting(core.rpc, core.send, config, core.vocab_size, core.draft_next if ahead else None)
        paths = bool(self.core.scratch)
        if config.source == "random":
            drafting.start_random(paths)
        else:
            costs, kept = step_costs(self.probe, config.max_draft, config.cache, paths)
            drafting.start(costs, paths, kept)
        return drafting

    @property
    def capacity(self) -> Capacity:
        """What this instance holds; valid after `start`."""
        return self.core.capacity

    @property
    def versions(self) -> dict[str, str]:
        """Names and versions of what generates, for reports."""
        return self.core.versions | self._config.vllm.texts()

    def add(self, chunk: Chunk, *, capture: bool = False) -> None:
        """Queue a chunk; with `capture`, its logits are kept for `Probe.capture`.

        Raises `InvalidField` for a request this engine cannot run.
        """
        if (chunk.request_id, chunk.attempt) in self._engine_ids:
            raise InvalidField("request_id", chunk.request_id, f"attempt {chunk.attempt} is already running")
        core, sampling = self.core, chunk.sampling
        eos_ids = () if sampling.ignore_eos else core.eos_ids
        stop_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos_ids)))
        check_chunk(
            chunk, vocab=core.vocab_size, capacity=core.capacity, stop_ids=stop_ids,
            has_tokenizer=core.detokenizer is not None,
        )  # fmt: skip
        stops = None
        before, output = chunk.tokens[: chunk.counts_from], chunk.tokens[chunk.counts_from :]
        if sampling.stop and core.detokenizer is not None:
            stops = StopStrings(core.detokenizer, sampling.stop, sampling.min_tokens, before, output)
        if chunk.routes_from is not None and not self._config.routed_experts:
            fix = "this engine does not keep expert ids: set engine.routed_experts=true, or None here"
            raise InvalidField("sampling.routed_experts_from", sampling.routed_experts_from, fix)
        images = self._images.features(chunk)
        engine_id = str(next(self._next_id))
        tree = self._drafting.begin(chunk) if self._drafting is not None else ""
        request = core.request_of(
            engine_request(
                engine_id, chunk, stop_ids=stop_ids, vocab=core.vocab_size, capture=capture,
                fault_position=self.fault_position, group=tree, images=images,
            )
        )  # fmt: skip
        if chunk.wait_for_room:
            self._gate.enter(engine_id, core.capacity.blocks_for(len(chunk.tokens), token_budget(chunk)))
        else:
            core.add(request, routes=chunk.routes_from is not None)
        self._joined += 1
        self._runs[engine_id] = _Run(chunk, request, sampling.max_tokens - len(output), stops, tree=tree)
        self._engine_ids[chunk.request_id, chunk.attempt] = engine_id

    def drop(self, request_id: str, attempt: int) -> None:
        """Forget a chunk; nothing further is reported of it. Unknown ones are ignored."""
        engine_id = self._engine_ids.get((request_id, attempt))
        if engine_id is not None:
            self.core.abort(engine_id)
            self._forget(engine_id)

    def end(self, request_id: str, attempt: int) -> None:
        """See `Backend.end`."""
        engine_id = self._engine_ids.get((request_id, attempt))
        if engine_id is None or (run := self._runs[engine_id]).left == tokens_left(run.chunk):
            return
        if run.chunk.routes_from is None or run.request.num_computed_tokens:  # preempted, it has no routes
            self.core.hand_back(run.request)
            self._end(engine_id, self._handed_back, "", "")

    def has_work(self) -> bool:
        """Say whether `step` would do anything: run chunks, end steps under way, free saved blocks."""
        waits = self._runs or self._handed_back.ended
        return bool(waits) or self.core.has_steps_under_way or self.core.has_pending_saves

    def step(self) -> StepOutput:
        """Advance every running chunk by one engine step.

        Where vLLM schedules ahead, this begins a step and returns what the one before has produced.
        """
        result, self._handed_back, begun = self._handed_back, StepOutput(), time.perf_counter()
        for engine_id in self._gate.start(self.core.kv.free, self.core.kv.held):
            run = self._runs[engine_id]
            self.core.add(run.request, routes=run.chunk.routes_from is not None)
        if self._drafting is not None:
            self._drafting.begin_step(len(self._runs), self._mean_tokens, self._mean_context)
        outputs = self.core.step() if self._place is None else self.core.step_with_others()
        for output in outputs:
            self._report(output, result)
        self._report_acceptance(result)
        grammars = (run.chunk.sampling.structured_outputs for run in self._runs.values())
        # A rank that ran a dummy beside others has no such work, and would have them wait.
        if not outputs and (any(grammars) or (self._sharing is not None and self.has_work())):
            time.sleep(IDLE_STEP_SECONDS)
        self._steps += 1
        ended = time.perf_counter()
        result.seconds = ended - begun
        self._step_seconds += result.seconds
        if self._drafting is not None:
            # Beside the step itself: what else the engine's thread had to do, or to wait for, since the last.
            self._drafting.end_step(
                sum(len(each.token_ids) for each in result.generated),
                ended - (self._busy_since or begun),
                usual=self._joined < MOST_JOINED * len(outputs),
                prefilled=self.core.prefilled,
            )
            if len(outputs) == len(self._runs) and not self._joined:
                self._drafting.check_profile(len(outputs), self._mean_context, result.seconds)
        self._joined, self._busy_since = 0, ended if self._runs else 0.0
        return result

    def _mean_tokens(self) -> float:
        """Return how many tokens the responses that run have, on average."""
        made = sum(run.chunk.sampling.max_tokens - run.left for run in self._runs.values())
        return made / max(1, len(self._runs))

    def _mean_context(self) -> float:
        """Return how many tokens the requests that run have, on average."""
        tokens: int = sum(run.request.num_tokens for run in self._runs.values())
        return tokens / max(1, len(self._runs))

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
            # Equal weights have another KV with other settings of vLLM.
            settings = self._config.vllm.texts()
            self._sharing.bind(f"{digest} {settings}" if digest and settings else digest)

    def lay_out_weights(self, folder: Path | None, digest: str) -> None:
        """See `Backend.lay_out_weights`."""
        self.core.lay_out_weights(None if folder is None else self._folders(folder), digest)

    def lays_out(self) -> bool:
        """See `Backend.lays_out`."""
        return self.core.lays_out()

    def load_weights(self, folder: Path, digest: str, base: Path | None = None) -> None:
        """See `Backend.load_weights`."""
        if base is not None and self.capacity.image_tokens:
            raise EngineError("adapters of models with images were not proved: update to whole weights")
        self._forget_weights()
        self.core.load_weights(self._folders(folder), digest, adapter=base is not None)
        self.bind_weights(digest)

    def receive_weights(self, folder: Path, engine: str, digest: str) -> None:
        """See `Backend.receive_weights`."""
        self._forget_weights()
        self.core.receive_weights(self._folders(folder), engine)
        self.bind_weights(digest)

    def _folders(self, folder: Path) -> list[str]:
        """Return where each node has the weights that are in this folder here."""
        return [str(folder), *(self._meeting.folders if self._meeting is not None else ())]

    def _forget_weights(self) -> None:
        """Drop all that runs, and what followed from the live weights, before others are loaded."""
        self._settle()
        self.bind_weights("")
        if self._drafting is not None:
            self._drafting.clear()

    def sleep(self, state: SleepState, level: SleepLevel) -> None:
        """See `Backend.sleep`."""
        self._settle()
        self.core.sleep(state, level)

    def _settle(self) -> None:
        """Drop all chunks, and step until nothing runs or holds a block. Raises `EngineError`."""
        for request_id, attempt in list(self._engine_ids):
            self.drop(request_id, attempt)
        while self.core.has_steps_under_way:
            self.core.step()
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._sharing is not None and self.core.kv.free < self.capacity.kv_blocks:
            self.core.step()
            if time.monotonic() > deadline:
                raise EngineError(f"the KV pool held blocks for {SETTLE_SECONDS:g} s after all work ended")
            time.sleep(IDLE_STEP_SECONDS)

    def stats(self) -> InstanceStats:
        """Return current gauges and counters; cheap, called between steps."""
        running, waiting = self.core.request_counts()
        pool = self._sharing.counts() if self._sharing is not None else {}
        return InstanceStats(
            steps=self._steps,
            running=running,
            waiting=waiting + self._gate.waiting,
            free_blocks=self.core.kv.free,
            pinned_blocks=self.core.pinned_blocks(),
            preemptions=self._preemptions + sum(run.request.num_preemptions for run in self._runs.values()),
            generated_tokens=self._generated,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            pool_tokens=self._pool_tokens,
            pool_saved_blocks=pool.get("saved_blocks", 0),
            pool_dropped_blocks=pool.get("dropped_blocks", 0),
            pool_failures=pool.get("failures", 0),
            pool_corrupt=pool.get("corrupt", 0),
            pool_away=bool(pool.get("away", 0)),
            step_seconds=self._step_seconds,
            encoder_runs=self.core.encoder.runs,
            head_behind=self.core.head_behind,
            **(self._drafting.counts() if self._drafting is not None else {}),
        )

    def close(self) -> None:
        """Stop the workers and free the device; idempotent."""
        self._runs.clear()
        self._engine_ids.clear()
        if hasattr(self, "core"):
            self.core.close()

    def _report(self, output: EngineCoreOutput, result: StepOutput) -> None:
        """Add what one request produced in a step to the result."""
        run = self._runs[output.request_id]
        chunk, ended = run.chunk, output.finish_reason
        if output.prefill_stats is not None:
            run.cached_tokens = output.prefill_stats.num_cached_tokens
            self._prompt += len(chunk.tokens)
            self._cached += run.cached_tokens
            self._pool_tokens += output.prefill_stats.num_external_cached_tokens
        if self._drafting is not None:
            drafts = self.core.verified.get(output.request_id, ())
            others = drafts.count(SEPARATOR)
            drafted, sampled = len(drafts) - others, len(output.new_token_ids)
            run.drafted += drafted
            run.accepted += self._drafting.count(run.tree, sampled, drafted, 1 + others)
        by_id = ended is not None and str(ended) == "stop"
        tokens, stop_string = output.new_token_ids, None
        if run.stops is not None:
            tokens, stop_string = run.stops.cut(tokens, ends_by_id=by_id)
        if tokens:
            logprobs = output.new_logprobs.logprobs[: len(tokens), 0].tolist()
            if any(map(math.isnan, logprobs)):
                self._fail(output.request_id, result, logprobs)
                return
            self._generated += len(tokens)
            run.left -= len(tokens)
            result.generated.append(
                Generated(
                    request_id=chunk.request_id, attempt=chunk.attempt, token_ids=tokens, logprobs=logprobs,
                    beside=logprobs_beside(output, chunk, len(tokens)),
                )
            )  # fmt: skip
        if str(ended) == "error":
            self._fail_grammar(output.request_id, result)
        elif stop_string is not None:
            if ended is None:
                self.core.stop(output.request_id)
            self._end(output.request_id, result, "stop", stop_string)
        elif by_id:
            self._end(output.request_id, result, "stop", str(output.stop_reason))
        elif ended is not None:
            self._end(output.request_id, result, "" if run.left else "length", "")

    def _fail(self, engine_id: str, result: StepOutput, logprobs: list[float]) -> None:
        """End a chunk that has no next token: the first logprob that is NaN stands in that one's place."""
        run, place = self._runs[engine_id], [math.isnan(value) for value in logprobs].index(True)
        chunk = run.chunk
        self.core.fail(run.request)
        if self._sharing is not None:
            self._sharing.finished(run.request, 0, len(run.request.block_hashes))
        self._forget(engine_id)
        known = chunk.counts_from + chunk.sampling.max_tokens - run.left
        if run.tree:
            # A draft that is no number spoils rows before it, as kernels multiply it by zero: only what has
            # none without drafts has no next token.
            new = chunk.max_new_tokens - (known - len(chunk.tokens))
            tokens = list(run.request.all_token_ids[:known])
            self.add(structs.replace(chunk, group_id="", tokens=tokens, max_new_tokens=new))
            return
        _add_failure(result, chunk, no_token(chunk, known + place))

    def _fail_grammar(self, engine_id: str, result: StepOutput) -> None:
        """End a chunk whose grammar could not be compiled, or does not take what was sampled."""
        run = self._runs[engine_id]
        self._forget(engine_id)
        why = self.core.grammar_error(run.request) or "vLLM refused a token that it had allowed"
        _add_failure(result, run.chunk, unmet(run.chunk, why))

    def _end(self, engine_id: str, result: StepOutput, finish: str, stop_reason: str) -> None:
        run, routes = self._runs[engine_id], None
        if run.chunk.routes_from is not None:
            known = run.chunk.counts_from + run.chunk.sampling.max_tokens - run.left
            routes = self.core.routes(engine_id, run.chunk.routes_from, known - 1)
        self._forget(engine_id)
        if finish and not run.chunk.parks and self._sharing is not None:
            prompt, before, size = run.chunk.prompt_len, len(run.chunk.tokens), self.capacity.block_size
            self._sharing.finished(run.request, prompt // size, before // size)
        result.ended.append(
            ChunkEnd(
                request_id=run.chunk.request_id, attempt=run.chunk.attempt, finish=finish,
                stop_reason=stop_reason, preemptions=run.request.num_preemptions, routes=routes,
                cached_tokens=run.cached_tokens, verified=[run.drafted, run.accepted] if run.drafted else [],
            )
        )  # fmt: skip
        self._ended_trees.append(run.tree)

    def _report_acceptance(self, result: StepOutput) -> None:
        """Add to the ends of a step what their trees' drafts were worth; the first of a tree has all."""
        trees, self._ended_trees = self._ended_trees, []
        if self._drafting is None or not any(trees):
            return
        learned = self._drafting.take_acceptance(trees)
        for end, tree in zip(result.ended, trees, strict=True):
            end.drafted, end.accepted = learned.pop(tree, ([], []))

    def _forget(self, engine_id: str) -> None:
        run = self._runs.pop(engine_id)
        self._gate.leave(engine_id)
        self.core.forget_routes(engine_id)
        if self._drafting is not None:
            self._drafting.end(run.tree)
        del self._engine_ids[run.chunk.request_id, run.chunk.attempt]
        self._preemptions += run.request.num_preemptions


def _add_failure(result: StepOutput, chunk: Chunk, error: Unsampleable | InvalidField) -> None:
    result.failed.append(ChunkFailure(request_id=chunk.request_id, attempt=chunk.attempt, error=error))
