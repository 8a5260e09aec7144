"""What happened in a log: chunks, responses, engines' incarnations, weight updates and sleeps.

Times are seconds since 1970, by the clock of the buffer's host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from seer.common.types import Capacity
from seer.services.buffer.requests.events import EngineReported


class End(Enum):
    """What became of a chunk, in the words of the report."""

    KEPT = "kept"
    ENGINE_LOST = "lost with its engine"
    BUFFER_LOST = "lost with the buffer"
    FAILED = "failed"
    DROPPED = "dropped"
    RUNNING = "running when the log ended"


@dataclass(slots=True, eq=False)
class Rollout:
    """One submission of a rollout by its trainer, or all of an open one. `prompts` numbers its prompts' ids.

    `responses` and `prompts` are in order of arrival.
    """

    rollout_id: str
    trainer: str
    submission: int
    submitted: float
    open: bool = False
    prompts: dict[str, int] = field(default_factory=dict)
    responses: list[Response] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def end(self) -> float:
        """When the response's last chunk ended; when the response was submitted, if it had no chunk."""
        return max((chunk.end for chunk in self.chunks), default=self.submitted)


@dataclass(slots=True, eq=False)
class Response:
    """One response. `generated` counts the tokens it has, `finish` says why it ended; "": it has not.

    `prompt` numbers its prompt within the rollout. `max_tokens` is 0 where the log does not say. `trajectory`
    names the group of a turn, whose response `index` is the trajectory; that has its `turns` in order.
    """

    rollout: Rollout
    prompt_id: str
    prompt: int
    index: int
    prompt_len: int = 0
    max_tokens: int = 0
    generated: int = 0
    finish: str = ""
    finished: float | None = None
    submitted: float = 0.0
    trajectory: str = ""
    chunks: list[Chunk] = field(default_factory=list)
    turns: list[Response] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its request's id without the rollout."""
        return f"{self.prompt_id}#{self.index}"


@dataclass(slots=True, eq=False)
class Chunk:
    """One placement: from its dispatch to its end. `slot` counts the chunks beside it on its engine.

    `context` counts the prompt's tokens and the output before it, `blocks` the KV that is booked for it.
    `moved`: the chunk before it ran on another engine. Of `drafted` tokens `accepted` were; 0 while it runs.
    """

    response: Response
    engine: str
    attempt: int
    slot: int
    start: float
    end: float
    context: int
    blocks: int
    moved: bool = False
    how: End = End.RUNNING
    tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end - self.start


@dataclass(slots=True, eq=False)
class EngineIncarnation:
    """One incarnation of an engine. `left` is None while it lasts; `chunks_lost` were lost at its end."""

    name: str
    number: int
    capacity: Capacity
    joined: float
    left: float | None = None
    died: bool = False
    chunks_lost: int = 0

    @property
    def lost(self) -> bool:
        """Whether the incarnation ended before the engine was told to end, as far as a log tells."""
        return self.left is not None and (self.died or bool(self.chunks_lost))


@dataclass(slots=True)
class Speed:
    """The best that an engine has shown in the log: tokens/s, and seconds per token of a lone request.

    0: not measured, or not told by an old log.
    """

    best_rate: float = 0.0
    seconds_alone: float = 0.0


@dataclass(slots=True, eq=False)
class Span:
    """A weight update, to `version`, engines asleep, or no buffer, which counts as `failed`: drawn red."""

    start: float
    end: float
    text: str
    failed: bool = False
    version: int = -1


@dataclass(slots=True, eq=False)
class Timeline:
    """All that happened. `chunks` are in the order of their dispatch, `end` is the time of the last row.

    `speeds` and `reports`, with their times, are by engine. `chunk_size` is the buffer's setting.
    """

    version: str = ""
    policy: str = ""
    end: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    incarnations: list[EngineIncarnation] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    speeds: dict[str, Speed] = field(default_factory=dict)
    reports: dict[str, list[tuple[float, EngineReported]]] = field(default_factory=dict)
    chunk_size: int | None = None
