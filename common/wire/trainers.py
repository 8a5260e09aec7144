"""Between trainers and the buffer: prompts in, finished groups out.

Messages about weights and sleep are in `weights.py`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from seer.common.types import Capacity, FinishReason, InstanceStats, SamplingParams
from seer.common.wire.base import (
    MAX_GROUP_SIZE,
    Goodbye,
    Hello,
    Logprobs,
    Message,
    Refused,
    ShortStr,
    SubmissionNumber,
    Tokens,
    Welcome,
)
from seer.common.wire.weights import (
    OpenSpool,
    Sleep,
    Slept,
    SpoolData,
    SpoolState,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
)

MAX_PROMPTS = 4096
"""Most prompts of one `Submit`: handling one message must not delay the others."""


class Submit(Message, tag=True):
    """A batch of prompts of one rollout, at most `MAX_PROMPTS`. `tokens` is flat, split by `lengths`.

    A rollout may be submitted in several messages; `prompt_ids` must be unique over all of them.
    Submitting a prompt id again with the same content is harmless: it is answered again. It waits for weights
    of `weight_version`, and is refused when the live ones are later; -1: those that the rollout began with,
    or whatever is live. `submission` numbers the trainer's calls of `submit`, and every answer
    repeats it: a rollout id that is submitted again with other content ends its earlier submission. 0: the
    client does not number them, and has one.
    """

    rollout_id: ShortStr
    rollout_number: int
    seed: int
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUP_SIZE)]
    sampling: SamplingParams
    prompt_ids: list[ShortStr]
    lengths: list[int]
    tokens: Tokens
    weight_version: int = -1
    submission: SubmissionNumber = 0


class Accepted(Message, tag=True):
    """These prompts were checked and queued, under weights of this version."""

    rollout_id: ShortStr
    prompt_ids: list[ShortStr]
    submission: SubmissionNumber = 0
    weight_version: int = -1


class Cancel(Message, tag=True):
    """Abort a rollout's unfinished prompts: the named ones, or all when the list is empty.

    Only those of this `submission`; 0: of whichever it is.
    """

    rollout_id: ShortStr
    prompt_ids: list[ShortStr] = []
    submission: SubmissionNumber = 0


class Acknowledge(Message, tag=True):
    """The trainer holds these groups of this submission (0: any); the buffer may forget them."""

    rollout_id: ShortStr
    prompt_ids: list[ShortStr]
    submission: SubmissionNumber = 0


class StatusRequest(Message, tag=True):
    """Ask for a `Status`."""


class GroupDone(Message, tag=True):
    """All responses of one prompt, in index order; `tokens`/`logprobs` are flat over responses.

    `stop_reasons[i]` is the stop string or the stop token id (as text) that ended response i,
    empty when it ran to max_tokens. One weight version for the whole group, by construction. `submission` is
    that of the `Submit` it answers, `params_digest` the digest of what was asked for (`ids.params_digest`).
    """

    rollout_id: ShortStr
    prompt_id: ShortStr
    weight_version: int
    finish_reasons: list[FinishReason]
    stop_reasons: list[str]
    lengths: list[int]
    tokens: Tokens
    logprobs: Logprobs
    chunks: int = 0
    migrations: int = 0
    preemptions: int = 0
    weights_digest: ShortStr = ""
    submission: SubmissionNumber = 0
    params_digest: int = 0


class Progress(Message, tag=True):
    """A rollout's counters, sent to its trainer from time to time.

    `finish_times` are seconds since submission at which requests finished since the last
    `Progress`, for tail statistics.
    """

    rollout_id: ShortStr
    requests: int
    finished: int
    groups: int
    groups_finished: int
    tokens: int
    chunks: int
    migrations: int
    preemptions: int
    running: int
    finish_times: list[float] = []
    submission: SubmissionNumber = 0


class InstanceStatus(Message, tag=True):
    """One registered instance as the buffer sees it; `restarts`: its earlier incarnations."""

    name: ShortStr
    capacity: Capacity
    stats: InstanceStats
    chunks: int
    reserved_blocks: int
    versions: dict[str, str] = {}
    restarts: int = 0


class Status(Message, tag=True):
    """A buffer's state; answer to `StatusRequest`. Counters are totals since it started.

    `quarantined`: engines that get no work, with the reason. `asleep`: a trainer has put all engines to
    sleep. `requests_held` wait to be opened: for weights, an engine, or the end of sleep. `services` are
    the other services' endpoints as the buffer's configuration has them; `pool` in it is the KV pool
    master's metrics address. `engines` counts those that are there: `instances`, and those that load weights,
    sleep or are quarantined (0: an older buffer does not count them).
    """

    name: ShortStr
    incarnation: int
    policy: ShortStr
    instances: list[InstanceStatus]
    rollouts: int
    requests_waiting: int
    requests_running: int
    counters: dict[str, int] = {}
    uptime_seconds: float = 0.0
    services: dict[str, str] = {}
    weight_version: int = 0
    weights_digest: ShortStr = ""
    quarantined: dict[str, str] = {}
    asleep: bool = False
    requests_held: int = 0
    engines: int = 0


TrainerToBuffer = (
    Hello
    | Submit
    | Cancel
    | Acknowledge
    | StatusRequest
    | Goodbye
    | UpdateWeights
    | OpenSpool
    | SpoolData
    | Sleep
)
BufferToTrainer = (
    Welcome
    | Refused
    | Accepted
    | GroupDone
    | Progress
    | Status
    | WeightsLive
    | WeightsFailed
    | SpoolState
    | Slept
)
