"""The data-parallel ranks of an engine: which of them runs a chunk, and when all step.

Each rank has a scheduler, KV and requests of its own; the experts of a mixture lie on all. So all ranks run
a step together: one without a request runs a dummy, since the tokens of others may go to its experts. All
have as many drafts in a step, so that the step has one size, and one graph.

Invariants (tests/property/test_ranks.py asserts them, the last four in virtual time):
- a chunk runs where most KV is free of what running chunks may take, on a rank that may run one more if there
  is one; a request comes back to the rank that has its KV cached, if there is room;
- a step's drafts are those that a rank with the most chunks wants;
- steps are granted to all ranks at once, so all run the same ones, in the same order;
- a step is granted while the one before runs, so that no rank waits for the grant; never further ahead;
- work on any rank is run; where there is none, at most `AHEAD` steps more are, all of dummies;
- a rank that does not run a granted step in time is named within the limit: all others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

AHEAD = 2
"""Steps that are granted and not yet run by all: the one that runs, and the next."""

KEPT_HOMES = 10_000
"""How many requests' last ranks are remembered: more than have blocks in a prefix cache."""


class RankPlacement(msgspec.Struct):
    """Places chunks on ranks. `free`: KV blocks of each rank, below 0 while chunks wait there.

    `chunks` counts those of each rank, which runs `seats` at once; `homes`: by request, the rank of its last
    chunk, oldest first.
    """

    free: list[int]
    chunks: list[int]
    seats: int
    homes: dict[str, int] = {}

    @classmethod
    def of(cls, ranks: int, blocks: int, seats: int) -> RankPlacement:
        """Return empty ranks, of `blocks` KV blocks and so many seats each."""
        return cls([blocks] * ranks, [0] * ranks, seats)

    @property
    def room(self) -> int:
        """Blocks that one more chunk may take and begin at once; 0: none may."""
        rooms = zip(self.free, self.chunks, strict=True)
        return max((free for free, chunks in rooms if chunks < self.seats), default=0)

    def place(self, request_id: str, blocks: int) -> int:
        """Return the rank of a request's next chunk, which may take so many blocks, and reserve them."""
        chunks, seats = self.chunks, self.seats
        emptiest = max(
            range(len(self.free)), key=lambda rank: (chunks[rank] < seats, self.free[rank], -chunks[rank])
        )
        home = self.homes.pop(request_id, emptiest)
        rank = home if self.free[home] >= blocks and chunks[home] < seats else emptiest
        self.homes[request_id] = rank
        if len(self.homes) > KEPT_HOMES:
            del self.homes[next(iter(self.homes))]
        self.free[rank] -= blocks
        self.chunks[rank] += 1
        return rank

    def end(self, rank: int, blocks: int) -> None:
        """Give back what a chunk had reserved."""
        self.free[rank] += blocks
        self.chunks[rank] -= 1


class Lockstep:
    """Grants steps, numbered from 1. `seconds`: in which all ranks must run one that has been granted.

    `dummies` and `ran` count, over all ranks, steps without a request, and all.
    """

    def __init__(self, ranks: int, seconds: float) -> None:
        self._seconds = seconds
        self._ran = [0] * ranks
        self._busy = [False] * ranks
        self._wanted = [0] * ranks
        self._sent = [0] * ranks  # the last step that was granted before a rank was sent work
        self._since = 0.0  # when the oldest step that not all have run could begin
        self.granted = 0
        self.dummies = self.ran = 0

    @property
    def done(self) -> int:
        """The last step that all ranks have run."""
        return min(self._ran)

    @property
    def works(self) -> bool:
        """Whether a step is due, or under way."""
        return any(self._busy) or self.done < self.granted

    def work(self, rank: int) -> None:
        """Note that a rank was sent something to run."""
        self._busy[rank] = True
        self._sent[rank] = self.granted

    def grant(self, now: float) -> int | None:
        """Return the number of a step that all ranks are to run next; None: not now."""
        if not any(self._busy) or self.granted - self.done >= AHEAD:
            return None
        if self.granted == self.done:
            self._since = now
        self.granted += 1
        return self.granted

    def drafts(self, chunks: Sequence[int]) -> int:
        """Return how many drafts all requests have after the step that is granted now.

        `chunks`: how many each rank has. All ranks wait for the one with the most: it knows what pays.
        """
        return self._wanted[max(range(len(chunks)), key=chunks.__getitem__)]

    def ended(self, rank: int, *, worked: bool, busy: bool, now: float, wanted: int = 0) -> None:
        """Note that a rank has run a step: whether with a request, and whether it has more to do.

        `wanted`: how many drafts would have paid for its own requests.
        """
        self._wanted[rank] = wanted
        before = self.done
        self._ran[rank] += 1
        if self._ran[rank] > self._sent[rank]:  # else it had not seen yet what it was sent
            self._busy[rank] = busy
        self.ran += 1
        self.dummies += not worked
        if self.done > before:
            self._since = now

    def late(self, now: float) -> Sequence[int]:
        """Return the ranks that have not run a step in time."""
        if self.done == self.granted or now - self._since < self._seconds:
            return ()
        return [rank for rank, ran in enumerate(self._ran) if ran == self.done]
