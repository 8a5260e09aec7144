"""An engine without a model: vLLM's batching and memory behaviour, with the tokens of `responses.py`.

Invariants:
- a turn of a response is a function of its key, its position, its images and the weights' digest
  (`responses.py`), but for a fault planted for `seer verify`: chunking, batching and preemption cannot change
  it. As in vLLM, a chunk without its images gets other tokens, and no error;
- `KvModel` decides on memory and batches, so preemptions happen, and are counted, as in vLLM;
- a step lasts `step_seconds` + running * `row_seconds`: it is reported, not slept;
- max_tokens is obeyed, by synthetic responses min_tokens and ignore_eos, too; stop strings and penalties
  have no effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs

from seer.common.beside import PROMPT_LOGPROBS, TOP_LOGPROBS, Array
from seer.common.config import EngineConfig, SharedConfig
from seer.common.errors import EngineError, InvalidField
from seer.common.policy.device_defaults import BLOCK_SIZE, CPU_MAX_NUM_SEQS
from seer.common.sleep import SleepLevel, SleepState
from seer.common.types import Capacity, InstanceStats
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Chunk, ChunkEnd, Generated, PlacedImage, Routes, StepOutput
from seer.services.engine.planted_fault import planted_position
from seer.services.engine.replay.kv_model import LOOKAHEAD_SLOTS, KvModel, Sequence
from seer.services.engine.replay.responses import SyntheticResponses, TraceResponses

IMAGE_TOKENS = 1024
"""Most tokens that an image may take."""

DEFAULT_KV_BLOCKS = 8192
"""Usable blocks when none are configured: 256k tokens at 32 a block."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A queued or running chunk, and all that it will generate."""

    sequence: Sequence
    chunk: Chunk
    token_ids: list[int]
    logprobs: list[float]
    finish: str


class ReplayBackend:
    """See the module's docstring; implements `backend.Backend`."""

    def __init__(self, config: EngineConfig, shared: SharedConfig) -> None:
        self._config = config
        self._fault_position = planted_position()
        blocks = DEFAULT_KV_BLOCKS if config.kv_blocks is None else config.kv_blocks
        seqs = CPU_MAX_NUM_SEQS if config.max_num_seqs is None else config.max_num_seqs
        block_size = BLOCK_SIZE if shared.block_size is None else shared.block_size
        self._model = KvModel(blocks, block_size, seqs)
        slots = blocks * block_size - LOOKAHEAD_SLOTS
        self._capacity = Capacity(
            kv_blocks=blocks,
            block_size=block_size,
            max_num_seqs=seqs,
            max_model_len=slots if config.max_model_len is None else config.max_model_len,
            image_tokens=IMAGE_TOKENS,
        )
        self._sleeping = SleepState.AWAKE
        self._has_weights = True
        self._runs: dict[str, _Run] = {}
        self._handed_back: list[ChunkEnd] = []
        self._responses: SyntheticResponses | TraceResponses | None = None
        self._salt = 0
        self._model_digest = ""
        self._steps = self._generated = self._prompt = 0

    def start(self) -> None:
        """Read the trace, if any. Raises `EngineError` naming the setting to change."""
        config, capacity = self._config, self._capacity
        if capacity.blocks_for(capacity.max_model_len, 0) > capacity.kv_blocks:
            raise EngineError(
                f"engine.kv_blocks = {capacity.kv_blocks} blocks of {capacity.block_size} cannot hold one "
                f"sequence of engine.max_model_len = {capacity.max_model_len}: raise kv_blocks or lower it"
            )
        for name, value in (
            ("kv_blocks", capacity.kv_blocks),
            ("max_model_len", capacity.max_model_len),
            ("max_num_seqs", capacity.max_num_seqs),
        ):
            if value < 1:
                raise EngineError(f"engine.{name} = {value}: must be 1 or more")
        replay = config.replay
        if replay.trace:
            self._responses = TraceResponses(Path(replay.trace), replay.vocab_size)
        else:
            self._responses = SyntheticResponses(replay.vocab_size, replay.mean_tokens)

    @property
    def capacity(self) -> Capacity:
        """See `Backend.capacity`."""
        return self._capacity

    @property
    def versions(self) -> dict[str, str]:
        """See `Backend.versions`."""
        return {"backend": "replay"}

    def add(self, chunk: Chunk) -> None:
        """See `Backend.add`; a chunk of a known request replaces the older one."""
        if self._responses is None:
            raise EngineError("the replay engine was not started")
        if self._sleeping or not self._has_weights:
            raise EngineError("the replay engine sleeps, or has no weights: wake it, and load weights")
        self._check(chunk)
        chunk = structs.replace(chunk, key=chunk.key ^ self._salt ^ image_salt(chunk.images))
        generated = len(chunk.tokens) - chunk.counts_from
        length = self._responses.length(chunk)
        total = min(length, chunk.sampling.max_tokens)
        if generated >= total:
            raise InvalidField("tokens", generated, f"this engine's turn ends after {total} output tokens")
        count = min(chunk.max_new_tokens, total - generated)
        finish = ""
        if generated + count == total:
            finish = "length" if total < length else "stop"
        token_ids, logprobs = self._responses.part(chunk, generated, count)
        self._plant_fault(chunk, token_ids)
        known = self._runs.pop(chunk.request_id, None)
        if known is not None:
            self._model.remove(known.sequence)
        context = len(chunk.tokens)
        sequence = Sequence(chunk.request_id, context, context + len(token_ids))
        self._model.add(sequence)
        self._runs[chunk.request_id] = _Run(sequence, chunk, token_ids, logprobs, finish)

    def _check(self, chunk: Chunk) -> None:
        context, new, capacity = len(chunk.tokens), chunk.max_new_tokens, self._capacity
        chunk.check_positions()
        if not 0 <= chunk.key < 2**64:
            raise InvalidField("key", chunk.key, "must be an unsigned 64-bit number")
        if chunk.sampling.structured_outputs is not None:
            given = list(chunk.sampling.structured_outputs.given)
            raise InvalidField(
                "sampling.structured_outputs", given, "replay engines cannot constrain outputs"
            )
        if not 1 <= new <= chunk.sampling.max_tokens - (context - chunk.counts_from):
            raise InvalidField("max_new_tokens", new, "must be 1 or more and within sampling.max_tokens")
        if context + new > capacity.max_model_len:
            room = capacity.max_model_len - context
            raise InvalidField(
                "max_new_tokens", new, f"max_model_len leaves {room} after {context} of context"
            )
        vocab = self._config.replay.vocab_size
        if not (min(chunk.tokens) >= 0 and max(chunk.tokens) < vocab):
            raise InvalidField("tokens", max(chunk.tokens), f"token ids must be in [0, {vocab})")

    def _plant_fault(self, chunk: Chunk, token_ids: list[int]) -> None:
        fault, first = self._fault_position, len(chunk.tokens)
        if fault is not None and first <= fault < first + len(token_ids):
            token_ids[fault - first] = (token_ids[fault - first] + 1) % self._config.replay.vocab_size

    def drop(self, request_id: str, attempt: int) -> None:
        """See `Backend.drop`."""
        run = self._runs.get(request_id)
        if run is not None and run.chunk.attempt == attempt:
            self._model.remove(run.sequence)
            del self._runs[request_id]

    def end(self, request_id: str, attempt: int) -> None:
        """See `Backend.end`."""
        run = self._runs.get(request_id)
        if run is None or run.chunk.attempt != attempt:
            return
        sequence = run.sequence
        if left := sequence.end - sequence.length:
            if left == len(run.token_ids):
                return
            del run.token_ids[-left:]
        self._model.remove(sequence)
        self._handed_back.append(self._end(sequence, finish=False))

    def has_work(self) -> bool:
        """See `Backend.has_work`."""
        return bool(self._runs or self._handed_back)

    def step(self) -> StepOutput:
        """See `Backend.step`."""
        handed_back, self._handed_back = self._handed_back, []
        if not self._runs:
            return StepOutput(ended=handed_back)
        step = self._model.step()
        generated = []
        for sequence in step.ran:
            run = self._runs[sequence.name]
            done = sequence.length - sequence.end + len(run.token_ids)
            generated.append(
                Generated(
                    request_id=sequence.name,
                    attempt=run.chunk.attempt,
                    token_ids=run.token_ids[done - 1 : done],
                    logprobs=run.logprobs[done - 1 : done],
                    beside=self._beside(run, done - 1),
                )
            )
        self._steps += 1
        self._generated += len(step.ran)
        self._prompt += step.prefilled
        seconds = self._config.replay.step_seconds + len(step.ran) * self._config.replay.row_seconds
        ended = handed_back + [self._end(sequence) for sequence in step.ended]
        return StepOutput(generated=generated, ended=ended, seconds=seconds)

    def _beside(self, run: _Run, place: int) -> dict[str, Array]:
        """Return what comes beside the token in a place of a chunk, and with its first beside the prompt."""
        found, vocab, chunk = {}, self._config.replay.vocab_size, run.chunk
        tokens, logprobs, top = run.token_ids, run.logprobs, chunk.sampling.top_logprobs
        if top is not None:
            one = slice(place, place + 1)
            found[TOP_LOGPROBS] = made_up_alternatives(tokens[one], logprobs[one], top, vocab)
        if chunk.prompt_logprobs is not None and place == 0:
            prompt = chunk.tokens[1:]
            own = [-(token % 64) / 32 for token in prompt]
            found[PROMPT_LOGPROBS] = made_up_alternatives(prompt, own, chunk.prompt_logprobs, vocab)
        return found

    def _end(self, sequence: Sequence, *, finish: bool = True) -> ChunkEnd:
        run = self._runs.pop(sequence.name)
        routes = None
        if run.chunk.routes_from is not None:
            read = [*run.chunk.tokens, *run.token_ids][run.chunk.routes_from : -1]
            routes = made_up_routes(read)
        return ChunkEnd(
            request_id=sequence.name,
            attempt=run.chunk.attempt,
            finish=run.finish if finish else "",
            stop_reason=str(run.token_ids[-1]) if finish and run.finish == "stop" else "",
            preemptions=sequence.preemptions,
            routes=routes,
        )

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """See `Backend.feed`; replay does not draft."""

    def forget(self, group_ids: Iterable[str]) -> None:
        """See `Backend.forget`."""

    def bind_weights(self, digest: str) -> None:
        """Note the digest of the model that it is started with; no KV is shared."""
        self._model_digest = digest

    def lay_out_weights(self, folder: Path | None, digest: str) -> None:
        """See `Backend.lay_out_weights`; nothing is."""

    def lays_out(self) -> bool:
        """See `Backend.lays_out`."""
        return False

    def load_weights(self, folder: Path, digest: str, base: Path | None = None) -> None:
        """See `Backend.load_weights`: other weights give other responses."""
        if not folder.is_dir():
            raise EngineError(f"there is no folder {folder}")
        if self._sleeping is SleepState.ASLEEP:
            raise EngineError("the replay engine's weights sleep: wake them first")
        self._salt = salt_of(digest) if digest != self._model_digest else 0
        self._has_weights = True

    def receive_weights(self, folder: Path, engine: str, digest: str) -> None:
        """See `Backend.receive_weights`: it has no weights, and needs nothing of the trainer."""
        self.load_weights(folder, digest)

    def sleep(self, state: SleepState, level: SleepLevel) -> None:
        """See `Backend.sleep`: there is no memory to free, but adding a chunk is an error then."""
        self._sleeping = state
        self._has_weights = self._has_weights and not (state is SleepState.ASLEEP and level > 1)

    def stats(self) -> InstanceStats:
        """See `Backend.stats`."""
        return InstanceStats(
            steps=self._steps,
            running=len(self._model.running),
            waiting=len(self._model.waiting),
            free_blocks=self._model.free,
            preemptions=self._model.preemptions,
            generated_tokens=self._generated,
            prompt_tokens=self._prompt,
        )

    def close(self) -> None:
        """Nothing to free."""


def made_up_routes(tokens: list[int]) -> Routes:
    """Return expert ids [tokens, 3 layers, 2] for tokens that no model reads: a function of each."""
    places = np.arange(6, dtype=np.int64).reshape(3, 2)
    return ((np.array(tokens, np.int64)[:, None, None] * 7 + places) % 8).astype(np.uint8)


def made_up_alternatives(tokens: list[int], logprobs: list[float], top: int, vocab: int) -> Array:
    """Return alternatives as `common/beside.py` has them: each token is the best, the next ones follow."""
    places, own = np.arange(top), np.array(logprobs)[:, None]
    ids = (np.array(tokens)[:, None] + places) % vocab
    numbers = np.concatenate([np.ones_like(own), ids], axis=1)
    return np.stack([numbers, np.concatenate([own, own - places], axis=1)], axis=1).astype("<f4")


def image_salt(images: Iterable[PlacedImage]) -> int:
    """Return the number that is XORed into the key of a response to a prompt with these images."""
    named = [f"{each.image.name}@{each.place.offset}" for each in images]
    return salt_of(" ".join(named)) if named else 0


def salt_of(digest: str) -> int:
    """Return the number that is XORed into the keys of responses under weights with this digest."""
    return int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=8).digest(), "little")
