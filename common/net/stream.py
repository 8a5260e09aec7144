"""A published stream that a subscriber can join late, lose messages of, and follow exactly.

Invariants:
- every published message carries the publisher's incarnation and a gapless sequence number;
- a subscriber is handed a snapshot first, then exactly the messages after it, in order; on a gap or
  another life of the publisher it is handed a new snapshot, which replaces all it knew;
- a lost last message is noticed too: beacons repeat the latest number every `BEACON_SECONDS`;
- a publisher that is absent is waited for; one of another protocol major is an error;
- a snapshot travels in pages of `PAGE_ROWS`, all of one state: no state is too large to be told. Of a
  reader that takes none for `PAGE_SECONDS` at most `QUEUE_PAGES` are held, and it asks again.

While a snapshot is fetched, the SUB socket's own queue holds the deltas.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar, cast

from msgspec import structs

from seer.common.clock import Clock
from seer.common.errors import Unreachable, WireError
from seer.common.net.channel import Channel
from seer.common.net.handshake import Identity
from seer.common.net.hub import Hub
from seer.common.net.transport.base import Frame, Publisher, Router, Subscriber, Transport
from seer.common.process.log import get_logger
from seer.common.wire import Message, Refused, Sequenced, SnapshotAsked, SnapshotRequest, Welcome
from seer.common.wire.codec import Decoder, encode

BEACON_SECONDS = 1.0
"""A lost last message, or a new life of the publisher, is noticed this soon."""

SNAPSHOT_SECONDS = 0.05
"""Pause after a snapshot: one serves all who asked meanwhile, however often, for it may be large."""

READERS = frozenset({"buffer", "context", "status", "ping"})
"""Roles that may ask for snapshots."""

PAGE_ROWS = 4000
"""Entries of each kind in a page: half a megabyte, and less than a header's bound with the longest ids."""

PAGE_SECONDS = 1.0
"""Longest wait for room for a page: whoever does not read must ask again."""

QUEUE_PAGES = 16
"""Bound on what is queued for one reader of snapshots."""

FETCH_SECONDS = 5.0
"""Longest wait for a snapshot, or its next page, before all of it is asked for again."""

RETRY_SECONDS = (0.1, 5.0)
"""First and longest pause after a snapshot could not be fetched."""

RETIRED_SECONDS = 5.0
"""Messages of a past life may lie in the queue and are ignored this long; not for ever, so that a
life taken for past by mistake is followed again at one of its beacons."""

_log = get_logger()


class Numbered(Protocol):
    """A page of a snapshot: the state after message `sequence` of life `incarnation`."""

    incarnation: int
    sequence: int
    page: int
    pages: int


P = TypeVar("P", bound=Message)
S = TypeVar("S", bound=Numbered)
T = TypeVar("T")


class StreamPublisher(Generic[P, S]):
    """Publishes deltas and serves snapshots.

    `snapshot(incarnation, sequence)` copies the state after message `sequence` at once, and returns
    its pages, which may be made one by one. `publish` never
    suspends, so a server that changes its state and publishes the change without awaiting anything
    else in between never serves a snapshot that is ahead of its number.
    """

    def __init__(
        self, publisher: Publisher, router: Router, me: Identity, snapshot: Callable[[int, int], Iterable[S]]
    ) -> None:
        self._publisher = publisher
        self._hub: Hub[Message, SnapshotAsked] = Hub(router, me, SnapshotAsked, True, READERS)
        self._incarnation = me.incarnation
        self._sequence = 0
        self._snapshot = snapshot
        self._askers: set[bytes] = set()
        self._asked = asyncio.Event()

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

    def close(self) -> None:
        """Close both sockets; idempotent."""
        self._publisher.close()
        self._hub.close()

    def _number(self) -> list[Frame]:
        return encode(Sequenced(incarnation=self._incarnation, sequence=self._sequence))

    async def _listen(self) -> None:
        while True:
            identity, message = await self._hub.recv()
            if isinstance(message, SnapshotRequest):
                self._askers.add(identity)
                self._asked.set()

    async def _answer(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            askers, self._askers = self._askers, set()
            began = asyncio.get_running_loop().time()
            for page in self._snapshot(self._incarnation, self._sequence):
                frames = encode(cast("Message", page))
                took = await asyncio.gather(*(self._send_page(asker, frames) for asker in askers))
                askers = {asker for asker, taken in zip(askers, took, strict=True) if taken}
                if not askers:
                    break
                await asyncio.sleep(0)
            # Making one takes time from all else: no more than half of it.
            took_seconds = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(SNAPSHOT_SECONDS, took_seconds))

    async def _send_page(self, asker: bytes, frames: list[Frame]) -> bool:
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                return await self._hub.send_frames(asker, frames)
        except TimeoutError:
            return False

    async def _send_beacons(self) -> None:
        while True:
            await self._publisher.send(self._number())
            await asyncio.sleep(BEACON_SECONDS)


class StreamSubscriber(Generic[P, S]):
    """Follows a stream. One task may receive; cancelling it loses nothing but time."""

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
        self._at: Sequenced | None = None
        self._in_step = False
        self._doubtful: set[int] = set()
        self._retired: dict[int, float] = {}
        self._complained: set[str] = set()

    def __aiter__(self) -> AsyncIterator[S | P]:
        return self

    async def __anext__(self) -> S | P:
        return await self.recv()

    async def recv(self) -> S | P:
        """Return a snapshot, which replaces all state, or the next delta.

        Waits as long as the publisher is absent; raises `ProtocolMismatch` when it refuses us.
        """
        if self._socket is None:
            self._socket = await self._transport.subscriber(self._endpoints[0])
        while self._in_step:
            delta = self._follow(await self._socket.recv())
            if delta is not None:
                self.counters["deltas"] += 1
                return delta
        snapshot = await self._fetch()
        self._step_into(snapshot)
        self.counters["snapshots"] += 1
        return snapshot

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._socket is not None:
            self._socket.close()

    def _follow(self, frames: list[Frame]) -> P | None:
        """Return the delta if it is the next one; leave step when something is missing."""
        try:
            number = self._numbers.decode(frames[:1])
            at = self._at
            if at is None or self._clock.now() < self._retired.get(number.incarnation, 0.0):
                return None
            beacon = len(frames) == 1
            expected = at.sequence if beacon else at.sequence + 1
            if number.incarnation != at.incarnation:
                self._lose_step("restarts", number)
            elif number.sequence > expected:
                self._lose_step("gaps", number)
            elif number.sequence == expected and not beacon:
                self._at = number
                return self._deltas.decode(frames[1:])
        except WireError as error:
            self.counters["malformed"] += 1
            self._complain("message dropped", str(error))
        return None

    def _lose_step(self, why: str, number: Sequenced) -> None:
        self._in_step = False
        self._doubtful = {number.incarnation}
        self.counters[why] += 1
        _log.info("fetching a snapshot", endpoint=self._endpoints[0], why=why)

    def _step_into(self, snapshot: S) -> None:
        # The snapshot was asked for after these lives were seen: if it is of another, they are past.
        until = self._clock.now() + RETIRED_SECONDS
        past = self._doubtful | ({self._at.incarnation} if self._at else set())
        self._retired = dict.fromkeys(past - {snapshot.incarnation}, until)
        self._at = Sequenced(incarnation=snapshot.incarnation, sequence=snapshot.sequence)
        self._in_step = True

    async def _fetch(self) -> S:
        pause, longest = RETRY_SECONDS
        while True:
            try:
                return await self._ask()
            except (Unreachable, TimeoutError) as error:
                self.counters["retries"] += 1
                detail = str(error) or f"no snapshot within {FETCH_SECONDS:g} s"
                self._complain("publisher does not answer, trying on", detail)
            await self._clock.sleep(pause)
            pause = min(2 * pause, longest)

    async def _ask(self) -> S:
        # A connection per snapshot: what it answers was certainly asked after the gap was seen.
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

    def _complain(self, problem: str, detail: str) -> None:
        if problem not in self._complained:
            self._complained.add(problem)
            _log.warning(problem, endpoint=self._endpoints[0], detail=detail)


def page_count(*rows: int) -> int:
    """Return how many pages hold so many entries of each kind: at least one."""
    return max(1, -(-max(rows) // PAGE_ROWS))


def page_of(rows: Sequence[T], page: int) -> Sequence[T]:
    """Return the entries of one page."""
    return rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]


def _version(page: Numbered) -> tuple[int, int, int]:
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
