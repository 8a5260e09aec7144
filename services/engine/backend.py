"""The interface between an engine's server and what generates its tokens: vLLM, or a model of it.

Invariants:
- `step` is the only method that takes long; all methods are called from one thread;
- every added chunk ends in exactly one `ChunkEnd` or `ChunkFailure` from `step`, unless it is dropped first;
- a chunk that fails is the only one that its step harms: all others have the tokens that they would have had;
- tokens of a chunk are reported once, in order; the sum of a chunk's reports is its output.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from seer.common.beside import Array
from seer.common.errors import InvalidField, Unsampleable
from seer.common.prepared_image import PreparedImage
from seer.common.sleep import SleepLevel, SleepState
from seer.common.types import Capacity, InstanceStats, Placed, SamplingParams
from seer.services.dgds.client import StreamDelta

Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
"""Expert ids [tokens, layers, experts of a token]; uint16 if a layer has more than 256 experts."""


class PlacedImage(NamedTuple):
    """An image, checked against its name, and where it stands in a chunk's tokens."""

    place: Placed
    image: PreparedImage


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk to run; see `wire.RunChunk`. `tokens` is prompt plus output so far, of all turns.

    It belongs to response `index` of its group; without a group it has no drafts and feeds none. `images` are
    all that stand in the tokens, in order. `routes_from`: from this token on, expert ids are wanted.
    """

    request_id: str
    group_id: str
    index: int = 0
    attempt: int
    key: int
    prompt_len: int
    max_new_tokens: int
    sampling: SamplingParams
    tokens: list[int]
    wait_for_room: bool = False
    acceptance: tuple[float, ...] = ()
    probe: bool = False
    turn_start: int = 0
    parks: bool = False
    images: tuple[PlacedImage, ...] = ()
    routes_from: int | None = None

    @property
    def counts_from(self) -> int:
        """Where this turn's output begins: its limits, stop strings and penalties count from here."""
        return self.turn_start or self.prompt_len

    @property
    def prompt_logprobs(self) -> int | None:
        """`SamplingParams.prompt_logprobs` for the first chunk of a prompt's first response; else None."""
        first = len(self.tokens) == self.counts_from > 1 and self.request_id.endswith("#0")
        return self.sampling.prompt_logprobs if first else None

    def check_positions(self) -> None:
        """Raise `InvalidField` if `prompt_len` or `turn_start` does not lie within the tokens."""
        known = len(self.tokens)
        if not 1 <= self.prompt_len <= known:
            raise InvalidField("prompt_len", self.prompt_len, f"must be from 1 to the {known} tokens given")
        if not self.prompt_len <= self.counts_from <= known:
            fix = f"must be 0, or from prompt_len = {self.prompt_len} to the {known} tokens given"
            raise InvalidField("turn_start", self.turn_start, fix)


class Generated(msgspec.Struct, kw_only=True):
    """New tokens of one chunk from one step, with one logprob each.

    `beside`: what comes beside them, by word (`common/beside.py`); with the first, also beside their prompt.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    logprobs: list[float]
    beside: dict[str, Array] = {}


class ChunkEnd(msgspec.Struct, kw_only=True):
    """A chunk ended: `finish` is "stop", "length" (the turn's own limit) or "" (boundary).

    `stop_reason` is the stop string or the stop token id as text; `preemptions` counts how often
    the chunk was preempted; `cached_tokens` how many context tokens needed no prefill. `drafted` and
    `accepted` count draft tokens verified and accepted, by cell (`common/policy/draft_costs.py`), of all that
    drafted from the same tree; `verified` are both sums of this chunk alone, empty without drafts. `routes`:
    expert ids [tokens, layers, experts of a token] of the context from `Chunk.routes_from` on, but its last
    token, which no model has read yet.
    """

    request_id: str
    attempt: int
    finish: str
    stop_reason: str = ""
    preemptions: int = 0
    cached_tokens: int = 0
    drafted: list[int] = []
    accepted: list[int] = []
    verified: list[int] = []
    routes: Routes | None = None


class ChunkFailure(msgspec.Struct, kw_only=True):
    """A chunk cannot go on, and could not on any engine: it has no next token, or a field that is refused.

    What it had before is void, too.
    """

    request_id: str
    attempt: int
    error: Unsampleable | InvalidField


class StepOutput(msgspec.Struct, kw_only=True):
    """What one step produced. `seconds` is how long it took; a modelled one is still to be waited for."""

    generated: list[Generated] = []
    ended: list[ChunkEnd] = []
    failed: list[ChunkFailure] = []
    seconds: float = 0.0


class Backend(Protocol):
    """An engine: the real one (`vllm/backend.py`) or the model of one (`replay/backend.py`)."""

    def start(self) -> None:
        """Load everything. Raises `EngineError` naming the cause and the fix."""

    @property
    def capacity(self) -> Capacity:
        """What this instance holds; valid after `start`."""

    @property
    def versions(self) -> dict[str, str]:
        """Names and versions of what generates, for reports."""

    def add(self, chunk: Chunk) -> None:
        """Queue a chunk. Raises `InvalidField` for a request this engine cannot run."""

    def drop(self, request_id: str, attempt: int) -> None:
        """Forget a chunk; nothing further is reported of it. Unknown ones are ignored."""

    def end(self, request_id: str, attempt: int) -> None:
        """Have the next step end a chunk as if it were at its limit; one without a token is left alone.

        Its KV is saved for whoever goes on with it; `InstanceStats.pinned_blocks` tells until when.
        """

    def has_work(self) -> bool:
        """Say whether `step` would do anything."""

    def step(self) -> StepOutput:
        """Advance every running chunk by one engine step; may block for the step's duration."""

    def lay_out_weights(self, folder: Path | None, digest: str) -> None:
        """Begin what can be done of `load_weights` beside steps; None: end that, it is not needed any more.

        Until then, or until the next load, this may take the model's memory once more. Whatever goes wrong,
        `load_weights` does all by itself.
        """

    def lays_out(self) -> bool:
        """Say whether weights are still being laid out."""

    def load_weights(self, folder: Path, digest: str, base: Path | None = None) -> None:
        """Replace the live weights by a folder's, whose `digest` was checked; nothing runs meanwhile.

        With a `base`, the folder has a checked adapter, to be merged into the model in the folder `base`.
        Nothing cached of the old ones is used afterwards. Raises `EngineError` when it failed: the
        live weights are undefined then.
        """

    def receive_weights(self, folder: Path, engine: str, digest: str) -> None:
        """Have a trainer write over the live weights, by the plan in `folder`; nothing runs meanwhile.

        `engine`: the name that the trainer expects; `digest`: that of the plan. Raises `EngineError` when it
        failed: the live weights are undefined then. After `EngineBroken` no load can make them defined.
        """

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """Give the draft trees tokens of other responses of the groups that run here."""

    def forget(self, group_ids: Iterable[str]) -> None:
        """Drop the draft trees of these groups; none of their chunks runs here now."""

    def bind_weights(self, digest: str) -> None:
        """Say which weights are live; empty: unknown. Engines with equal digests share KV."""

    def sleep(self, state: SleepState, level: SleepLevel) -> None:
        """Free memory, or take it again, until exactly what `state` says sleeps.

        At level 2 weights that fall asleep lose their values: load some before anything runs. Nothing runs
        meanwhile, and nothing cached is used afterwards. Raises `EngineError`.
        """

    def stats(self) -> InstanceStats:
        """Return current gauges and counters; cheap, called between steps."""

    def close(self) -> None:
        """Free the device; idempotent."""
