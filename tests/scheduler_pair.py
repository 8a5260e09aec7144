"""vLLM's own scheduler and Seer's, which have the same requests, steps and faults, and must not differ.

The model's part is made up: tokens, drafts, how many of these a step ahead makes, and which of them are right.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random

from scheduler_cells import BLOCK, IMAGE_BUDGET, LONGEST, Cell, configured

MOST_STEPS = 1000

STOP, EOS, REFUSED = 7, 8, 5
"""Tokens below `REFUSED` are plain; that one no grammar takes."""


def plain(value: object) -> object:
    """Return a value that equals another one only if all of it does, with its order and its types."""
    import msgspec
    import numpy as np
    from vllm.v1.request import Request

    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, Request):
        return "request", value.request_id
    if isinstance(value, enum.Enum) or value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, dict):
        return [(name, plain(each)) for name, each in value.items()]
    if isinstance(value, (set, frozenset)):
        return "set", sorted(map(plain, value))
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [plain(each) for each in value]
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    elif dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
    else:
        return repr(value)
    return type(value).__name__, [
        (name, plain(getattr(value, name))) for name in names if name != "timestamp"
    ]


ASKED = (
    "running", "deferred_waiting", "finished_req_ids", "reset_preempted_req_ids", "prev_step_scheduled_req_ids",
    "current_step", "prefill_capacity_bound", "sched_step_seq", "processed_step_seq",
    "num_waiting_for_streaming_input", "finished_recving_kv_req_ids", "failed_recving_kv_req_ids",
    "_inflight_prefills", "max_num_active_reqs", "max_num_scheduled_tokens", "max_num_running_reqs",
    "_spec_token_placeholders",
)  # fmt: skip
"""Attributes of a scheduler that make up its state, beside its requests, its queues and its blocks."""

UNASKED = {
    "events", "_block_hasher", "output_token_ids", "all_token_ids", "_prompt_embeds_per_block_hashes",
    "structured_output_request",
}  # fmt: skip
"""Attributes of a request that say nothing, or what others say, too."""


def state_of(scheduler: object) -> dict[str, object]:
    """Return all that decides what a scheduler does next."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    state = {name: plain(getattr(scheduler, name, None)) for name in ASKED}
    for name in ("waiting", "kv_holding_waiting"):
        state[name] = [request.request_id for request in getattr(scheduler, name)]
    state["deferred_frees"] = [
        (fence, [each.block_id for each in blocks]) for fence, blocks in scheduler.deferred_frees
    ]
    for name, request in scheduler.requests.items():
        state[f"request {name}"] = plain({k: v for k, v in vars(request).items() if k not in UNASKED})
        if request.use_structured_output:
            state[f"grammar {name}"] = plain(request.structured_output_request.grammar)
    state["requests"] = list(scheduler.requests)
    for place, each in enumerate(manager.coordinator.single_type_managers):
        tables = {
            name: [block.block_id for block in blocks]
            for name, blocks in each.req_to_blocks.items()
            if blocks
        }
        state[f"tables {place}"] = tables, dict(each.num_cached_block), list(each.new_block_ids)
    state["free"] = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    state["blocks"] = [
        (block.ref_cnt, block.block_hash, block.block_hash_num_tokens) for block in pool.blocks
    ]
    found = pool.cached_block_hash_to_block._cache
    state["found"] = {
        digest: list(blocks) if isinstance(blocks, dict) else [blocks.block_id]
        for digest, blocks in found.items()
    }
    state["told"] = list(getattr(scheduler.connector, "calls", ()))
    encoder = scheduler.encoder_cache_manager
    state["images"] = plain({name: each for name, each in vars(encoder).items() if name not in UNASKED})
    return state


def differences(theirs: object, ours: object) -> str:
    """Return what differs, by name."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        names = [*theirs, *(name for name in ours if name not in theirs)]
        unequal = [name for name in names if theirs.get(name) != ours.get(name)]
        return "\n".join(f"{name}:\n  vLLM {theirs.get(name)}\n  Seer {ours.get(name)}" for name in unequal)
    return f"vLLM {theirs}\nSeer {ours}"


@dataclass
class Grammar:
    """Takes all tokens but `REFUSED`, and of drafts only some."""

    taken: list[int] = field(default_factory=list)

    def accept_tokens(self, _name: str, tokens: list[int]) -> bool:
        self.taken += tokens
        return REFUSED not in tokens

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: (len(self.taken) + sum(tokens)) % (len(tokens) + 1)]


@dataclass
class Begun:
    """A step under way in both: their outputs, and which requests sample nothing, as they are in their prompt."""

    theirs: object
    ours: object
    prefills: set[str]


class Pair:
    """vLLM's scheduler, `theirs`, ahead with our `DraftsAhead`, and `ours`. Every method does the same to both."""

    def __init__(self, cell: Cell, seed: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from seer.services.engine.vllm import decode_scheduler as seer

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256) if cell.caching else None
        config, cache = configured(cell)
        kinds = [(Scheduler, seer.DecodeScheduler), (seer.DraftsAhead, seer.AsyncDecodeScheduler)][cell.ahead]
        self.theirs, self.ours = (
            kind(config, cache, StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK)
            for kind in kinds
        )
        for each in (self.theirs, self.ours):
            each.use_v2_model_runner = True
            each.needs_kv_cache_zeroing = True  # as on CPUs, see `KvAccount.zero_new`
            each.num_lookahead_tokens = cell.lookahead
            for manager in each.kv_cache_manager.coordinator.single_type_managers:
                manager._record_new_block_ids = True
            if cell.dynamic:  # how many drafts, by how many requests
                each.dynamic_sd_lookup = [row % (cell.drafts + 1) for row in range(cell.seats + 1)]
            if cell.images:
                each.max_num_encoder_input_tokens = IMAGE_BUDGET
                each.encoder_cache_manager = EncoderCacheManager(IMAGE_BUDGET)
        self.cell, self.random = cell, Random(seed)
        self.under_way: deque[Begun] = deque()
        self.count = self.steps = self.preemptions = self.drafted = 0
        self.nan: dict[str, int] | None = {}
        self.failed: set[int] = set()  # blocks that could not be loaded
        self.stuck: list[str] = []  # requests of which a step sampled nothing
        self.batch: list[str] = []  # the model's order of rows
        self.compiling: list[tuple[Future[Grammar], Future[Grammar]]] = []  # of both, of each request

    # --- what may happen ------------------------------------------------------------------

    def add(self, prompt: list[int], length: int, **sampling: object) -> str:
        """Add a request with at most so many new tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.request import Request

        self.count += 1
        images = self.images(len(prompt)) if self.cell.images else []
        name, priority = str(self.count), self.random.randrange(3) if self.cell.priority else 0
        extra = {"stop_token_ids": [STOP], "logprobs": self.random.choice((0, None))} | sampling
        params = SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, **extra
        )
        params._eos_token_id = self.random.choice((EOS, None))
        grammars = Future(), Future()
        if self.cell.grammars and self.random.random() < 0.3:
            params.structured_outputs = StructuredOutputsParams(regex="1")
            self.compiling.append(grammars)
        for scheduler, grammar in zip((self.theirs, self.ours), grammars, strict=True):
            request = Request(
                name, list(prompt), params, None, block_hasher=self.hasher, arrival_time=float(self.count),
                priority=priority, client_index=self.count % 2, mm_features=list(images),
            )  # fmt: skip
            if request.use_structured_output:
                request.structured_output_request.grammar = grammar
            scheduler.add_request(request)
        self.same_state()
        return name

    def compile(self) -> None:
        """Have a grammar that is waited for, or the error of one that cannot be had."""
        wrong = self.random.random() < 0.2
        for grammar in self.compiling.pop(self.random.randrange(len(self.compiling))):
            grammar.set_exception(ValueError("wrong")) if wrong else grammar.set_result(Grammar())

    def images(self, length: int) -> list[object]:
        """Return images of which some are equal to those of other requests, somewhere in a prompt."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        features, offset = [], self.random.randint(0, 4)
        while offset < length and len(features) < 3:
            size = self.random.randint(1, min(6, length - offset))
            place = PlaceholderRange(offset=offset, length=size)
            name = f"image {size} {self.random.randrange(3)}"
            features.append(
                MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)
            )
            offset += size + self.random.randint(0, 9)
        return features

    def end(self, name: str, aborted: bool = True) -> None:
        """End a request from outside."""
        from vllm.v1.request import RequestStatus

        status = RequestStatus.FINISHED_ABORTED if aborted else RequestStatus.FINISHED_STOPPED
        for scheduler in (self.theirs, self.ours):
            scheduler.finish_requests(name, status)
        self.same_state()

    def drain(self) -> None:
        """Step until all requests have ended."""
        for _ in range(MOST_STEPS):
            while self.stuck:
                self.end(self.stuck.pop())
            if not self.ours.requests and not self.under_way:
                break
            self.step()
        assert not self.ours.requests
        assert not self.ours._rows
        assert self.ours.kv_cache_manager.block_pool.get_num_free_blocks() == self.cell.blocks

    def reset(self, running: bool) -> None:
        """Forget cached KV; with `running`, that of those that run, too: they begin anew."""
        theirs, ours = (
            each.reset_prefix_cache(reset_running_requests=running) for each in (self.theirs, self.ours)
        )
        assert theirs == ours
        self.same_state()

    def pause(self, state: object) -> None:
        for scheduler in (self.theirs, self.ours):
            scheduler.set_pause_state(state)

    def forget(self, share: float) -> None:
        """Have nobody find some blocks by what they hold."""
        blocks = {block for block in range(1, self.cell.blocks + 1) if self.random.random() < share}
        for scheduler in (self.theirs, self.ours):
            scheduler.kv_cache_manager.evict_blocks(blocks)
        self.same_state()

    def step(self, aborted: str | None = None) -> None:
        """Begin a step, and end one if as many are under way as may be; between the two, one may be aborted."""
        busy = self.theirs.has_requests()
        assert self.ours.has_requests() == busy
        if busy:
            self.begin()
        if aborted is not None:
            self.end(aborted)
        full = len(self.under_way) == (2 if self.cell.ahead else 1)
        if self.under_way and (full or not busy or not self.under_way[-1].theirs.num_scheduled_tokens):
            self.finish()

    def begin(self) -> None:
        """Have both schedule a step."""
        length = min(self.cell.drafts, self.random.choice((0, 1, 2, 4, 8)))
        self.theirs.draft_length = self.ours.draft_length = length
        if self.compiling and self.random.random() < 0.5:
            self.compile()
        throttled = self.cell.throttled and self.random.random() < 0.2
        short, expected = self.ours.short_schedules, self.decodes_alone() and not throttled
        theirs, ours = self.theirs.schedule(throttled), self.ours.schedule(throttled)
        assert plain(theirs) == plain(ours), differences(plain_fields(theirs), plain_fields(ours))
        self.steps += 1
        self.drafted += sum(map(len, theirs.scheduled_spec_decode_tokens.values()))
        if self.cell.ahead:
            self.within_limits(theirs, length)
        self.preemptions += len(theirs.preempted_req_ids)
        self.same_state()
        if expected and self.ours._fits and not theirs.preempted_req_ids and theirs.num_scheduled_tokens:
            assert self.ours.short_schedules == short + 1
        requests = self.theirs.requests
        prefills = {name for name in theirs.num_scheduled_tokens if requests[name].is_prefill_chunk}
        self.under_way.append(Begun(theirs, ours, prefills))

    def within_limits(self, scheduled: object, length: int) -> None:
        """Assert that a step and its drafts end at a request's limit, or one computed token later at most."""
        assert scheduled.num_spec_tokens_to_schedule == length
        drafted = scheduled.scheduled_spec_decode_tokens
        for name in scheduled.num_scheduled_tokens:
            request = self.theirs.requests[name]
            if request.use_structured_output:
                assert not request.spec_token_ids
                continue
            computed, last = request.num_computed_tokens, request.num_prompt_tokens + request.max_tokens - 1
            room = 0 if request.is_prefill_chunk else min(last, LONGEST - 1) - computed - 1
            assert request.spec_token_ids == [-1] * min(length, room)
            assert name in self.stuck or computed <= min(last + (name not in drafted), LONGEST - 1)

    def decodes_alone(self) -> bool:
        """Say whether all that runs decodes, so that it must go the short way."""
        from vllm.v1.core.sched.interface import PauseState

        theirs = self.theirs
        return bool(theirs.running) and theirs.pause_state is PauseState.UNPAUSED and all(
            request.num_tokens + request.num_output_placeholders == request.num_computed_tokens + 1
            and not request.is_prefill_chunk
            and not request.num_stale_output_tokens
            and is_short(request)
            and request.num_tokens > 2
            for request in theirs.running
        ) and any(
            not request.num_output_placeholders
            or request.num_output_tokens + 1 < request.max_tokens
            for request in theirs.running
        ) and all(self.cell.dynamic or request.num_tokens > 1 for request in theirs.waiting) and self.enough()  # fmt: skip

    def enough(self) -> bool:
        """Say whether there are a block and a budget for all that any running request may need now."""
        rows = len(self.theirs.running)
        groups = len(self.theirs.kv_cache_manager.coordinator.single_type_managers)
        free = self.theirs.kv_cache_manager.block_pool.get_num_free_blocks()
        each = 1 + -(-(self.cell.drafts + self.cell.lookahead) // BLOCK)
        longest = max(request.num_computed_tokens for request in self.theirs.running)
        return (
            free >= each * rows * groups
            and (1 + self.cell.drafts) * rows <= self.cell.budget
            and longest + self.cell.drafts + 2 < LONGEST
        )

    def finish(self) -> None:
        """Have both take what the oldest step under way has produced."""
        begun = self.under_way.popleft()
        produced = self.produce(begun)
        short, rows = self.ours.short_updates, self.usual_rows(begun)
        if self.cell.connector and produced.kv_connector_output.invalid_block_ids:
            rows = False
        theirs = self.theirs.update_from_output(begun.theirs, self.copy(produced))
        ours = self.ours.update_from_output(begun.ours, self.copy(produced))
        assert plain(theirs) == plain(ours), differences(plain(theirs), plain(ours))
        self.same_state()
        assert self.ours.short_updates == short + (rows and self.ours._fits)
        assert self.ours.verified == begun.theirs.scheduled_spec_decode_tokens
        if self.cell.drafts and not self.cell.ahead and self.random.random() < 0.9:
            self.draft(begun)

    def usual_rows(self, begun: Begun) -> bool:
        """Say whether a step has rows, and all are of the short way."""
        from vllm.v1.request import RequestStatus

        found = [self.theirs.requests.get(name) for name in begun.theirs.num_scheduled_tokens]
        return (
            bool(found)
            and not self.theirs.grammar_compile_error_reqs
            and all(
                request.status is RequestStatus.RUNNING
                and not request.num_stale_output_tokens
                and is_short(request)
                for request in found
                if request is not None
            )
        )

    def produce(self, begun: Begun) -> object:
        """Return what the model makes of a step: rows in an order of its own."""
        import numpy as np
        from vllm.v1.outputs import KVConnectorOutput, LogprobsLists, ModelRunnerOutput

        scheduled = begun.theirs
        names = list(scheduled.num_scheduled_tokens)
        self.batch = [name for name in self.batch if name in names]
        self.batch += [name for name in names if name not in self.batch]
        if self.random.random() < 0.2:
            self.random.shuffle(self.batch)
        sampled = []
        for name in self.batch:
            drafts = scheduled.scheduled_spec_decode_tokens.get(name, [])
            if self.cell.ahead:  # they are on the device alone
                drafts = [self.token() for _ in drafts]
            right = self.random.randint(0, len([token for token in drafts if token >= 0]))
            tokens = [*drafts[:right], self.token()]
            nothing = name in begun.prefills
            if not nothing and self.random.random() < 0.01:  # vLLM will not schedule it any more
                nothing = True
                self.stuck.append(name)
            sampled.append([] if nothing else tokens)
        count = sum(max(1, len(tokens)) for tokens in sampled)
        starts = np.cumsum([0, *(max(1, len(tokens)) for tokens in sampled)]).tolist()
        logprobs = LogprobsLists(
            np.array([self.random.randrange(9) for _ in range(count)], np.int32)[:, None],
            np.array([self.random.random() for _ in range(count)], np.float32)[:, None],
            np.array([self.random.randrange(9) for _ in range(count)], np.int32),
            starts if scheduled.scheduled_spec_decode_tokens else None,
        )  # fmt: skip
        arrived = None
        if self.cell.connector:
            loads, sends = (
                {name for name in names if self.random.random() < 0.4}
                for names in (self.theirs.connector.loading, self.theirs.connector.sending)
            )
            for scheduler in (self.theirs, self.ours):
                scheduler.connector.loading -= loads
                scheduler.connector.sending -= sends
            failed, self.failed = self.failed, set()
            if not self.cell.ahead and self.random.random() < 0.05:
                failed = {self.random.randint(1, self.cell.blocks)}
            arrived = KVConnectorOutput(
                finished_recving=loads, finished_sending=sends, invalid_block_ids=failed
            )
        return ModelRunnerOutput(
            list(self.batch), {name: row for row, name in enumerate(self.batch)}, sampled,
            logprobs if self.random.random() < 0.9 else None, kv_connector_output=arrived,
            num_nans_in_logits=self.nan,
        )  # fmt: skip

    def token(self) -> int:
        odd = (STOP, EOS, REFUSED) if self.cell.grammars else (STOP, EOS)
        return self.random.choice(odd) if self.random.random() < 0.03 else self.random.randrange(2)

    @staticmethod
    def copy(produced: object) -> object:
        """Return lists of its own: vLLM cuts those of the tokens."""
        sampled = [list(tokens) for tokens in produced.sampled_token_ids]
        return dataclasses.replace(produced, sampled_token_ids=sampled)

    def draft(self, begun: Begun) -> None:
        """Give drafts to those that were in a step."""
        from vllm.v1.outputs import DraftTokenIds

        names = [name for name in begun.theirs.num_scheduled_tokens if self.random.random() < 0.9]
        drafts = [[self.token() for _ in range(self.random.randint(0, self.cell.drafts))] for _ in names]
        for scheduler in (self.theirs, self.ours):
            scheduler.update_draft_token_ids(DraftTokenIds(list(names), [list(each) for each in drafts]))
        self.same_state()

    def same_state(self) -> None:
        theirs, ours = state_of(self.theirs), state_of(self.ours)
        assert theirs == ours, differences(theirs, ours)


def is_short(request: object) -> bool:
    """Say whether a request goes the short way while it decodes."""
    return not request.use_structured_output and request.sampling_params.repetition_detection is None


def plain_fields(value: object) -> dict[str, object]:
    """Return a dataclass's fields by name."""
    return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
