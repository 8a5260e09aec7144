"""The requests of one gateway process, from their admission to their groups; and their pause.

Invariants:
- while paused nothing is submitted: requests wait, up to their own deadline;
- what a weight update ended is submitted again once generation is not paused, under the same noise and the
  weights that are live then (`on_update = restart`), or fails (`abort`);
- every request ends in its groups or one error, and is counted: `completed`, `refused`, `failed` or
  `cancelled`; one whose client left is cancelled in the buffer;
- a stream is as any request until tokens of it were handed on: they are not taken back, so a stream whose
  tokens a weight update ended fails, and is counted (`interrupted_streams`);
- a stream whose client reads slowly holds one event, and what its prompts hold (`MAX_STREAMED`);
- at most `most` requests are open; others are told to come again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from seer.client import Delta, Group, SamplingParams
from seer.common.errors import SeerError
from seer.gateway.buffer import Buffer, Sink
from seer.gateway.errors import HttpError, as_http, bad

COUNTERS = (
    "requests", "completed", "refused", "failed", "cancelled", "restarted", "discarded_tokens",
    "interrupted_streams",
)  # fmt: skip
"""Totals since the process started. `restarted` are prompts, each time that an update ended them;
`discarded_tokens` had been generated for them. `interrupted_streams` failed because tokens of theirs had been
sent when an update ended them."""

STOPPING = "the gateway stops: send it to another"

Plan = tuple[SamplingParams, Mapping[str, Sequence[int]]]
"""How prompts are sampled, and their token ids by noise id."""


@dataclass(eq=False, slots=True)
class _Ask:
    """One HTTP request. `under_way`: how many of its submissions the buffer works on.

    `sink` takes what a stream sends, `begun` are the prompts of which it has taken something.
    """

    n: int
    seed: int
    sink: Sink | None = None
    begun: set[str] = field(default_factory=set)
    groups: dict[str, Group] = field(default_factory=dict)
    under_way: int = 0
    aborted: bool = False
    task: asyncio.Task[None] | None = None

    async def hand_on(self, name: str, what: Delta | Group) -> None:
        """Give the sink what came of a prompt."""
        self.begun.add(name)
        if self.sink is not None:
            await self.sink(name, what)


class OpenRequests:
    """`seconds` is the deadline of a request, pauses included; `restart`: see the module's docstring."""

    def __init__(self, buffer: Buffer, *, most: int, seconds: float, restart: bool) -> None:
        self._buffer = buffer
        self._most = most
        self._seconds = seconds
        self._restart = restart
        self._open = asyncio.Event()
        self._open.set()
        self._asks: set[_Ask] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    # --- requests ------------------------------------------------------------------------

    async def run(
        self,
        prompts: Mapping[str, Sequence[int]],
        *,
        n: int,
        sampling: SamplingParams,
        seed: int | None,
        sink: Sink | None = None,
    ) -> dict[str, Group]:
        """Return a group for each prompt, given by noise id; `max_tokens` is lowered to what fits.

        `sink` gets tokens and groups as they come. Raises `HttpError`. If the caller is cancelled, so are the
        prompts.
        """
        if self._closed:
            raise HttpError(503, STOPPING)
        if len(self._asks) >= self._most:
            raise HttpError(503, f"{self._most} requests are open (gateway.max_requests): come again")
        plans = self._plans(prompts, sampling)
        ask = _Ask(n, seed or 0, sink)
        self._asks.add(ask)
        try:
            return await self._result(ask, plans)
        finally:
            self._asks.discard(ask)

    async def stream(
        self, prompts: Mapping[str, Sequence[int]], *, n: int, sampling: SamplingParams, seed: int | None
    ) -> AsyncGenerator[tuple[str, Delta | Group]]:
        """Yield what `run` returns as it comes, by noise id: tokens of a prompt's responses, then its group.

        The group has what was not yielded before, too. Raises `HttpError`. Closed, it cancels the prompts.
        """
        events: asyncio.Queue[tuple[str, Delta | Group] | Exception | None] = asyncio.Queue(1)

        async def hand_on(name: str, what: Delta | Group) -> None:
            await events.put((name, what))

        async def work() -> None:
            end = None
            try:
                await self.run(prompts, n=n, sampling=sampling, seed=seed, sink=hand_on)
            except Exception as error:  # noqa: BLE001 - raised below
                end = error
            await events.put(end)

        task = asyncio.create_task(work())
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _result(self, ask: _Ask, plans: Sequence[Plan]) -> dict[str, Group]:
        ask.task = asyncio.create_task(self._all(ask, plans))
        try:
            done, _ = await asyncio.wait([ask.task], timeout=self._seconds)
        finally:
            if not ask.task.done():
                ask.task.cancel()
                await asyncio.wait([ask.task])
        if ask.aborted:
            raise HttpError(503, "aborted, as generation is paused with mode=abort: send it again")
        if not done:
            late = f"not finished within {self._seconds:g} s (gateway.request_seconds)"
            raise (
                HttpError(504, late)
                if self._open.is_set()
                else HttpError(503, f"{late}: generation is paused")
            )
        ask.task.result()
        return ask.groups

    def _plans(self, prompts: Mapping[str, Sequence[int]], sampling: SamplingParams) -> list[Plan]:
        """Return the prompts by the sampling that they get: how much of `max_tokens` fits depends on them."""
        capacities = self._buffer.capacities()
        limits: dict[int, dict[str, Sequence[int]]] = {}
        for name, ids in prompts.items():
            room = max(each.room(len(ids)) for each in capacities)
            if room < 1:
                raise bad("prompt", f"{len(ids)} tokens", "is longer than any engine can take")
            limits.setdefault(min(room, sampling.max_tokens), {})[name] = ids
        for limit in limits:
            if sampling.min_tokens > limit:
                raise bad(
                    "min_tokens", sampling.min_tokens, f"must not exceed max_tokens, of which {limit} fit"
                )
        return [(replace(sampling, max_tokens=limit), ids) for limit, ids in limits.items()]

    async def _all(self, ask: _Ask, plans: Sequence[Plan]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for plan in plans:
                    tasks.create_task(self._until_done(ask, plan))
        except ExceptionGroup as several:
            first: Exception = several
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            raise (as_http(first) if isinstance(first, SeerError) else first) from several

    async def _until_done(self, ask: _Ask, plan: Plan) -> None:
        sampling, left = plan
        while left:
            await self._open.wait()
            if self._closed:
                raise HttpError(503, STOPPING)
            self._enter(ask, 1)
            try:
                sample = await self._buffer.generate(
                    left, n=ask.n, sampling=sampling, seed=ask.seed, sink=ask.sink and ask.hand_on
                )
            finally:
                self._enter(ask, -1)
            ask.groups.update(sample.groups)
            left = {name: ids for name, ids in left.items() if name not in ask.groups}
            if left:
                self.counters["discarded_tokens"] += sample.discarded
                if not self._restart:
                    raise HttpError(
                        503, "aborted by a weight update (gateway.on_update = abort): send it again"
                    )
                if not ask.begun.isdisjoint(left):
                    self.counters["interrupted_streams"] += 1
                    raise HttpError(
                        503, "a weight update ended this stream: what was sent is of the weights before, and "
                        "cannot be taken back: send it again",
                    )  # fmt: skip
                self.counters["restarted"] += len(left)

    def _enter(self, ask: _Ask, change: int) -> None:
        ask.under_way += change
        if self.under_way:
            self._idle.clear()
        else:
            self._idle.set()

    # --- pause ---------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """How many submissions the buffer works on."""
        return sum(ask.under_way for ask in self._asks)

    @property
    def open_requests(self) -> int:
        """How many requests are not answered yet."""
        return len(self._asks)

    def pause(self, *, abort: bool) -> None:
        """Submit nothing until `resume`; with `abort`, end what is under way, too."""
        self._open.clear()
        if abort:
            self.abort()

    def abort(self) -> None:
        """End the requests that the buffer works on; those that wait for the end of a pause go on waiting."""
        for ask in self._asks:
            if ask.under_way and ask.task is not None:
                ask.aborted = True
                ask.task.cancel()

    async def idle(self, seconds: float) -> bool:
        """Wait until the buffer works on nothing of this process; return whether it came to that in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def resume(self) -> None:
        """Submit what waited."""
        self._open.set()

    def close(self) -> None:
        """Take nothing new, and let what waits for the end of a pause fail: nobody will end it."""
        self._closed = True
        self._open.set()
