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
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from seer.client import Delta, Group
from seer.common.errors import SeerError
from seer.common.wire import Tokens
from seer.gateway.buffer_client import BufferClient, Question, Sink
from seer.gateway.errors import HttpError, as_http, bad
from seer.gateway.group_names import Place

COUNTERS = (
    "requests", "completed", "refused", "failed", "cancelled", "restarted", "discarded_tokens",
    "interrupted_streams",
)  # fmt: skip
"""Totals since the process started. `restarted` are prompts, each time that an update ended them;
`discarded_tokens` had been generated for them. `interrupted_streams` failed because tokens of theirs had been
sent when an update ended them."""

STOPPING = "the gateway stops: send it to another"

Plan = tuple[Question, Mapping[Place, Tokens]]
"""What is asked of prompts, and their token ids by place."""


@dataclass(eq=False, slots=True)
class _OpenRequest:
    """One HTTP request. `under_way`: how many of its submissions the buffer works on.

    `sink` takes what a stream sends, `begun` are the prompts of which it has taken something.
    """

    sink: Sink | None = None
    begun: set[Place] = field(default_factory=set)
    groups: dict[Place, Group] = field(default_factory=dict)
    under_way: int = 0
    aborted: bool = False
    task: asyncio.Task[Any] | None = None

    async def hand_on(self, place: Place, what: Delta | Group) -> None:
        """Give the sink what came of a prompt."""
        self.begun.add(place)
        if self.sink is not None:
            await self.sink(place, what)


class OpenRequests:
    """`seconds` is the deadline of a request, pauses included; `restart`: see the module's docstring.

    `under_way` counts the submissions that the buffer works on.
    """

    def __init__(self, buffer: BufferClient, *, most: int, seconds: float, restart: bool) -> None:
        self._buffer = buffer
        self._most = most
        self._seconds = seconds
        self._restart = restart
        self._open = asyncio.Event()
        self._open.set()
        self._requests: set[_OpenRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self.under_way = 0
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    # --- requests ------------------------------------------------------------------------

    async def run(
        self, prompts: Mapping[Place, Tokens], asks: Question, sink: Sink | None = None
    ) -> dict[Place, Group]:
        """Return a group for each prompt, given by its place; `max_tokens` is lowered to what fits.

        `sink` gets tokens and groups as they come. With a session n is 1. Raises `HttpError`. If the caller
        is cancelled, so are the prompts.
        """
        if self._closed:
            raise HttpError(503, STOPPING)
        if len(self._requests) >= self._most:
            raise HttpError(503, f"{self._most} requests are open (gateway.max_requests): come again")
        plans = self._plans(prompts, asks)
        request = _OpenRequest(sink)
        self._requests.add(request)
        try:
            return await self._result(request, plans)
        finally:
            self._requests.discard(request)

    async def stream(
        self, prompts: Mapping[Place, Tokens], asks: Question
    ) -> AsyncGenerator[tuple[Place, Delta | Group]]:
        """Yield what `run` returns as it comes, by place: tokens of a prompt's responses, then its group.

        The group has what was not yielded before, too. Raises `HttpError`. Closed, it cancels the prompts.
        """
        events: asyncio.Queue[tuple[Place, Delta | Group] | Exception | None] = asyncio.Queue(1)

        async def hand_on(place: Place, what: Delta | Group) -> None:
            await events.put((place, what))

        async def work() -> None:
            end = None
            try:
                await self.run(prompts, asks, hand_on)
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

    async def _result(self, request: _OpenRequest, plans: Sequence[Plan]) -> dict[Place, Group]:
        request.task = asyncio.current_task()
        try:
            async with asyncio.timeout(self._seconds):
                await self._all(request, plans)
        except TimeoutError as error:
            late = f"not finished within {self._seconds:g} s (gateway.request_seconds)"
            if self._open.is_set():
                raise HttpError(504, late) from error
            raise HttpError(503, f"{late}: generation is paused") from error
        except asyncio.CancelledError as error:
            if not request.aborted or request.task is None or request.task.uncancel():
                raise  # the client left
            aborted = "aborted, as generation is paused with mode=abort: send it again"
            raise HttpError(503, aborted) from error
        return request.groups

    def _plans(self, prompts: Mapping[Place, Tokens], asks: Question) -> list[Plan]:
        """Return prompts by their sampling: how much of `max_tokens` fits depends on the prompt."""
        capacities, sampling = self._buffer.capacities(), asks.sampling
        largest, most = (
            max((each.length for each in asks.images), default=0),
            max(each.image_tokens for each in capacities),
        )
        if largest > most:
            raise bad(
                "messages", f"an image of {largest} tokens", f"engines take at most {most}: make it smaller"
            )
        limits: dict[int, dict[Place, Tokens]] = {}
        for place, ids in prompts.items():
            room = max(each.room(len(ids)) for each in capacities)
            if room < 1:
                most = max(each.room(0) for each in capacities) - 1
                fix = f"is longer than any engine can take: prompts of at most {most} tokens"
                raise bad("prompt", f"{len(ids)} tokens", fix)
            limits.setdefault(min(room, sampling.max_tokens), {})[place] = ids
        for limit in limits:
            if sampling.min_tokens > limit:
                raise bad(
                    "min_tokens", sampling.min_tokens, f"must not exceed max_tokens, of which {limit} fit"
                )
        return [
            (replace(asks, sampling=structs.replace(sampling, max_tokens=limit)), ids)
            for limit, ids in limits.items()
        ]

    async def _all(self, request: _OpenRequest, plans: Sequence[Plan]) -> None:
        try:
            if len(plans) == 1:  # nearly always, and a task less
                return await self._until_done(request, plans[0])
            async with asyncio.TaskGroup() as tasks:
                for plan in plans:
                    tasks.create_task(self._until_done(request, plan))
        except SeerError as error:
            raise as_http(error) from error
        except ExceptionGroup as several:
            first: Exception = several
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            raise (as_http(first) if isinstance(first, SeerError) else first) from several

    async def _until_done(self, request: _OpenRequest, plan: Plan) -> None:
        asks, left = plan
        while left:
            while not self._open.is_set():  # also if it was set, and cleared again before this went on
                await self._open.wait()
            if self._closed:
                raise HttpError(503, STOPPING)
            self._enter(request, 1)
            try:
                outcome = await self._buffer.generate(left, asks, request.sink and request.hand_on)
            finally:
                self._enter(request, -1)
            request.groups.update(outcome.groups)
            left = {place: ids for place, ids in left.items() if place not in request.groups}
            if left:
                self.counters["discarded_tokens"] += outcome.discarded
                if not self._restart:
                    raise HttpError(
                        503, "aborted by a weight update (gateway.on_update = abort): send it again"
                    )
                if not request.begun.isdisjoint(left):
                    self.counters["interrupted_streams"] += 1
                    raise HttpError(
                        503, "a weight update ended this stream: what was sent is of the weights before, and "
                        "cannot be taken back: send it again",
                    )  # fmt: skip
                self.counters["restarted"] += len(left)

    def _enter(self, request: _OpenRequest, change: int) -> None:
        request.under_way += change
        self.under_way += change
        if self.under_way:
            self._idle.clear()
        else:
            self._idle.set()

    # --- pause ---------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """How many requests are not answered yet."""
        return len(self._requests)

    def pause(self, *, abort: bool) -> None:
        """Submit nothing until `resume`; with `abort`, end what is under way, too."""
        self._open.clear()
        if abort:
            self.abort()

    def abort(self) -> None:
        """End the requests in the buffer; requests that wait for the end of a pause go on waiting."""
        for request in self._requests:
            # Cancelled twice, it would seem that its client left, and a stream would never hear of its end.
            if request.under_way and request.task is not None and not request.aborted:
                request.aborted = True
                request.task.cancel()

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
