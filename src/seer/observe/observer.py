"""Asks a buffer how the system is, and its other services, for as long as somebody looks.

Invariants (tests/cluster/test_observer.py):
- every question has a deadline, and an answer to an earlier question is never taken for one to a later;
- a buffer that was away, or was started again, is found again by the next question;
- it asks and does nothing else: an observer's key is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import msgspec

from seer.common import wire
from seer.common.clock import Clock, LoopClock
from seer.common.endpoints import shards
from seer.common.errors import SeerError, Unreachable
from seer.common.ids import new_incarnation
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.common.net.keys import Keys, new_name
from seer.common.net.transport.base import Transport

SERVICE_SECONDS = 1.0
"""How long a context service or a dgds has to answer: what they tell is not worth waiting for."""

_UNIONS: Mapping[str, object] = {"context": wire.ContextSnapshotReply, "dgds": wire.DgdsToEngine}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer's state, and by name the figures of the other services that answered; shards have a number."""

    status: wire.Status
    services: dict[str, wire.ServiceStatus] = {}


class Question:
    """A connection that asks one peer, one question at a time."""

    def __init__(
        self, transport: Transport, endpoint: str, me: Identity, union: object, clock: Clock
    ) -> None:
        self._transport, self._endpoint, self._me, self._union = transport, endpoint, me, union
        self._clock = clock
        self._channel: Channel[wire.StatusRequest, wire.Message] | None = None
        self._turn = asyncio.Lock()

    async def ask(self, seconds: float) -> wire.Message:
        """Return the answer. Raises `Unreachable` after the deadline, or what the peer refuses with."""
        try:
            async with asyncio.timeout(seconds), self._turn:
                try:
                    return await self._ask(seconds)
                except BaseException:  # the answer may still come: the next question has its own connection
                    self.close()
                    raise
        except TimeoutError as error:
            raise Unreachable(f"{self._endpoint} did not answer within {seconds:g} s") from error

    async def _ask(self, seconds: float) -> wire.Message:
        channel = self._channel
        if channel is None:
            me = msgspec.structs.replace(self._me, incarnation=new_incarnation())
            channel = Channel(self._transport, self._endpoint, me, self._union, self._clock)
            self._channel = channel
            await channel.open(seconds)
        await channel.send(wire.StatusRequest())
        while True:
            match await channel.recv():
                case wire.Welcome():  # the question, or its answer, was lost
                    await channel.send(wire.StatusRequest())
                case wire.Status() | wire.ServiceStatus() as answer:
                    return answer

    def close(self) -> None:
        """Close the connection; the next question opens another one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class Observer:
    """Asks the buffer at `endpoint`, and the services that it names. Close it at the end."""

    def __init__(
        self, endpoint: str, transport: Transport, keys: Keys | None, clock: Clock | None = None
    ) -> None:
        self._transport, self._clock = transport, clock or LoopClock()
        self._name = new_name(keys)
        me = Identity(role="trainer", name=self._name, incarnation=0)
        self._buffer = Question(transport, endpoint, me, wire.BufferToTrainer, self._clock)
        self._others: dict[tuple[str, str], Question] = {}
        self._asked: dict[tuple[str, str], asyncio.Task[wire.Message | None]] = {}
        self._silent: set[tuple[str, str]] = set()

    async def status(self, seconds: float) -> wire.Status:
        """Return the buffer's state. Raises `Unreachable`, or what it refuses with."""
        answer = await self._buffer.ask(seconds)
        if not isinstance(answer, wire.Status):
            raise Unreachable(f"what answers is no buffer, but sent {type(answer).__name__}")
        return answer

    async def look(self, seconds: float) -> Seen:
        """Return the buffer's state, and the figures of the other services that answer in time.

        Nobody waits for a service that was silent: the service is asked all the same, and counts once it has
        answered.
        """
        status = await self.status(seconds)
        found = _services(status)
        for service in self._others.keys() - set(found):
            self._others.pop(service).close()
            self._asked.pop(service, None)
        self._silent.intersection_update(found)
        for service in set(found) - self._asked.keys():
            self._asked[service] = asyncio.create_task(self._ask(*service))
        asked = {service: self._asked[service] for service in found}  # others may look meanwhile
        if patient := [task for service, task in asked.items() if service not in self._silent]:
            await asyncio.wait(patient, timeout=min(seconds / 2, SERVICE_SECONDS))
        services = {}
        for service, task in asked.items():
            if not task.done():
                continue
            if self._asked.get(service) is task:
                del self._asked[service]
            answer = task.result()
            if isinstance(answer, wire.ServiceStatus):
                services[service[0]] = answer
                self._silent.discard(service)
            else:
                self._silent.add(service)
        return Seen(status=status, services=services)

    async def _ask(self, name: str, endpoint: str) -> wire.Message | None:
        if (name, endpoint) not in self._others:
            me = Identity(role="status", name=self._name, incarnation=0)
            union = _UNIONS[name.partition("-")[0]]
            self._others[name, endpoint] = Question(self._transport, endpoint, me, union, self._clock)
        with contextlib.suppress(SeerError):
            return await self._others[name, endpoint].ask(SERVICE_SECONDS)
        return None

    def close(self) -> None:
        """Close all connections."""
        for task in self._asked.values():
            task.cancel()
        for each in (self._buffer, *self._others.values()):
            each.close()


def _services(status: wire.Status) -> list[tuple[str, str]]:
    """Return names and endpoints of the services that have figures; several dgds are numbered."""
    found = []
    for kind in _UNIONS:
        if endpoints := status.services.get(kind, ""):
            several = shards(endpoints)
            names = [f"{kind}-{number}" for number in range(len(several))] if len(several) > 1 else [kind]
            found += list(zip(names, several, strict=True))
    return found
