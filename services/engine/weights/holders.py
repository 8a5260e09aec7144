"""Copying a stream of weights from another engine, and when to leave that one for the next source.

Invariants (tests/unit/test_weight_holders.py, tests/cluster/test_fan_out.py):
- an engine that is dead, or answers nothing, is left after `HOLDER_SECONDS`;
- so is one that has bytes, but sends fewer than `HOLDER_BYTES` in that time;
- one that has no more to send is left only if the buffer has more, and later the more holders there are
  between the two: whoever is nearest to the fault leaves first, and the others need not;
- what was copied so far is kept, and every part has a checksum.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from seer.common import wire
from seer.common.clock import Clock
from seer.common.net.channel import Channel
from seer.services.engine.weights.copies import StreamCopy, copy_parts, on_this_machine

HOLDER_SECONDS = 10.0
"""How often it is judged whether a holder sends enough, and the longest wait for its first answer."""

HOLDER_BYTES = 200_000_000
"""What a holder that has so many must send in that time: 20 MB/s."""

ASK_SECONDS = 5.0
"""Wait for an answer before missing parts are requested again: messages can be lost."""

POLL_SECONDS = 0.05
"""Pause between two questions about a copy that still grows on this machine."""

Connection = Channel[wire.EngineToHolder, wire.HolderToEngine]


class Patience(msgspec.Struct):
    """Whether to stay with a holder: ask once every `HOLDER_SECONDS`. Pure.

    `distance`: holders between this engine and the buffer, that one included. When the interval began, `got`
    bytes were here, and the holder had `had`. `still`: intervals in which it got no further.
    """

    distance: int
    got: int
    had: int = 0
    still: int = 0

    def problem(self, got: int, had: int | None) -> str:
        """Return what is wrong with a holder, and begin the next interval; empty: nothing.

        `got`: bytes that are here; `had`: bytes that the holder had when asked at the interval's beginning;
        None: it did not answer.
        """
        before, self.got = self.got, got
        last, self.had = self.had, had or 0
        if got - before >= HOLDER_BYTES:
            self.still = 0
        elif had is None:
            return f"answered nothing for {HOLDER_SECONDS:g} s"
        elif got < min(had, before + HOLDER_BYTES):
            return f"has {had} bytes of it, and sent only {got - before} in {HOLDER_SECONDS:g} s"
        elif got > before or had > last:
            self.still = 0
        else:
            self.still += 1
        return ""

    @property
    def waited_in_vain(self) -> bool:
        """Whether to leave a holder that got no further, if the buffer has more than is here."""
        return self.still >= self.distance


class Holder:
    """One engine that has a copy of a stream, or makes one.

    `source_has` returns how many bytes the buffer has, and raises `ValueError` if it gave the stream up.
    """

    def __init__(
        self,
        connection: Connection,
        copy: StreamCopy,
        distance: int,
        clock: Clock,
        source_has: Callable[[], Awaitable[int]],
    ) -> None:
        self._connection = connection
        self._copy = copy
        self._clock = clock
        self._source_has = source_has
        self._patience = Patience(distance, copy.arrived)
        self._had: int | None = None
        self._check_at = 0.0

    async def fetch(self) -> None:
        """Copy what is missing. Raises `SeerError`, `ValueError` or `OSError`: then leave this holder."""
        try:
            await self._connection.open(HOLDER_SECONDS)
            self._check_at = self._clock.now() + HOLDER_SECONDS
            if not await self._link():
                await copy_parts(self._copy, self)
        finally:
            self._connection.close()

    async def _link(self) -> bool:
        """Take the holder's file itself once it is whole; False if it is not on this machine."""
        question = wire.OpenSpool(name=self._copy.name)
        while True:
            await self.ask(question)
            state = await self._answer([question], linking=True)
            if not isinstance(state, wire.SpoolState):
                continue
            if state.size and not await asyncio.to_thread(on_this_machine, state):
                return False
            if state.size and state.have >= self._copy.size:
                return await self._copy.link(Path(state.folder))
            await self._clock.sleep(POLL_SECONDS)

    async def ask(self, question: wire.OpenSpool | wire.ReadSpool) -> None:
        """See `copies.Source`."""
        await self._connection.send(question)

    async def next(
        self, questions: Sequence[wire.OpenSpool | wire.ReadSpool]
    ) -> wire.SpoolState | wire.SpoolData:
        """See `copies.Source`."""
        return await self._answer(questions)

    async def _answer(
        self, questions: Sequence[wire.OpenSpool | wire.ReadSpool], *, linking: bool = False
    ) -> wire.SpoolState | wire.SpoolData:
        while True:
            left = self._check_at - self._clock.now()
            if left <= 0:
                await self._check(linking=linking)
                continue
            message = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, ASK_SECONDS)):
                    message = await self._connection.recv()
            if message is None:
                for question in questions:
                    await self.ask(question)
            elif isinstance(message, wire.SpoolState) and message.problem:
                raise ValueError(message.problem)
            elif isinstance(message, wire.SpoolState | wire.SpoolData) and message.name == self._copy.name:
                if isinstance(message, wire.SpoolState):
                    self._had = message.have
                return message

    async def _check(self, *, linking: bool) -> None:
        """Raise `ValueError` if this holder is to be left; else begin the next interval."""
        self._check_at = self._clock.now() + HOLDER_SECONDS
        got, had, self._had = self._copy.arrived, self._had, None
        # Nothing is sent when the holder's own file is taken: what it has counts as here.
        problem = self._patience.problem(max(got, had or 0) if linking else got, had)
        if problem:
            raise ValueError(problem)
        if self._patience.waited_in_vain and await self._source_has() > max(got, had or 0):
            raise ValueError(f"got no further for {self._patience.still * HOLDER_SECONDS:g} s")
        await self.ask(wire.OpenSpool(name=self._copy.name))
