"""A PUB/SUB stream of changes that a subscriber can join late and follow exactly, though messages may be
lost.

Invariants:
- every published message carries the publisher's incarnation and a gapless sequence number;
- a subscriber gets a snapshot first, then exactly the messages after it, in order; after a gap, or a
  restart of the publisher, it gets a new snapshot, which replaces all state;
- a lost last message is noticed too: beacons repeat the latest number every `BEACON_SECONDS`;
- a publisher that is absent is waited for; one of another protocol major is an error;
- a snapshot is sent in pages of `PAGE_ROWS`, all of the same state, so its size is not limited. For a reader
  that reads none for `PAGE_SECONDS` at most `QUEUE_PAGES` are queued, and it requests a snapshot again.

While a snapshot is fetched, the SUB socket's own queue holds the deltas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar, cast

from msgspec import structs

from seer.common.clock import Clock
from seer.common.errors import Unreachable, WireError
from seer.common.net.channel import Channel
from seer.common.net.hub import Hub
from seer.common.net.identity import Identity
from seer.common.net.transport.base import Frame, Publisher, Router, Subscriber, Transport
from seer.common.process.log import get_logger
from seer.common.wire import (
    Message,
    Refused,
    Sequenced,
    SnapshotAsked,
    SnapshotRequest,
    StatusRequest,
    Welcome,
)
from seer.common.wire.codec import Decoder, encode

BEACON_SECONDS = 1.0
"""Interval of beacons: a lost last message, or a restart of the publisher, is noticed this soon."""

SNAPSHOT_SECONDS = 0.05
"""Pause between two snapshots, which may be large: one answers all requests that came meanwhile."""

READER_ROLES = frozenset({"buffer", "context", "status", "ping"})
"""Roles that may request snapshots."""

PAGE_ROWS = 4000
"""Entries of each kind in a page: half a megabyte; with the longest ids it still fits a message's header."""

PAGE_SECONDS = 1.0
"""Longest wait for room for a page: a reader that does not read must request again."""

QUEUE_PAGES = 16
"""Bound on pages queued for one reader of snapshots."""

FETCH_SECONDS = 5.0
"""Longest wait for a snapshot, or its next page, before all of it is requested again."""

RETRY_SECONDS = (0.1, 5.0)
"""First and longest pause after a snapshot could not be fetched."""

RETIRED_SECONDS = 5.0
"""Messages of a publisher's earlier incarnation may still be queued, and are ignored this long. Not for ever:
one that was taken for an earlier one by mistake is followed again at its next beacon."""

_log = get_logger()


class SnapshotPage(Protocol):
    """A page of a snapshot: the state after message `sequence` of the publisher's `incarnation`."""

    incarnation: int
    sequence: int
    page: int
    pages: int


P = TypeVar("P", bound=Message)
S = TypeVar("S", bound=SnapshotPage)
T = TypeVar("T")


class StreamPublisher(Generic[P, S]):
    """Publishes deltas and serves snapshots.

    `snapshot(incarnation, sequence)` copies the state after message `sequence` at once, and returns its
    pages, which may be encoded one by one. `publish` never suspends: a server that changes its state and
    publishes the change without another await in between never serves a snapshot ahead of its number.
    `status` answers a `StatusRequest`; without it there is no answer.
    """

    def __init__(
        self,
        publisher: Publisher,
        router: Router,
        me: Identity,
        snapshot: Callable[[int, int], Iterable[S]],
        status: Callable[[], Message] | None = None,
    ) -> None:
        self._publisher = publisher
        self._hub: Hub[Message, SnapshotAsked] = Hub(router, me, SnapshotAsked, True, READER_ROLES)
        self._incarnation = me.incarnation
        self._sequence = 0
        self._snapshot, self._status = snapshot, status
        self._requesters: set[bytes] = set()
        self._requested = asyncio.Event()

    @property
    def counters(self) -> dict[str, int]:
        """Messages published, and the snapshot socket's counters."""
        return {"published": self._sequence, **self._hub.counters}

    async def publish(self, message: P) -> None:
        """Publish one delta."""
        self._sequence += 1
        await self._publisher.send([*self._number(), *encode(message)])

    async def serve(self) -> None:
        """Answer snapshot requests and send beacons until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._answer())
            tasks.create_task(self._send_beacons())

    def _number(self) -> list[Frame]:
        return encode(Sequenced(incarnation=self._incarnation, sequence=self._sequence))

    async def _listen(self) -> None:
        while True:
            identity, message = await self._hub.recv()
            if isinstance(message, SnapshotRequest):
                self._requesters.add(identity)
                self._requested.set()
            elif isinstance(message, StatusRequest) and self._status is not None:
                await self._hub.reply(identity, self._status())

    async def _answer(self) -> None:
        while True:
            await self._requested.wait()
            self._requested.clear()
            requesters, self._requesters = self._requesters, set()
            began = asyncio.get_running_loop().time()
            for page in self._snapshot(self._incarnation, self._sequence):
                frames = encode(cast("Message", page))
                took = await asyncio.gather(*(self._send_page(requester, frames) for requester in requesters))
                requesters = {requester for requester, taken in zip(requesters, took, strict=True) if taken}
                if not requesters:
                    break
                await asyncio.sleep(0)
            # Snapshots are made in the event loop: they take at most half of its time.
            took_seconds = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(SNAPSHOT_SECONDS, took_seconds))

    async def _send_page(self, requester: bytes, frames: list[Frame]) -> bool:
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                return await self._hub.send_frames(requester, frames)
        except TimeoutError:
            return False

    async def _send_beacons(self) -> None:
        while True:
            await self._publisher.send(self._number())
            await asyncio.sleep(BEACON_SECONDS)


class StreamSubscriber(Generic[P, S]):
    """Follows a stream. One task may receive; it may be cancelled."""

    def __init__(
        self,
        transport: Transport,
        pub_endpoint: str,
        snapshot_endpoint: str,
        me: Identity,
        published_union: object,
        snapshot_union: object,
        clock: Clock,
    ) -> None:
        self.counters = {"deltas": 0, "snapshots": 0, "gaps": 0, "restarts": 0, "malformed": 0, "retries": 0}
        self._transport = transport
        self._endpoints = (pub_endpoint, snapshot_endpoint)
        self._me = me
        self._numbers: Decoder[Sequenced] = Decoder(Sequenced)
        self._deltas: Decoder[P] = Decoder(published_union)
        self._snapshot_union = snapshot_union
        self._clock = clock
        self._socket: Subscriber | None = None
        self._position: Sequenced | None = None
        self._synced = False
        self._suspect: set[int] = set()
        self._retired: dict[int, float] = {}
        self._warned: set[str] = set()

    async def recv(self) -> S | P:
        """Return a snapshot, which replaces all state, or the next delta.

        Waits as long as the publisher is absent; raises `ProtocolMismatch` when it refuses us.
        """
        if self._socket is None:
            self._socket = await self._transport.subscriber(self._endpoints[0])
        while self._synced:
            delta = self._follow(await self._socket.recv())
            if delta is not None:
                self.counters["deltas"] += 1
                return delta
        snapshot = await self._fetch()
        self._start_from(snapshot)
        self.counters["snapshots"] += 1
        return snapshot

    def _follow(self, frames: list[Frame]) -> P | None:
        """Return the delta if it is the next one; request a snapshot when something is missing."""
        try:
            number = self._numbers.decode(frames[:1])
            at = self._position
            if at is None or self._clock.now() < self._retired.get(number.incarnation, 0.0):
                return None
            beacon = len(frames) == 1
            expected = at.sequence if beacon else at.sequence + 1
            if number.incarnation != at.incarnation:
                self._resync("restarts", number)
            elif number.sequence > expected:
                self._resync("gaps", number)
            elif number.sequence == expected and not beacon:
                self._position = number
                return self._deltas.decode(frames[1:])
        except WireError as error:
            self.counters["malformed"] += 1
            self._warn_once("message dropped", str(error))
        return None

    def _resync(self, why: str, number: Sequenced) -> None:
        self._synced = False
        self._suspect = {number.incarnation}
        self.counters[why] += 1
        _log.info("fetching a snapshot", endpoint=self._endpoints[0], why=why)

    def _start_from(self, snapshot: S) -> None:
        # The snapshot was requested after these incarnations were seen: those that it does not have are past.
        until = self._clock.now() + RETIRED_SECONDS
        past = self._suspect | ({self._position.incarnation} if self._position else set())
        self._retired = dict.fromkeys(past - {snapshot.incarnation}, until)
        self._position = Sequenced(incarnation=snapshot.incarnation, sequence=snapshot.sequence)
        self._synced = True

    async def _fetch(self) -> S:
        pause, longest = RETRY_SECONDS
        while True:
            try:
                return await self._request_snapshot()
            except (Unreachable, TimeoutError) as error:
                self.counters["retries"] += 1
                detail = str(error) or f"no snapshot within {FETCH_SECONDS:g} s"
                self._warn_once("publisher does not answer, trying again", detail)
            await self._clock.sleep(pause)
            pause = min(2 * pause, longest)

    async def _request_snapshot(self) -> S:
        # A connection per snapshot: then the snapshot was certainly made after the gap was seen.
        channel: Channel[SnapshotRequest, Message] = Channel(
            self._transport, self._endpoints[1], self._me, self._snapshot_union, self._clock
        )
        try:
            await channel.open(FETCH_SECONDS)
            await channel.send(SnapshotRequest())
            return await self._pages(channel)
        finally:
            channel.close()

    async def _pages(self, channel: Channel[SnapshotRequest, Message]) -> S:
        """Return the first snapshot of which all pages arrived. Raises `TimeoutError`, `Unreachable`."""
        pages: dict[int, S] = {}
        while True:
            async with asyncio.timeout(FETCH_SECONDS):
                reply = await channel.recv()
            if isinstance(reply, Welcome):
                await channel.send(SnapshotRequest())
            if isinstance(reply, Welcome | Refused):
                continue
            page = cast("S", reply)
            if _version(page) != _version(next(iter(pages.values()), page)):
                pages = {}
            pages[page.page] = page
            if len(pages) == page.pages:
                return _joined([pages[number] for number in sorted(pages)])
            if page.page + 1 >= page.pages or len(pages) > page.pages:
                raise Unreachable(f"of {page.pages} pages {len(pages)} arrived")

    def _warn_once(self, problem: str, detail: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            _log.warning(problem, endpoint=self._endpoints[0], detail=detail)


def page_count(*rows: int) -> int:
    """Return how many pages these numbers of entries take: at least one."""
    return max(1, -(-max(rows) // PAGE_ROWS))


def page_of(rows: Sequence[T], page: int) -> Sequence[T]:
    """Return the entries of one page."""
    return rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]


def _version(page: SnapshotPage) -> tuple[int, int, int]:
    return page.incarnation, page.sequence, page.pages


def _joined(pages: list[S]) -> S:
    """Return one snapshot with the lists and tables of all pages."""
    whole = pages[0]
    for page in pages[1:]:
        for name, value in structs.asdict(cast("Message", page)).items():
            match getattr(whole, name):
                case list() as rows:
                    rows.extend(value)
                case dict() as table:
                    table.update(value)
    return whole
