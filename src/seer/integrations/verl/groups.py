"""Which requests of veRL's single-turn agent loops are submitted together, and under which ids: pure.

veRL runs n sessions (agent loops) per prompt, and each asks for its tokens by itself. Loops of many turns are
in `turns.py`.

Invariants:
- the first requests of a prompt's sessions become one group of n as soon as all sessions have asked or
  ended, or `WAIT_SECONDS` after the first; session i gets response i, even if it asks later;
- a session whose first request differs from its siblings', and every later request, is a group of one;
- prompt ids are functions of the dataset's index, the copy, the session, the turn and the prompt's tokens:
  not of veRL's random uids, nor of when or where a session asks. No two submissions of a step share one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np

from seer.client import Placed
from seer.common import types
from seer.common.prepared_image import PreparedImage
from seer.common.types import SamplingParams

WAIT_SECONDS = 10.0
"""Longest wait for siblings. Sessions begin together: a later one may be waiting for a sibling's end."""

WHOLE, APART, AGAIN, LOOSE = "whole", "apart", "again", "loose"
FIRST, TURN, SEGMENT = "first", "turn", "segment"
KINDS = {
    WHOLE: "whole groups",
    APART: "sessions that differ from their siblings",
    AGAIN: "further requests of single-turn loops",
    FIRST: "first turns",
    TURN: "later turns",
    SEGMENT: "turns with a rewritten history",
    LOOSE: "requests of unknown groups",
}
"""Kinds of submissions, and how reports call them."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """A prompt of one step. `index`: the dataset's; `copy`: how many like it came before in that step."""

    step: int
    validate: bool
    index: str
    copy: int


@dataclass(frozen=True, slots=True)
class Request:
    """What a session asks for; `tokens` are the prompt's, in which `images` stand at `places`."""

    tokens: tuple[int, ...]
    sampling: SamplingParams
    places: tuple[types.Placed, ...] = ()
    images: tuple[PreparedImage, ...] = field(default=(), compare=False)  # their names are in `places`

    @property
    def placed(self) -> list[Placed]:
        """The images in the form that the client takes."""
        pairs = zip(self.images, self.places, strict=True)
        return [Placed(image, place.offset, place.length) for image, place in pairs]


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt to submit for n responses."""

    prompt_id: str
    request: Request
    n: int
    kind: str


@dataclass(frozen=True, slots=True)
class Place:
    """A session's tokens of a turn are response `index` of the submission `prompt_id`."""

    session: int
    turn: int
    prompt_id: str
    index: int


class GroupMachine:
    """The requests of one prompt's n sessions. `turns`: how often each has asked."""

    def __init__(self, key: GroupKey, n: int) -> None:
        self._key = key
        self._n = n
        self._silent = set(range(n))
        self._waiting: dict[int, Request] = {}
        self.turns: Counter[int] = Counter()
        self._whole: Submission | None = None
        self._decided = False
        self.deadline: float | None = None

    def asked(self, session: int, request: Request, now: float) -> list[Submission | Place]:
        """Take a session's next request; return what is to be submitted, and who gets which response."""
        turn = self.turns[session]
        self.turns[session] += 1
        if turn:
            return self._alone(session, request, turn)
        self._silent.discard(session)
        if self._decided:
            return self._late(session, request)
        self._waiting[session] = request
        if self.deadline is None:
            self.deadline = now + WAIT_SECONDS
        return self._decide() if not self._silent else []

    def ended(self, session: int) -> list[Submission | Place]:
        """Take the end of a session, which may never have asked."""
        self._silent.discard(session)
        return self._decide() if not self._silent else []

    def due(self, now: float) -> list[Submission | Place]:
        """Stop waiting for siblings if the deadline has passed."""
        return self._decide() if self.deadline is not None and now >= self.deadline else []

    def _decide(self) -> list[Submission | Place]:
        if self._decided or not self._waiting:
            return []
        self._decided = True
        self.deadline = None
        waiting, self._waiting = self._waiting, {}
        first, *others = waiting.values()
        if all(request == first for request in others):
            self._whole = whole = Submission(prompt_id(self._key, first.tokens), first, self._n, WHOLE)
            return [whole, *(Place(session, 0, whole.prompt_id, session) for session in sorted(waiting))]
        return [each for session in sorted(waiting) for each in self._alone(session, waiting[session], 0)]

    def _late(self, session: int, request: Request) -> list[Submission | Place]:
        if self._whole is not None and request == self._whole.request:
            return [Place(session, 0, self._whole.prompt_id, session)]
        return self._alone(session, request, 0)

    def _alone(self, session: int, request: Request, turn: int) -> list[Submission | Place]:
        name = prompt_id(self._key, request.tokens, f"-s{session}-t{turn}")
        return [Submission(name, request, 1, AGAIN if turn else APART), Place(session, turn, name, 0)]


def prompt_id(key: GroupKey, tokens: tuple[int, ...], part: str = "") -> str:
    """Return the id of a submission, e.g. `train-17-0-5f0c33a2b1d94e77`."""
    mode = "val" if key.validate else "train"
    index = key.index.encode("ascii", "backslashreplace")
    digest = _digest(index, tokens)
    return f"{mode}-{index[:32].decode()}-{key.copy}-{digest}{part}"


def loose_id(request: Request, copy: int) -> str:
    """Return the id of a request of an unknown group, of which so many like it came before."""
    return f"{LOOSE}-{copy}-{_digest(b'', request.tokens)}"


def _digest(index: bytes, tokens: tuple[int, ...]) -> str:
    packed = len(index).to_bytes(8, "little") + index + np.array(tokens, "<i8").tobytes()
    return hashlib.blake2b(packed, digest_size=8).hexdigest()


class Copies:
    """Numbers what comes several times in a step, so that no noise repeats."""

    def __init__(self) -> None:
        self._step: Hashable = None
        self._seen: Counter[Hashable] = Counter()

    def number(self, step: Hashable, items: Iterable[Hashable]) -> list[int]:
        """Return for each item how often it came before in this step."""
        if step != self._step:
            self._step = step
            self._seen.clear()
        numbers = []
        for item in items:
            numbers.append(self._seen[item])
            self._seen[item] += 1
        return numbers
