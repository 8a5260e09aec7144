"""What the buffer's request machine asks to be done."""

from __future__ import annotations

from seer.common.group_events import GroupClosed, GroupOpened, RequestProgress
from seer.services.buffer import events


class Dispatch(events.Row, frozen=True):
    """Send the next chunk of a request to an instance, with the acceptance of its drafts if known.

    Drafts of a `probe` come first.
    """

    instance: str
    request_id: str
    attempt: int
    max_new_tokens: int
    acceptance: list[int] = []
    probe: bool = False


class Drop(events.Row, frozen=True):
    """Tell an instance to stop a chunk."""

    instance: str
    request_id: str
    attempt: int


class Keep(events.Row, frozen=True):
    """Append the tokens of the chunk that just ended to its request's output; `finish` if it ended so."""

    request_id: str
    finish: str = ""
    stop_reason: str = ""


class Restore(events.Row, frozen=True):
    """Begin the outputs of a group with what an earlier life of the buffer kept of them."""

    group_id: str


class Take(events.Row, frozen=True):
    """Store a prompt of the submission at hand: its group is held, or opened."""

    group_id: str
    prompt_id: str


class Accept(events.Row, frozen=True):
    """Tell the trainer that these prompts are queued, under which weights."""

    life: bytes
    rollout_id: str
    prompt_ids: list[str]
    submission: int = 0
    weight_version: int = -1


class Refuse(events.Row, frozen=True):
    """Tell the trainer that these prompts will not complete, and why."""

    life: bytes
    rollout_id: str
    prompt_ids: list[str]
    code: str
    message: str
    submission: int = 0


class Deliver(events.Row, frozen=True):
    """Send a finished group to its trainer (again, if it resubmitted)."""

    life: bytes
    group_id: str


class Forget(events.Row, frozen=True):
    """Free what is stored of a group."""

    group_id: str


Instruction = (
    Dispatch
    | Drop
    | Keep
    | Restore
    | Take
    | Accept
    | Refuse
    | Deliver
    | Forget
    | GroupOpened
    | RequestProgress
    | GroupClosed
)
