"""What the buffer's request machine asks to be done."""

from __future__ import annotations

from dataclasses import dataclass, field

from seer.common.group_events import GroupClosed, GroupOpened, RequestProgress


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the next chunk of a request to an instance, with the acceptance of its drafts if known.

    Drafts of a `probe` come first.
    """

    instance: str
    request_id: str
    attempt: int
    max_new_tokens: int
    acceptance: list[int] = field(default_factory=list)
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Tell an instance to stop a chunk."""

    instance: str
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Append the tokens of the chunk that just ended to its request's output."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Take:
    """Store a prompt of the submission at hand: its group is held, or opened."""

    group_id: str
    prompt_id: str


@dataclass(frozen=True, slots=True)
class Accept:
    """Tell the trainer that these prompts are queued, under which weights."""

    life: bytes
    rollout_id: str
    prompt_ids: list[str]
    submission: int = 0
    weight_version: int = -1


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the trainer that these prompts will not complete, and why."""

    life: bytes
    rollout_id: str
    prompt_ids: list[str]
    code: str
    message: str
    submission: int = 0


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send a finished group to its trainer (again, if it resubmitted)."""

    life: bytes
    group_id: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Free what is stored of a group."""

    group_id: str


Instruction = (
    Dispatch
    | Drop
    | Keep
    | Take
    | Accept
    | Refuse
    | Deliver
    | Forget
    | GroupOpened
    | RequestProgress
    | GroupClosed
)
