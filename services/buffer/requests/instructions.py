"""Instructions of the request machine."""

from __future__ import annotations

from seer.common import wire
from seer.services.buffer import events


class Dispatch(events.Row, frozen=True):
    """Send the next chunk of a request to an instance, with the acceptance rates of its drafts if known.

    Drafts of a `probe` have priority. `stream`: its tokens are wanted as they are generated.
    """

    instance: str
    request_id: str
    attempt: int
    max_new_tokens: int
    acceptance: list[int] = []
    probe: bool = False
    stream: bool = False


class Keep(events.Row, frozen=True):
    """Append the tokens of a chunk to its request's output; `finish` is empty if the request goes on."""

    request_id: str
    finish: str = ""
    stop_reason: str = ""


class Stream(events.Row, frozen=True):
    """Send the tokens of a chunk to a trainer's incarnation that wants them before their group."""

    request_id: str
    address: bytes
    submission: int


class Restore(events.Row, frozen=True):
    """Set the outputs of a group to what an earlier incarnation of the buffer kept of them."""

    group_id: str


class Take(events.Row, frozen=True):
    """Store a prompt of the current submission: its group is held or opened."""

    group_id: str
    prompt_id: str


class Deliver(events.Row, frozen=True):
    """Send a finished group to its trainer: again, if that submitted it again."""

    address: bytes
    group_id: str


class Forget(events.Row, frozen=True):
    """Free everything that is stored about a group."""

    group_id: str


Implied = Keep | Stream | Take | Forget | wire.BufferPublished
"""Those that follow from their event alone, and are not logged; most instructions are of these kinds.

Messages to the context service, which say what becomes of groups, are instructions themselves.
"""

Logged = Dispatch | Restore | Deliver | events.ToEngine | events.ToIncarnation
Instruction = Logged | Implied
