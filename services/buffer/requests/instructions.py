"""Instructions of the request machine."""

from __future__ import annotations

from seer.common.group_events import GroupClosed, GroupOpened, RequestProgress
from seer.services.buffer import events


class Dispatch(events.Row, frozen=True):
    """Send the next chunk of a request to an instance, with the acceptance rates of its drafts if known.

    Drafts of a `probe` have priority.
    """

    instance: str
    request_id: str
    attempt: int
    max_new_tokens: int
    acceptance: list[int] = []
    probe: bool = False


class Drop(events.Row, frozen=True):
    """Have an instance abort a chunk."""

    instance: str
    request_id: str
    attempt: int


class Keep(events.Row, frozen=True):
    """Append the tokens of the ended chunk to its request's output; `finish` is empty if it goes on."""

    request_id: str
    finish: str = ""
    stop_reason: str = ""


class Restore(events.Row, frozen=True):
    """Set the outputs of a group to what an earlier life of the buffer kept of them."""

    group_id: str


class Take(events.Row, frozen=True):
    """Store a prompt of the current submission: its group is held or opened."""

    group_id: str
    prompt_id: str


class Accept(events.Row, frozen=True):
    """Tell the trainer that these prompts are accepted, and for which weight version."""

    life: bytes
    rollout_id: str
    prompt_ids: list[str]
    submission: int = 0
    weight_version: int = -1


class Refuse(events.Row, frozen=True):
    """Tell the trainer that these prompts will not be completed, and why.

    `discarded`: tokens that had been generated for each; empty: none.
    """

    life: bytes
    rollout_id: str
    prompt_ids: list[str]
    code: str
    message: str
    submission: int = 0
    discarded: list[int] = []


class Deliver(events.Row, frozen=True):
    """Send a finished group to its trainer: again, if that submitted it again."""

    life: bytes
    group_id: str


class Forget(events.Row, frozen=True):
    """Free everything that is stored about a group."""

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
